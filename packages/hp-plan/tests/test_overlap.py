"""`[communication] async_tensor_parallel`: what it changes, and where it would change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_plan import ParallelPlan, lint, verify
from hp_styles.torch import products
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def _plan(mesh: dict[str, int], styles: str = "auto", **sections: Any) -> ParallelPlan:
    overrides = {"vocab_size": 36, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
    overrides |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return ParallelPlan.from_dict(
        {
            "model": {"config": "LlamaConfig", "overrides": overrides},
            "mesh": mesh,
            "styles": styles,
            "communication": {"async_tensor_parallel": "auto"},
            "data": {"batch_size": 2, "sequence_length": 64},
            **sections,
        }
    )


@on_ranks(2)
@pytest.mark.parametrize("chunks", [False, True], ids=["as a CPU chooses", "in chunks"])
def test_it_equals_one_process(chunks: bool) -> None:
    torch.set_num_threads(1)
    plan = _plan({"tp": 2}, "auto-sequence")
    called = []
    with pytest.MonkeyPatch.context() as patch:
        real = products.scattered_linear
        patch.setattr(products, "scattered_linear", lambda *args, **kwargs: called.append(1) or real(*args, **kwargs))
        if chunks:
            patch.setattr(products, "choose", lambda *args, **kwargs: ("chunks", "for the test"))
        result = verify(plan, tolerance=1e-9)
    assert result.passed, f"{result.first} differs: {result.largest:.1e}"
    assert bool(called) == (chunks or device_type() != "cpu")  # which alone never overlaps


WITHOUT = {
    "one rank": ({"mesh": {"dp_shard": 2}}, "got 'auto', but mesh.tp is 1, so no layer is sharded"),
    "no sequence": ({"mesh": {"tp": 2}}, "got 'auto', but no style scatters the output of a Linear"),
    "an adapter": (
        {"mesh": {"tp": 2}, "styles": "auto-sequence", "adapter": {"kind": "lora"}},
        "got 'auto', but the layers of an adapter have a product of their own",
    ),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_where_it_would_change_nothing_it_is_refused(name: str) -> None:
    sections, text = WITHOUT[name]
    diagnostics = lint(_plan(**sections))
    found = [each.message for each in diagnostics if each.key == "communication.async_tensor_parallel"]
    assert len(found) == 1 and found[0].startswith(text)
