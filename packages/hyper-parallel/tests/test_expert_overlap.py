"""Experts under pipelines whose forwards and backwards run together: bits, and the order of exchanges."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import init_device_mesh
from hp_moe import ExpertParallel, MoE, overlap_experts
from hp_pipeline import (
    CommComputeOverlap,
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    placed,
)
from hp_platform.communication.checks import observers
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="stages of the host's memory, from which hccl does not send"),
]

WIDTH, COUNT = 8, 4


class Block(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.attention, self.mixture, self.again = nn.Linear(WIDTH, WIDTH), MoE(WIDTH, 8, 4, 2), again

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False) if self.again else self.compute(x)

    def compute(self, x):
        return x + self.mixture(torch.tanh(self.attention(x)))


class Loss(nn.Module):
    def forward(self, x):
        return x.square().mean()


@contextmanager
def noted(group):
    """List the collectives of a group: where they begin and end."""
    listed, count = [], iter(range(100000))

    def note(kind, size, where):
        if where is not group:
            return None
        number = next(count)
        listed.append((number, kind, "begin"))
        return lambda: listed.append((number, kind, "end"))

    observers.append(note)
    try:
        yield listed
    finally:
        observers.remove(note)


def train(kind, style, overlapped, layers, again, **options):
    """Run one batch of a pipeline of two ranks, each beside one with other experts."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "ep"))
    place = mesh.get_local_rank("pp")
    overlap = CommComputeOverlap() if overlapped else None
    torch.manual_seed(place)
    stages = []
    for stage in [stage for stage, rank in enumerate(placed(kind.shape, 2)) if rank == place]:
        blocks = [Block(again) for _ in range(layers)]
        module = nn.Sequential(*blocks, *([Loss()] if stage == 3 else [])).double().to(device_type())
        for block in blocks:
            parallelize_module(block.mixture.experts, mesh["ep"], style)
        if overlap is not None:
            assert overlap_experts(module, overlap, stage=stage) == layers
        stages.append(PipelineStage(module, stage, 4))
    # The schedule proves that its pairs meet in opposite roles.
    schedule = kind(stages, COUNT, group=mesh.get_group("pp"), overlap=overlap, **options)
    torch.manual_seed(10 + dist.get_rank())
    losses = []
    with noted(mesh.get_group("ep")) as listed:
        x = torch.randn(3 * COUNT, WIDTH, dtype=torch.float64, device=device_type(), requires_grad=True)
        losses += schedule.run(x)
        losses += schedule.run(x)
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                 for stage in stages for p in stage.submodule.parameters()]  # fmt: skip
    return [*losses, *gradients], listed, mesh.get_group("ep")


def beside(listed):
    """Count the exchanges that begin while another one is under way."""
    events = [event for _, _, event in listed]
    return sum(one == other == "begin" for one, other in itertools.pairwise(events))


@on_ranks(4)
@pytest.mark.parametrize(("kind", "style", "layers", "again", "options"), [
    (ScheduleInterleaved1F1B, ExpertParallel(), 2, False, {"overlap_b_f": True}),
    (ScheduleInterleaved1F1B, ExpertParallel(combine="exact"), 1, True, {"overlap_b_f": True}),
    (ScheduleInterleaved1F1B, ExpertParallel(), 1, False, {"overlap_b_f": True, "enable_dxdw_split": True}),
    (ScheduleDualPipeV, ExpertParallel(), 1, False, {}),
])  # fmt: skip
def test_pairs_meet_at_experts_with_the_bits_of_one_after_the_other(kind, style, layers, again, options):
    apart, alone, _ = train(kind, style, False, layers, again, **options)
    together, listed, group = train(kind, style, True, layers, again, **options)
    assert all(torch.equal(one, other) for one, other in zip(apart, together, strict=True))
    assert not beside(alone) and beside(listed)
    # All ranks of the group began and ended their collectives in the same order.
    both: list = [None, None]
    dist.all_gather_object(both, listed, group=group)
    assert both[0] == both[1]
