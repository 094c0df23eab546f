"""Which ranks drop the same: Note [Draws of a step] in `hp_plan.checks.alike`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hp_dtensor import DTensor
from hp_plan import ParallelPlan, apply, build_model
from hp_plan.extend import data_parallel_rows
from hp_plan.torch.extend import backward_loss
from hp_platform import get_platform, manual_seed
from hp_testing import device_type, run_ranks

pytestmark = pytest.mark.framework("torch")
GPT2 = {
    "config": "GPT2Config",
    "overrides": {
        "vocab_size": 64,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.5,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
LLAMA = {  # without dropout of its own
    "config": "LlamaConfig",
    "overrides": {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
}


def dropped(mesh, steps=(7,), **run):
    """What each dropout of this rank's part of a model keeps in some steps, as text."""
    pytest.importorskip("transformers")
    plan = ParallelPlan.from_dict(
        {
            "model": LLAMA if "cp" in mesh else GPT2,  # which cp takes
            "mesh": mesh,
            "data": {"batch_size": 8, "sequence_length": 16},
            "run": run,
        }
    )
    model = build_model(plan).to(device_type()).train()
    for layer in model.model.layers if "cp" in mesh else ():
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    model = apply(model, plan)
    stages = [model] if isinstance(model, nn.Module) else model.stages.values()
    kept: list[str] = []

    def note(module, args, output):
        if not module.training:
            return  # of the comparison with a whole sequence
        whole = output.full_tensor() if isinstance(output, DTensor) else output
        kept.append("".join(str(int(each != 0)) for each in whole.detach().flatten()[:64]))

    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, nn.Dropout) and module.p:
            module.register_forward_hook(note)
    for step in steps:
        manual_seed(step)
        tokens = torch.randint(64, (8, 16), device=device_type())
        backward_loss(plan, model, tokens[data_parallel_rows(plan)])
        assert get_platform().random.seeded() == step  # the next step's draws on all ranks begin with the same
    return kept


@pytest.mark.parametrize(
    ("mesh", "alike"),
    [
        ({"dp_replicate": 2, "dp_shard": 2}, None),
        ({"dp_shard": 2, "tp": 2}, {0: 1, 2: 3}),
        ({"dp_shard": 2, "cp": 2}, None),
        ({"pp": 2, "dp_shard": 2}, None),
    ],
    ids=["dp", "tp", "cp", "pp"],
)
def test_ranks_drop_the_same_only_where_they_hold_the_same(mesh, alike):
    everyone = run_ranks(4, dropped, mesh)
    for rank, kept in enumerate(everyone):
        assert kept and len(set(kept)) == len(kept)  # of each layer and micro-batch
        for other, theirs in enumerate(everyone[:rank]):
            if alike and alike.get(other) == rank:
                assert kept == theirs
            else:
                assert not set(kept) & set(theirs), (other, rank)


def test_what_is_dropped_depends_on_the_sample_and_the_step():
    two = run_ranks(2, dropped, {"dp_shard": 2}, accumulate=2)
    (one,) = run_ranks(1, dropped, {}, accumulate=4)
    assert [each for kept in two for each in kept] == one
    (steps,) = run_ranks(1, dropped, {}, steps=(7, 8, 7))
    first, second, again = (steps[at : at + len(steps) // 3] for at in range(0, len(steps), len(steps) // 3))
    assert first == again and not set(first) & set(second)
