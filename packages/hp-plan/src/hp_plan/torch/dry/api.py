"""The public side: ranks of a plan, each played in a process of its own, without memory or on this device."""

from __future__ import annotations

import functools
import gc
import os
import re
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from hp_moe.extend import skewed
from hp_offload.extend import parse_size
from hp_plan.dry.report import DryReport, RankReport
from hp_plan.dry.simulated import Simulated, check_bubble, estimate
from hp_plan.dry.stages import StagePeers, play_stages
from hp_plan.dry.trace import Trace
from hp_plan.features.communication import traffic
from hp_plan.linting import examine, order_axes
from hp_plan.plan import ParallelPlan
from hp_plan.port import models
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.sections import MeshSection
from hp_plan.structure.outline import ModelOutline
from hp_plan.torch.build import build_empty
from hp_plan.torch.dry.playing import dry
from hp_plan.torch.dry.reading import report_of
from hp_plan.torch.dry.simulating import listen, run_rank
from hp_plan.torch.timing.kernels import time_kernels
from hp_plan.torch.timing.probing import probe
from hp_plan.torch.timing.ranks import check_devices, on_ranks, ranks_here, time_steps
from hp_plan.tuning.fitting import Fit, Quantity
from hp_plan.tuning.fitting import fit as fit_quantity
from hp_plan.tuning.hardware import Hardware
from hp_plan.tuning.search import Tuned
from hp_plan.tuning.search import tune as search
from hp_plan.tuning.space import ModelSizes
from hp_platform import get_platform
from hp_platform.extend import divide_threads

_PRELOAD = (
    "hp_plan.torch.dry.api",
    "torch._dynamo",  # which the first operator on meta imports
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.integrations.moe",
)
"""Imported once for all ranks that are played; what is not installed is left out."""
_DISTRIBUTING = ("mesh", "styles", "communication", "context", "pipeline", "fsdp", "experts", "memory", "run")
"""Sections of a plan in which it says how to distribute a model."""
_MEASURED = 5  # steps of a plan that is run for real
_BUDGET = Diagnostic(
    "memory.budget",
    "what is swapped and computed again to keep to it depends on measured seconds, of which a dry run has none",
    "write memory.recompute or memory.swap in its place, and compare the peak with the budget",
)


def _preload(plan: ParallelPlan) -> tuple[str, ...]:
    """Name what the first process imports for all that follow: the model's code too, where it is called as usual."""
    if plan.model.config is None:
        return _PRELOAD
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plan.model.config.removesuffix("Config")).lower()
    return (*_PRELOAD, f"transformers.models.{name}.modeling_{name}")


def _check_counted(plan: ParallelPlan) -> None:
    if plan.memory.budget is not None:
        raise PlanError([_BUDGET])


