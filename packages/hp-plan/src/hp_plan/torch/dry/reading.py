"""A rank's report, of what a ledger has read of its step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_dtensor import DTensor
from hp_plan.dry.report import KINDS, Assumption, Moment, RankReport
from hp_plan.dry.report import Held as HeldTogether
from hp_plan.dry.trace import Count, Trace
from hp_plan.plan import ParallelPlan
from hp_plan.sections import MeshSection
from hp_plan.torch.dry.ledger import Ledger, Step
from hp_plan.torch.dry.playing import Played

_TOP = 12  # of what holds most


def report_of(played: Played, rank: int, *, memory: bool = False) -> RankReport:
    """Return the report of a rank's last step.

    Args:
        played: the rank.
        rank: its number.
        memory: with the bytes of each kind at each operation.
    """
    plan, ledger, step = played.plan, played.ledger, played.ledger.step
    kinds = _kinds(played)
    live, peak, at = _live(step, lambda number: kinds[number] != "host")
    on_host = _live(step, lambda number: kinds[number] == "host")
    held = dict(step.start)
    for _, number, by in step.changes[: at + 1]:
        held[number] = held.get(number, 0) + by
    places = plan.mesh.coordinate(rank)
    trace = Trace(
        live=tuple(live),
        peak=peak,
        flops=step.flops,
        operations=step.operations,
        collectives=_collectives(plan, played.collectives),
        kernels=dict(step.kernels),
        optimizer_from=step.phases["optimizer"],
    )
    assumed = tuple(Assumption(what, where, times) for (what, where), times in sorted(ledger.assumed.items()))
    return RankReport(
        rank=rank,
        coordinates=places,
        stands_for=plan.mesh.world_size // plan.mesh.pp,
        uneven=any(map(_is_uneven, played.model.parameters())),
        peak=_moment(ledger, held, kinds, step, at),
        rest=live[-1],
        host=on_host[1],
        trace=trace,
        memory=_over_the_step(step, kinds) if memory else {},
        assumed=assumed,
    )


def _is_uneven(parameter: Any) -> bool:
    """Tell whether ranks have shards of different sizes."""
    if not isinstance(parameter, DTensor):
        return False
    pieces = 1
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        pieces *= size if placement.is_shard() else 1
    return parameter.to_local().numel() * pieces != parameter.numel()


def _live(step: Step, counts: Callable[[int], bool]) -> tuple[list[int], int, int]:
    """Return the most live bytes at each operation, the most of them, and the number of the change that reaches it.

    Args:
        step: as the ledger read it.
        counts: whether a storage does.
    """
    now = most = sum(size for number, size in step.start.items() if counts(number))
    highest = [0] * (step.operations + 1)
    at, last = -1, 0
    for index, (operation, number, by) in enumerate(step.changes):
        if not counts(number):
            continue
        for between in range(last + 1, operation + 1):
            highest[between] = now
        last = operation
        now += by
        highest[operation] = max(highest[operation], now)
        if now > most:
            most, at = now, index
    for between in range(last + 1, step.operations + 1):
        highest[between] = now
    return highest, most, at


def _kinds(played: Played) -> dict[int, str]:
    """Return the kind of each storage of the last step."""
    ledger, step = played.ledger, played.ledger.step
    last_seen: dict[int, int] = {}
    for operation, number, by in step.changes:
        if by < 0:
            last_seen[number] = operation
    backward = next(
        (operation for operation, number, _ in step.changes if ledger.storages[number].phase == "backward"), 0
    )
    kinds: dict[int, str] = {}
    for number in {*step.start, *(number for _, number, _ in step.changes)}:
        made = ledger.storages[number]
        saved = made.phase == "forward" and last_seen.get(number, step.operations) > backward
        kinds[number] = "gathered" if made.resized else "saved" if saved else "temporary"
    for kind, numbers in (
        ("gradients", played.gradients()),
        ("states", played.states()),
        ("weights", played.weights()),
    ):
        kinds |= dict.fromkeys(numbers, kind)
    return kinds | dict.fromkeys(played.on_host(), "host")


def _moment(ledger: Ledger, held: Mapping[int, int], kinds: Mapping[int, str], step: Step, at: int) -> Moment:
    by_kind = Counter[str]()
    origins: dict[tuple[str, str, tuple[int, ...], str], list[int]] = {}
    for number, nbytes in held.items():
        if not nbytes:
            continue
        made = ledger.storages[number]
        kind = kinds[number]
        by_kind[kind] += nbytes
        if kind == "host":
            continue
        total = origins.setdefault((kind, made.operator, made.shape, made.module), [0, 0])
        total[0] += nbytes
        total[1] += 1
    top = sorted(origins.items(), key=lambda each: (-each[1][0], each[0]))[:_TOP]
    last = ledger.storages[step.changes[at][1]] if at >= 0 else None
    return Moment(
        live=sum(by_kind.values()) - by_kind["host"],
        by_kind={kind: by_kind[kind] for kind in KINDS},
        operation=step.changes[at][0] if at >= 0 else 0,
        phase=last.phase if last is not None else "forward",
        module=last.module if last is not None else "",
        top=tuple(
            HeldTogether(nbytes, count, kind, operator, shape, module)
            for (kind, operator, shape, module), (nbytes, count) in top
        ),
    )


def _over_the_step(step: Step, kinds: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Return the bytes of each kind after each operation."""
    now = Counter[str]()
    for number, nbytes in step.start.items():
        now[kinds[number]] += nbytes
    series: dict[str, list[int]] = {kind: [] for kind in KINDS}
    changes = iter(step.changes)
    change = next(changes, None)
    for operation in range(step.operations + 1):
        while change is not None and change[0] <= operation:
            now[kinds[change[1]]] += change[2]
            change = next(changes, None)
        for kind, values in series.items():
            values.append(now[kind])
    return {kind: tuple(values) for kind, values in series.items()}


def _collectives(
    plan: ParallelPlan, counted: Mapping[tuple[str, int, tuple[int, ...]], int]
) -> dict[tuple[str, int, tuple[str, ...]], Count]:
    """Name the axes of each collective's ranks."""
    found: dict[tuple[str, int, tuple[str, ...]], Count] = {}
    for (kind, nbytes, ranks), calls in counted.items():
        key = kind, nbytes, axes_of(plan.mesh, ranks)
        before = found.get(key, Count(0, 0))
        found[key] = Count(before.calls + calls, before.bytes + calls * nbytes)
    return found


def axes_of(mesh: MeshSection, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the axes of a mesh along which a group lies; "ep" or "efsdp" where it is a part of them, of experts.

    Args:
        mesh: of the plan.
        ranks: of the group.
    """
    places = [mesh.coordinate(rank) for rank in ranks]
    axes = tuple(axis for axis in mesh.axes if any(each[axis] != places[0][axis] for each in places))
    if mesh.ep == 1 or len(ranks) == math.prod(mesh.axes[axis] for axis in axes):
        return axes
    return ("ep",) if max(ranks) - min(ranks) < mesh.ep else ("efsdp",)
