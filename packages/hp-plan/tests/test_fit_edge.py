"""What `fit` says fits does so in a process of that memory, and one sample more does not."""

from __future__ import annotations

import os
import platform
from typing import Any

import pytest
from small_memory import open_group, train

from hp_plan import ParallelPlan, dry_run, fit
from hp_testing import device_type

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.skipif(device_type() != "cpu", reason="the host's memory is limited"),
    pytest.mark.skipif(platform.system() != "Linux", reason="control groups are Linux's"),
]
WIDE: dict[str, Any] = {
    "model": {
        "config": "LlamaConfig",
        "overrides": {
            "vocab_size": 8192,
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 1024,
        },
    },
    "data": {"sequence_length": 1024, "batch_size": 4},
    "run": {"dtype": "float32", "grad_clip": 1.0},
}
"""A plan of which each sample takes some 100 MiB, most of it for the logits of its tokens."""


@pytest.mark.thorough
def test_the_largest_micro_batch_runs_and_the_next_is_ended_by_the_kernel() -> None:
    try:
        open_group(f"hp_fit_{os.getpid()}").path.rmdir()
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here: {error}")
    tables = {size: {**WIDE, "data": {**WIDE["data"], "batch_size": size}} for size in (4, 5)}
    four, five = (dry_run(ParallelPlan.from_dict(each)).peak for each in tables.values())
    memory = (four + five) // 2  # half a sample's bytes are for what an allocator and kernels need on top
    found = fit(ParallelPlan.from_dict(WIDE), memory=memory, most=16)
    assert (found.value, found.peak, found.beyond) == (4, four, (5, five))
    assert train(tables[4], memory) is not None
    assert train(tables[5], memory) is None