def dry_run(
    plan: ParallelPlan,
    *,
    ranks: int | None = None,
    rank: int | None = None,
    hardware: Hardware | str | None = None,
    routes: float = 1.0,
    memory: bool = False,
    kernels: bool = False,
) -> DryReport:
    """Play a plan's ranks on tensors without memory, and tell what each holds, computes and sends in a step.

    No device is used and no rank is started: each distinct rank is a process on this machine that runs the training
    step as a real rank does, on torch's meta device, where operators compute shapes alone. Bytes are those of tensors;
    an allocator's rounding, and workspaces of kernels and of communication, come on top. So do the copies
    that `[fsdp] offload` and `[memory] homes` make on an accelerator: of one group's shard at a time, and where no axis
    shards of two groups. The host's memory is counted apart. Blocks that torch compiles are played uncompiled, which
    may hold more.

    Example:
        >>> print(dry_run(ParallelPlan.from_toml("plan.toml"), ranks=1024))

    Args:
        plan: the plan.
        ranks: play the plan on as many ranks, with as many samples for each; `dp_shard` takes what the other axes
            leave. None is the plan's own number.
        rank: play this rank alone, with pp its column of stages. None is each distinct place: the first rank of every
            stage, and where shards are uneven the last one too, between which the others lie.
        hardware: a machine, or the name or file of one, see `Hardware.load`: kernels are chosen as on its kind of
            device, and the report says whether its ranks have room for the peak. None is this machine's kind.
        routes: the tokens of each layer's first expert over the mean, from 1 (balanced) to 2; they fall evenly to the
            last.
        memory: with the bytes of each kind at each operation, for a picture.
        kernels: with how often each distinct kernel is called.

    Raises:
        PlanError: the plan does not lint clean, can't have so many ranks, or has `[memory] budget`, which measured
            seconds decide on.
        RuntimeError: the model can't be played; it says which operator or which value was missing.
    """
    if ranks is not None:
        plan = spread_over(plan, ranks)
    skewed(routes)
    plan = order_axes(plan)
    machine = Hardware.load(hardware) if isinstance(hardware, str) else hardware
    _check_counted(plan)
    mesh = plan.mesh
    if rank is not None:
        _check_rank("dry_run", rank, mesh)
    across = mesh.world_size // mesh.pp  # ranks of a stage: pp is the outermost axis
    columns = [0 if rank is None else rank % across]
    reports: list[RankReport] = []
    for column in columns:
        settings = memory, kernels, routes, None if machine is None else machine.kind
        stages = {stage: (plan, stage * across + column, *settings) for stage in range(mesh.pp)}
        played = play_stages(play_rank, stages, functools.partial(stage_of, mesh), preload=_preload(plan))
        reports += [played[stage] for stage in sorted(played)]
        if rank is None and len(columns) == 1 and across > 1 and any(each.uneven for each in reports):
            columns.append(across - 1)
    report = _with_traffic(
        DryReport(mesh.described, mesh.world_size, tuple(sorted(reports, key=lambda each: each.rank))), plan
    )
    return report if machine is None else replace(report, machine=machine.name, room=machine.room)


def _with_traffic(report: DryReport, plan: ParallelPlan) -> DryReport:
    fullest = max(report.ranks, key=lambda each: each.peak.live)
    sent: dict[tuple[str, tuple[str, ...]], float] = {}
    for (kind, _, axes), count in fullest.trace.collectives.items():
        if axes:
            sent[kind, axes] = sent.get((kind, axes), 0) + count.bytes
    usual = None
    if plan.mesh.order and plan.mesh.ranks_per_host is not None:
        other = replace(plan, mesh=replace(plan.mesh, order=()))
        usual = sum(each.between for each in traffic(other, sent))
    return replace(report, traffic=tuple(traffic(plan, sent)), usual=usual)


def _check_rank(name: str, rank: int, mesh: MeshSection) -> None:
    if not 0 <= rank < mesh.world_size:
        raise ValueError(f"{name}: rank {rank} is none of {mesh.world_size} ranks, 0 to {mesh.world_size - 1}")


def stage_of(mesh: MeshSection, rank: int) -> int:
    """Return the pipeline stage of a rank.

    Args:
        mesh: of the plan.
        rank: its number.
    """
    return mesh.coordinate(rank).get("pp", 0)


def play_rank(
    plan: ParallelPlan, rank: int, memory: bool, kernels: bool, routes: float, kind: str | None, peers: StagePeers
) -> RankReport:
    """Play a rank in this process, which has no other use.

    Args:
        plan: the plan.
        rank: the rank.
        memory: with the bytes of each kind at each operation.
        kernels: with calls of distinct kernels.
        routes: the first expert's tokens over the mean.
        kind: of the device that is played; None is this machine's.
        peers: what other stages say.
    """
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not searched each time that the collector runs
    with dry(plan, rank, peers=peers, routes=skewed(routes), kind=kind, modules=True, kernels=kernels) as played:
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


