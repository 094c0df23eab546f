"""A plan issues no collective more than its layout needs."""

from __future__ import annotations

import torch

from hp_plan import ParallelPlan, apply, build_model
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks


def counted(layers: int, *, styles: str, mesh: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of one forward and of one backward pass."""
    overrides = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    plan = ParallelPlan.from_dict(
        {
            "model": {"config": "LlamaConfig", "overrides": overrides},
            "mesh": mesh,
            "styles": styles,
            "fsdp": {} if set(mesh) == {"tp"} else {"groups": ["model.layers.*"]},
        }
    )
    model = apply(build_model(plan, device=device_type()), plan)
    tokens = torch.arange(16, device=device_type()).view(2, 8)
    # The first backward makes gradient buffers; the counted one is any later one.
    for _ in range(2):
        with count_collectives() as forward:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        with count_collectives() as backward:
            loss.backward()
    return dict(forward), dict(backward)


def a_layer(styles: str, mesh: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """What one more layer adds."""
    small, large = counted(1, styles=styles, mesh=mesh), counted(2, styles=styles, mesh=mesh)
    return tuple(  # type: ignore[return-value]
        {kind: more[kind] - less.get(kind, 0) for kind in more if more[kind] != less.get(kind, 0)}
        for less, more in zip(small, large)
    )


@on_ranks(2)
def test_tensor_parallel_layer_reduces_twice_each_way():
    assert a_layer("auto", {"tp": 2}) == ({"all_reduce": 2}, {"all_reduce": 2})


@on_ranks(2)
def test_sequence_parallel_layer_gathers_and_scatters_twice_each_way():
    forward, backward = a_layer("auto-sequence", {"tp": 2})
    assert forward == {"all_gather": 2, "reduce_scatter": 2}
    assert backward == {"all_gather": 2, "reduce_scatter": 2}
