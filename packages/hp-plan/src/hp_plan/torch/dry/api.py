"""The public side: a plan's distinct ranks, each played in a process without memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hp_plan.dry.report import DryReport, RankReport
from hp_plan.dry.stages import StagePeers, play_stages
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.sections import MeshSection
from hp_plan.torch.dry.playing import dry
from hp_plan.torch.dry.reading import report_of

_PRELOAD = ("hp_plan.torch.dry.api", "hp_plan.torch.library.pretrained")
_BUDGET = Diagnostic(
    "memory.budget",
    "what is swapped and computed again to keep to it depends on measured seconds, of which a dry run has none",
    "write memory.recompute or memory.swap in its place, and compare the peak with the budget",
)


def dry_run(
    plan: ParallelPlan,
    *,
    ranks: int | None = None,
    rank: int | None = None,
    memory: bool = False,
    kernels: bool = False,
) -> DryReport:
    """Play a plan's ranks on tensors without memory, and tell what each holds, computes and sends in a step.

    No device is used and no rank is started: each distinct rank is a process on this machine that runs the training
    step as a real rank does, on torch's meta device, where operators compute shapes alone. Bytes are those of tensors;
    an allocator's rounding, and workspaces of kernels and of communication, come on top. So do the copies of shards
    that `[fsdp] offload` makes on the device, of one group at a time; the host's memory is counted apart. Blocks that
    torch compiles are played uncompiled, which may hold more.

    Example:
        >>> print(dry_run(ParallelPlan.load("plan.toml"), ranks=1024))

    Args:
        plan: the plan.
        ranks: play the plan on as many ranks, with as many samples for each; `dp_shard` takes what the other axes
            leave. None is the plan's own number.
        rank: play this rank alone, with pp its column of stages. None is each distinct place: every stage, at the first
            and the last rank of the other axes, between which uneven shards lie.
        memory: with the bytes of each kind at each operation, for a picture.
        kernels: with how often each distinct kernel is called.

    Raises:
        PlanError: the plan does not lint clean, can't have so many ranks, or has `[memory] budget`, which measured
            seconds decide on.
        RuntimeError: the model can't be played; it says which operator or which value was missing.
    """
    if ranks is not None:
        plan = spread_over(plan, ranks)
    if plan.memory.budget is not None:
        raise PlanError([_BUDGET])
    mesh = plan.mesh
    if rank is not None and not 0 <= rank < mesh.world_size:
        raise ValueError(f"dry_run: rank {rank} is none of {mesh.world_size} ranks, 0 to {mesh.world_size - 1}")
    across = mesh.world_size // mesh.pp  # ranks of a stage: pp is the outermost axis
    columns = [rank % across] if rank is not None else sorted({0, across - 1})
    reports: list[RankReport] = []
    for column in columns:
        stages = {stage: (plan, stage * across + column, memory, kernels) for stage in range(mesh.pp)}
        played = play_stages(play_rank, stages, functools.partial(stage_of, mesh), preload=_PRELOAD)
        reports += [played[stage] for stage in sorted(played)]
    return DryReport(mesh.described, mesh.world_size, tuple(sorted(reports, key=lambda each: each.rank)))


def stage_of(mesh: MeshSection, rank: int) -> int:
    """Return the pipeline stage of a rank.

    Args:
        mesh: of the plan.
        rank: its number.
    """
    return mesh.coordinate(rank).get("pp", 0)


def play_rank(plan: ParallelPlan, rank: int, memory: bool, kernels: bool, peers: StagePeers) -> RankReport:
    """Play a rank in this process, which has no other use.

    Args:
        plan: the plan.
        rank: the rank.
        memory: with the bytes of each kind at each operation.
        kernels: with calls of distinct kernels.
        peers: what other stages say.
    """
    torch.set_num_threads(1)
    with dry(plan, rank, peers=peers, modules=True, kernels=kernels) as played:
        return report_of(played, rank, memory=memory)


def spread_over(plan: ParallelPlan, ranks: int) -> ParallelPlan:
    """Return the plan on another number of ranks: dp_shard has the rest, and each rank as many samples as before.

    Args:
        plan: the plan.
        ranks: their number.

    Raises:
        PlanError: the other axes do not divide it.
    """
    mesh = plan.mesh
    others = mesh.world_size // mesh.dp_shard
    if ranks < 1 or ranks % others:
        message = f"{ranks} ranks are not a multiple of {others}, the product of the plan's other axes"
        raise PlanError([Diagnostic("mesh.dp_shard", message, f"take a multiple of {others}")])
    shards = ranks // others
    samples: Any = plan.data.batch_size // mesh.dp_shard * shards
    return replace(plan, mesh=replace(mesh, dp_shard=shards), data=replace(plan.data, batch_size=samples))


__all__: Sequence[str] = ("dry_run",)
