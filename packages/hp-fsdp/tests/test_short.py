"""The short forms: hsdp by level, modules by size."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hp_fsdp import clip_grad_norm_, fully_shard, hsdp, modules_by_size
from hp_platform import count_collectives
from hp_platform.testing import on_ranks

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from fsdp_models import Block, Net, batch, close, loss_of, same_weights, seeded, train

pytestmark = pytest.mark.framework("torch")


def made(level: str, threshold: int = 0, shard_size: int = -1):
    reference = seeded(Net)
    model = copy.deepcopy(reference)
    for block in model.blocks:
        hsdp(block, shard_size, threshold, level)
    return reference, hsdp(model, shard_size, 0, level)


@on_ranks(2)
@pytest.mark.parametrize(("level", "gathers"), [("level1", (4, 0)), ("level2", (4, 0)), ("level3", (7, 7))])
def test_levels_say_how_often_parameters_are_gathered(level, gathers):
    """Four groups; level 3 gathers the blocks anew for backward, and everything for each micro-batch."""
    reference, model = made(level)
    counted = []
    for _ in range(2):
        with count_collectives() as counts:
            loss_of(model(batch()[1])).backward()
        counted.append(counts["all_gather"])
        assert counts["reduce_scatter"] == 4
    assert tuple(counted) == gathers
    model.zero_grad()
    train(reference, model, steps=2)


@on_ranks(4)
def test_fewer_ranks_than_all_are_replicas():
    reference, model = made("level2", shard_size=2)
    assert model.first.weight.device_mesh.shape == (2, 2)
    train(reference, model, steps=2)


@on_ranks(2)
def test_small_modules_are_not_sharded_and_averaged_and_clipped():
    reference, model = made("level3", threshold=64)
    weight = model.blocks[0].up.weight
    assert weight.to_local().numel() == weight.numel() > model.first.weight.to_local().numel()
    with count_collectives() as counts:
        train(reference, model, steps=2)
    assert counts["all_reduce"] == 2 * 3 + 1  # a block's gradients, each step; and whether ranks agree
    whole, own = batch()
    loss_of(reference(whole)).backward()
    loss_of(model(own)).backward()
    norm = clip_grad_norm_(model.parameters(), 0.01)
    close(
        torch.as_tensor(float(norm)), nn.utils.clip_grad_norm_(reference.parameters(), 0.01).cpu().float(), "norm", 1e-6
    )


@on_ranks(2)
def test_arguments_are_checked():
    with pytest.raises(ValueError, match="level1, level2, level3, got 'level4'"):
        hsdp(nn.Linear(2, 2), optimizer_level="level4")
    with pytest.raises(ValueError, match="divide the 2 ranks, got 3"):
        hsdp(nn.Linear(2, 2), 3)
    with pytest.raises(ValueError, match="KiB, 0 or more, got -1"):
        hsdp(nn.Linear(2, 2), threshold=-1)
    with pytest.raises(NotImplementedError, match="below the threshold of 64 KiB.*threshold=0"):
        hsdp(nn.Linear(2, 2), 1)


def names(model: nn.Module, max_bytes: int) -> list[str]:
    chosen = modules_by_size(model, max_bytes)
    by_module = {module: name for name, module in model.named_modules()}
    return [by_module[module] for module in chosen]


def test_modules_by_size():
    model = Net(blocks=2)
    block = sum(p.nbytes for p in Block().parameters())
    assert names(model, 100_000) == [""]
    assert names(model, block) == ["first", "blocks.0", "blocks.1", "last", ""]
    assert names(model, block - 4) == [
        "first",
        "blocks.0.norm",
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1.norm",
        "blocks.1.up",
        "blocks.1.down",
        "last",
        "",
    ]
    model.last.weight = model.first.weight  # neither of the two that share it
    assert names(model, block) == ["blocks.0", "blocks.1", ""]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        modules_by_size(model, 0)


@on_ranks(2)
def test_groups_by_size_train():
    reference = seeded(Net)
    model = copy.deepcopy(reference)
    for module in modules_by_size(model, 2000):
        fully_shard(module)
    train(reference, model, steps=2)
    same_weights(model, reference)
