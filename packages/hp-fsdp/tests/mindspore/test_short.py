"""The short forms: hsdp by level, Cells by size."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore import mint, nn

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from fsdp_cells import Block, Net, batch, close, differentiated, double, seeded, train

from hp_fsdp import clip_grad_norm_, fully_shard, hsdp, modules_by_size
from hp_platform import count_collectives
from hp_platform.testing import on_ranks

pytestmark = pytest.mark.framework("mindspore")


def made(level: str, threshold: int = 0, shard_size: int = -1):
    reference, model = seeded(double(Net)), seeded(double(Net))
    for block in model.blocks:
        hsdp(block, shard_size, threshold, level)
    return reference, hsdp(model, shard_size, 0, level)


@on_ranks(2)
@pytest.mark.parametrize(("level", "gathers"), [("level1", 4), ("level2", 4), ("level3", 7)])
def test_levels_say_how_often_parameters_are_gathered(level: str, gathers: int):
    """Four groups; levels 1 and 2 gather them once for all micro-batches of a step."""
    reference, model = made(level)
    step = differentiated(model)
    counted = []
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        with count_collectives() as counts:
            step(batch(dtype=np.float64)[1])
        counted.append(counts["all_gather"])
    assert counts["reduce_scatter"] == 4
    assert counted == [gathers, gathers if level == "level3" else 0]
    train(reference, model, steps=2)


@on_ranks(4)
def test_fewer_ranks_than_all_are_replicas():
    reference, model = made("level2", shard_size=2)
    assert model.first.weight.device_mesh.shape == (2, 2)
    train(reference, model, steps=2)


@on_ranks(2)
def test_small_cells_are_not_sharded_and_averaged_and_clipped():
    reference, model = made("level3", threshold=64)
    weight = model.blocks[0].up.weight
    assert weight.to_local().numel() == weight.numel() > model.first.weight.to_local().numel()
    with count_collectives() as counts:
        train(reference, model, steps=2)
    assert counts["all_reduce"] == 2 * 3 + 1  # a block's gradients, each step; whether all ranks have the same model
    everything, own = batch(dtype=np.float64)
    _, expected = differentiated(reference, dtensors=False)(everything)
    _, gradients = differentiated(model)(own)
    norm = math.sqrt(sum(float((gradient.asnumpy() ** 2).sum()) for gradient in expected))
    close(clip_grad_norm_(model.trainable_params(), 0.01, gradients=gradients).asnumpy(), norm, "norm", 1e-12)


@on_ranks(2)
def test_arguments_are_checked():
    cell = mint.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="level1, level2, level3, got 'level4'"):
        hsdp(cell, optimizer_level="level4")
    with pytest.raises(ValueError, match="divide the 2 ranks, got 3"):
        hsdp(cell, 3)
    with pytest.raises(ValueError, match="KiB, 0 or more, got -1"):
        hsdp(cell, threshold=-1)
    with pytest.raises(NotImplementedError, match=r"Linear is below the threshold of 64 KiB.*threshold=0"):
        hsdp(cell, 1)


def names(model: nn.Cell, max_bytes: int) -> list[str]:
    by_cell = {id(cell): name for name, cell in model.cells_and_names()}
    return [by_cell[id(cell)] for cell in modules_by_size(model, max_bytes)]


def test_cells_by_size():
    model = Net(blocks=2)
    block = sum(4 * math.prod(p.shape) for p in Block().get_parameters())
    assert names(model, 100_000) == [""]
    assert names(model, block) == ["first", "blocks.0", "blocks.1", "last", ""]
    parts = ["first", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "last", ""]
    assert names(model, block - 4) == parts
    model.last.weight = model.first.weight  # neither of the two that share it
    assert names(model, block) == ["blocks.0", "blocks.1", ""]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        modules_by_size(model, 0)


@on_ranks(2)
def test_groups_by_size_train():
    reference, model = seeded(double(Net)), seeded(double(Net))
    for cell in modules_by_size(model, 2000):
        fully_shard(cell)
    train(reference, model, steps=2)
