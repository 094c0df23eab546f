"""Sharded Cells train as a single process does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from fsdp_cells import pair, train

from hp_platform.testing import on_ranks


@on_ranks(1, 2, 4)
def test_training_equals_a_single_process():
    reference, model = pair()
    before = list(model.trainable_params())
    train(reference, model)
    assert all(a is b for a, b in zip(before, model.trainable_params()))