def simulate_rank(
    plan: ParallelPlan,
    *,
    ranks: int | None = None,
    rank: int = 0,
    hardware: Hardware | str | None = None,
    steps: int = 5,
    routes: float = 1.0,
) -> Simulated:
    """Run a rank of a cluster on this machine's device: its compute and memory are measured, its messages priced.

    The rank's kernels run, on its part of the model and of the batch. Each message is played by a copy on the device,
    as if the other ranks held what this one does, whose seconds are left out; so tokens, weights and losses mean
    nothing. With pp the other stages are played without memory first, for what they say. Weights of models of
    transformers are drawn, and not read. On a CPU a rank has one core.

    Example:
        >>> print(simulate_rank(ParallelPlan.from_toml("plan.toml"), ranks=64, hardware="h100-8"))

    Args:
        plan: the plan.
        ranks: as `dry_run` takes it.
        rank: the one to run.
        hardware: the machine whose network prices the messages, or its name or file, see `Hardware.load`. None is
            "h100-8" on CUDA, "910b-8" on an NPU and "cpu" on a CPU.
        steps: how many, of which the first is not counted; three more go before them, to count bytes and messages.
        routes: as `dry_run` takes it.

    Raises:
        PlanError: as `dry_run`, or of a schedule whose bubble has no formula.
        ValueError: no such rank, fewer than 2 steps, or hardware that is not known or lacks the plan's dtype; or the
            steps made a weight that is not finite.
        MemoryError: the device's memory does not suffice.
    """
    if ranks is not None:
        plan = spread_over(plan, ranks)
    skewed(routes)
    mesh, kind = plan.mesh, get_platform().devices.kind
    _check_rank("simulate_rank", rank, mesh)
    if steps < 2:
        raise ValueError(f"simulate_rank: takes 2 steps or more, of which the first is not counted, got {steps}")
    check_bubble(plan)
    _check_counted(plan)
    named = {"cuda": "h100-8", "npu": "910b-8"}.get(kind, "cpu") if hardware is None else hardware
    machine = Hardware.load(named) if isinstance(named, str) else named
    machine.rate(plan.fsdp.param_dtype or plan.run.dtype)
    place, said = functools.partial(stage_of, mesh), None
    own, across = stage_of(mesh, rank), mesh.world_size // mesh.pp
    if mesh.pp > 1:
        stages = {stage: (plan, stage * across + rank % across, steps, routes) for stage in range(mesh.pp)}
        said = play_stages(listen, stages, place, preload=_preload(plan))[own]
    try:
        played = play_stages(run_rank, {own: (plan, rank, steps, routes, said)}, place, preload=_preload(plan))
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"simulate_rank: rank {rank} needs more memory than the device has: {error}") from error
    device, measured, allocated, report = played[own]
    communication, seconds = estimate(plan, report.trace, measured, machine)
    return Simulated(
        mesh=mesh.described,
        world_size=mesh.world_size,
        device=device,
        steps=steps - 1,
        measured=measured,
        peak=report.peak.live if allocated is None else allocated,
        allocated=allocated is not None,
        hardware=machine.name,
        communication=communication,
        seconds=seconds,
        report=report,
    )


def fit(
    plan: ParallelPlan,
    *,
    memory: int | str,
    quantity: Quantity = "micro_batch",
    most: int = 4096,
    ranks: int | None = None,
) -> Fit:
    """Find the largest micro-batch, sequence length or number of layers of a plan that fits a memory, by dry runs.

    Example:
        >>> print(fit(ParallelPlan.from_toml("plan.toml"), memory="64GiB"))

    Args:
        plan: the plan; all else stays as it says.
        memory: of each rank, in bytes, or such as "64GiB". What an allocator, kernels and communication need on top is
            to be left out of it.
        quantity: "micro_batch" (samples), "sequence_length" (tokens) or "layers".
        most: the largest value to try.
        ranks: of the plan, as `dry_run` takes it.

    Returns:
        The answer and the next value that does not fit; or by how much the least does not fit, and which single change
        would be enough.

    Raises:
        PlanError: as `dry_run`.
        ValueError: a size that can't be read, or layers of a model without transformers' configuration.
    """
    spread = plan if ranks is None else spread_over(plan, ranks)
    room = parse_size(memory) if isinstance(memory, str) else memory
    sizes = _sizes(spread) if spread.model.of_transformers else None
    return fit_quantity(spread, lambda each: dry_run(each).peak, room, quantity=quantity, most=most, model=sizes)


