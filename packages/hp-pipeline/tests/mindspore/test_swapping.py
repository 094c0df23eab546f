"""Saved tensors on the host between forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
from pipeline_cells import Net, Stage, batch

import hp_pipeline
from hp_offload import SwapManager
from hp_pipeline import PipelineStage
from hp_platform import get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.device


@on_ranks(2)
def test_swapping_changes_no_bit():
    rank, results = get_platform().groups.rank(), []
    manager = SwapManager()
    with manager.record() as events:
        for swap in (False, True):
            stage = PipelineStage(Stage(Net(2), rank), rank, 2)
            schedule = hp_pipeline.ScheduleGPipe(stage, 3, swap=swap)
            x, target = batch(6)
            losses = schedule.run(x, target=target)
            assert bool(events) == swap
            gradients = schedule.take_gradients(stage.submodule.trainable_params())
            results.append([each.asnumpy() for each in (*losses, *gradients)])
    assert all(map(np.array_equal, *results))
    assert sum(what == "wait_load" for what, _ in events) == 3
