"""Unmodified models of transformers in stages: loss, every gradient and every weight are those of one process."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hp_pipeline
from hp_testing import on_ranks

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from pipeline_transformers import batch, build, pipelined, reference

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

FAMILIES = ["Llama", "Qwen3", "Gemma2", "Mixtral", "Qwen3Moe", "GPT2"]


def close(tensor, expected, name):
    assert torch.allclose(tensor, expected, rtol=1e-12, atol=1e-12), f"{name}: {(tensor - expected).abs().max():.1e}"


def compare(family, schedule, micro_batches=4, ignored=False, **options):
    torch.set_num_threads(1)
    whole = build(family)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind = getattr(hp_pipeline, schedule)
    model = pipelined(copy.deepcopy(whole), kind, rank, ranks, micro_batches, **options)
    rows = 2 * micro_batches
    expected = reference(whole, rows, micro_batches, ignored)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss in expected:
        optimizer.zero_grad()
        ids, labels = batch(rows, ignored)
        losses = model.run(ids, labels=labels)
        assert len(losses) == (micro_batches if len(model.schedule.pipeline.placement) - 1 in model.stages else 0)
        if losses:
            close(torch.stack(losses).mean(), loss, "loss")
        optimizer.step()
    named = dict(whole.named_parameters(remove_duplicate=False))
    own = dict(model.named_parameters())
    assert own
    for name, parameter in own.items():
        close(parameter.grad, named[name].grad, f"gradient of {name}")
        close(parameter, named[name], name)
    owners = [None] * ranks
    dist.all_gather_object(owners, sorted(own))
    names = {name for name, _ in whole.named_parameters()}
    assert names <= {name for each in owners for name in each} <= set(named)


@on_ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBV"])
def test_two_ranks_equal_one_process(family, schedule):
    compare(family, schedule, ignored=True)


@on_ranks(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_three_ranks_equal_one_process(family):
    compare(family, "Schedule1F1B", split="even")