def tune(
    plan: ParallelPlan | Mapping[str, Any],
    *,
    ranks: int,
    hardware: Hardware | str | None = None,
    free: Collection[str] = ("mesh",),
    top: int = 5,
    symbolic: bool = False,
    measure: int = 0,
) -> Tuned:
    """Find the fastest plans of a number of ranks that fit a machine.

    Traces of a few small plans lead to the memory and the work of all; the best by the machine's rates are then played
    whole, which makes their bytes exact. Where the machine is this one, their kernels are timed, each alone, and as
    many of them as asked for are run for real. Seconds that are not measured rank plans, and are no promise.

    Example:
        >>> best = tune(ParallelPlan.from_toml("plan.toml"), ranks=1024, hardware="h100-8").candidates[0]

    Args:
        plan: what is not to be chosen; or the tables of a plan's file, of which only what they name is kept.
        ranks: their number.
        hardware: a machine, or the name or file of one, see `Hardware.load`. None is this one, which is measured first
            (see `probe`).
        free: keys or sections that are chosen although the plan gives them.
        top: how many plans to find.
        symbolic: take what curves and the machine's table say, and play no plan whole.
        measure: how many of the best plans to run for real, some steps each. This machine needs as many devices as
            there are ranks.

    Raises:
        PlanError: as `dry_run`.
        NothingFits: no plan is legal, or none fits; it says by which reasons.
        ValueError: plans are to be measured on a machine that is not this one, or has too few devices.
    """
    tables = plan.to_dict() if isinstance(plan, ParallelPlan) else plan
    base = plan if isinstance(plan, ParallelPlan) else ParallelPlan.from_dict(plan)
    outline = _undistributed(tables)
    machine = probe() if hardware is None else hardware
    machine = Hardware.load(machine) if isinstance(machine, str) else machine
    here = machine.device == get_platform().devices.name()
    if measure:
        if symbolic or not here:
            raise ValueError(
                f"tune: plans can't be measured on {machine.name}, for this machine is not it, or with symbolic=True:"
                " leave hardware out, or give a table that `probe` has written here"
            )
        check_devices(ranks)
    timed, threads = here and not symbolic, divide_threads(ranks_here(ranks))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return search(
            tables,
            ranks,
            model=_sizes(base) if outline is None else ModelSizes.of(outline),
            hardware=machine,
            trace=_Reports(machine).trace,
            free=free,
            top=top,
            refuses=lambda each: bool(examine(each, [], ranks).diagnostics),
            whole=None
            if symbolic
            else lambda each: [rank.trace for rank in dry_run(each, hardware=machine, kernels=True).ranks],
            kernels=(lambda keys: on_ranks(time_kernels, 1, keys, threads)[0]) if timed else None,
            measure=(lambda each: time_steps(each, _MEASURED).clock) if measure else None,
            measured=measure,
            play=pool.map,
        )


def _undistributed(tables: Mapping[str, Any]) -> ModelOutline | None:
    """Outline the model, if it can be built; refuse what is wrong with every plan, however it is distributed."""
    alone = ParallelPlan.from_dict({name: table for name, table in tables.items() if name not in _DISTRIBUTING})
    report = examine(alone, [], 1)
    wrong = [each for each in report.diagnostics if each.key.partition(".")[0] not in _DISTRIBUTING]
    if wrong:
        raise PlanError(wrong)
    return report.model


class _Reports:
    """Dry runs of a search: a plan's stages are played together, and asked for one by one."""

    def __init__(self, machine: Hardware) -> None:
        self._machine = machine
        self._kept: dict[tuple[str, int], Future[DryReport]] = {}
        self._lock = threading.Lock()

    def trace(self, plan: ParallelPlan, coordinates: Mapping[str, int]) -> Trace:
        """Return the trace of a rank."""
        mesh = plan.mesh
        rank = int(mesh.rank_grid()[tuple(coordinates[axis] for axis in mesh.axes)])
        key = plan.to_toml(), rank % (mesh.world_size // mesh.pp)
        with self._lock:
            known = self._kept.get(key)
            mine = self._kept.setdefault(key, Future())
        if known is None:
            try:
                mine.set_result(dry_run(plan, rank=rank, hardware=self._machine, kernels=True))
            except Exception as error:  # whoever else waits for it raises it too
                mine.set_exception(error)
        return next(each.trace for each in mine.result().ranks if each.rank == rank)


def _sizes(plan: ParallelPlan) -> ModelSizes:
    return ModelSizes.of(models().outline(build_empty(plan)))
