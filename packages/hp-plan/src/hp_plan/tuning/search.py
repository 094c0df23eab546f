"""The fastest plans of a space that fit a machine, found by traces of a few of them.

Note [Which plans are traced]
Plans whose ranks run the same program at other sizes are of one kind: they have alike `tp`, `cp`, `ep`, recompute,
reshard and schedule, and the same axes with more than one rank. Of a kind a few small plans are traced: 3 and 4 blocks
a rank, micro-batches of 2 and 3 samples, one micro-batch and two, `dp_shard` of the two least sizes; with stages, 2 and
3 of them, the first and the last rank, which hold and compute more than those between. Curves lead from these to all
plans of the kind, and a trace of 5 blocks (and 4 stages) checks them. Micro-batches of one sample, which have some
operations of their own, and ranks of fewer blocks are read off the same curves.

The best of these are played whole, each with its own sizes, so that their bytes are exact, and their kernels' seconds
can be those that were measured.

Kinds are visited in the order of a bound: no plan is faster than it would be in one micro-batch, without an optimizer,
and with all messages of data parallel groups hidden; nor than on as many ranks with fewer of them on `tp` or `cp`, each
with fewer samples, which then have fewer messages and cut up the same products. Four of the traces of a kind without
stages tell this for all others that have multiples of its `tp` and `cp`. Kinds whose bound is above the best plans'
seconds are not traced further. A kind whose small plans are refused falls out as a whole.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hp_offload.extend import size
from hp_plan.dry.trace import Trace
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import PlanError
from hp_plan.tuning.curves import Curve, Growth, Point, Tally
from hp_plan.tuning.hardware import Hardware
from hp_plan.tuning.seconds import Priced, Seconds, count_work, price
from hp_plan.tuning.space import MESH, SCHEDULES, ModelSizes, Space, enumerate_plans

Tracer = Callable[[ParallelPlan, Mapping[str, int]], Trace]
"""Plays one rank of a plan: from the plan and the rank's place on each axis to its trace."""


_MORE = 4
"""Plans beyond those that are asked for which are played whole: their order may be another then."""
_TALLIES = 0.01
"""By which part counts of a larger trace may be missed: they give seconds, which are counted by rates."""
_UNKNOWN = np.iinfo(np.int64).max
"""Bytes of plans of which nothing was traced."""


class NothingFits(ValueError):
    """No plan is legal, or none fits the machine."""


class Kind(NamedTuple):
    """What plans have alike: Note [Which plans are traced]."""

    tp: int
    cp: int
    ep: int
    recompute: int
    reshard: int
    schedule: int
    sharded: int
    replicated: int
    experts_sharded: int


@dataclass(frozen=True, eq=False)
class Role:
    """One rank of a kind: what its memory and its work are at any size.

    Attributes:
        growths: of its memory: with one micro-batch a step, and with more.
        tally: of its work.
    """

    growths: tuple[Growth, ...]
    tally: Tally


@dataclass(frozen=True)
class Curves:
    """What traces of one base plan and one model have told.

    Attributes:
        roles: of the kinds that were traced.
        bounds: work in one micro-batch of kinds that bound others.
    """

    roles: dict[tuple[Any, ...], tuple[Role, ...]] = field(default_factory=dict)
    bounds: dict[tuple[Any, ...], Tally] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan of those that were found best.

    Attributes:
        plan: the plan.
        memory: bytes of the rank with the most.
        seconds: of a step, predicted.
        measured: seconds of a real step; None where none was run.
        binds: the largest part of `seconds`: `"compute"`, `"bubble"`, `"tp"` or other axes of messages.
        why: what it takes, for people.
    """

    plan: ParallelPlan
    memory: int
    seconds: Seconds
    measured: float | None
    binds: str
    why: str


@dataclass(frozen=True, slots=True)
class Tuned:
    """What `tune` found.

    Attributes:
        candidates: the best plans, the fastest first.
        fell_out: reason -> number of plans: rules of `space.RULES`; `"memory"`; `"refused"`; `"slower by its bound"`.
        searched: plans in all.
        traced: traces that were played.
    """

    candidates: tuple[Candidate, ...]
    fell_out: Mapping[str, int]
    searched: int
    traced: int


def tuned_text(found: Tuned) -> str:
    """Return what was found as a table of the best plans, and why the others fell out.

    Args:
        found: by `tune`.
    """
    rows = [("seconds", "memory", "bound by", "plan")]
    for each in found.candidates:
        row = f"{each.seconds.total:.3g}" if each.measured is None else f"{each.measured:.3g} measured"
        rows.append((row, size(each.memory), each.binds, each.why))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(cell.rjust(width) for cell, width in zip(row, widths)), row[3]]) for row in rows]
    lines += [
        "",
        f"{found.searched:,} plans of which {found.traced} ranks were played; left out: {_counted(found.fell_out)}",
    ]
    lines.append("seconds are counted by the machine's rates: they rank plans, and are no promise")
    return "\n".join(lines)


def tune(
    tables: Mapping[str, Any],
    ranks: int,
    *,
    model: ModelSizes,
    hardware: Hardware,
    trace: Tracer,
    free: Collection[str] = (),
    top: int = 5,
    curves: Curves | None = None,
    refuses: Callable[[ParallelPlan], bool] | None = None,
    whole: Callable[[ParallelPlan], Sequence[Trace]] | None = None,
    kernels: Callable[[Collection[str]], Mapping[str, float]] | None = None,
    measure: Callable[[ParallelPlan], float] | None = None,
    measured: int = 5,
    play: Callable[..., Iterable[Trace]] = map,
) -> Tuned:
    """Find the fastest plans of a number of ranks: Note [Which plans are traced].

    What the base plan leaves open is chosen: Note [What is chosen] in `space`. Two calls give one answer: ties go to
    the plan that needs less memory, then to the one with fewer replicas, shards, ... in the order of `space.COLUMNS`.

    Args:
        tables: of the base plan.
        ranks: of each plan.
        model: numbers of the model.
        hardware: the machine.
        trace: plays a rank.
        free: keys or sections that are chosen although `tables` gives them.
        top: how many plans to find.
        curves: kinds that were traced before; those that are traced are added.
        refuses: is asked for the best plans; one of which it says True is left out, as for what `lint` finds.
        whole: plays each distinct rank of one of the best plans, of which some more than `top` are played; one that
            then does not fit is left out. None takes what the curves say.
        kernels: measures kernels of the plans that are played whole: from their keys to seconds, see `count_work`.
        measure: runs real steps of a plan and returns the seconds of one.
        measured: of how many of the best plans; the fastest of these come first then.
        play: calls `trace` for each of two lists of arguments: `map`, or that of a pool of processes.

    Raises:
        NothingFits: no plan is legal, or none fits; it says by which reasons, and the least excess.
        NotLinear: blocks are not all alike; see `ModelSizes.period`.
    """
    space = enumerate_plans(tables, ranks, model, hardware, free=free)
    if not len(space):
        raise NothingFits(f"none of {space.searched} plans of {ranks} ranks is legal: {_counted(space.fell_out)}.")
    search = _Search(space, hardware, trace, Curves() if curves is None else curves, play)
    fell_out, best = search.best(top if whole is None else top + _MORE, refuses)
    if not best:
        raise NothingFits(search.shortage(fell_out))
    if whole is None:
        found = tuple(search.candidate(index) for index in best)
    else:
        found = tuple(search.played(best, whole, kernels, fell_out)[:top])
        if not found:
            raise NothingFits(search.shortage(fell_out))
    if measure is not None:
        run = [replace(each, measured=measure(each.plan)) for each in found[:measured]]
        found = (*sorted(run, key=lambda each: each.measured or 0.0), *found[measured:])
    return Tuned(found, fell_out, space.searched, search.traced)


def _counted(fell_out: Mapping[str, int]) -> str:
    return "; ".join(f"{name}: {count:,}" for name, count in sorted(fell_out.items(), key=lambda item: -item[1]))


class _Search:
    """A search of a space.

    Attributes:
        bounds: seconds that no plan is below.
        told: which kinds have told bounds of which schedule's plans.
        traces: that were played, by kind, place and rank of pp.
        refused: why small plans of a kind were.
        traced: how many were.
    """

    def __init__(
        self,
        space: Space,
        hardware: Hardware,
        trace: Tracer,
        curves: Curves,
        play: Callable[..., Iterable[Trace]],
    ) -> None:
        self.space, self.hardware, self.trace, self.play = space, hardware, trace, play
        self.curves, self.traced = curves, 0
        self.bounds, self.told = np.zeros(len(space)), set[tuple[Kind, int]]()
        self.traces: dict[tuple[Kind, Point, int], Trace] = {}
        self.dtype = _dtype(space.base)
        columns = space.columns
        shared = columns["dp_shard"] * columns["cp"] * columns["tp"] // columns["ep"]
        flags = [columns["dp_shard"] > 1, columns["dp_replicate"] > 1, (columns["ep"] > 1) & (shared > 1)]
        names = ("tp", "cp", "ep", "recompute", "reshard", "schedule")
        rows = np.stack([*(columns[name] for name in names), *(flag.astype(np.int64) for flag in flags)], axis=1)
        kinds, place = np.unique(rows, axis=0, return_inverse=True)
        order = np.argsort(place.ravel(), kind="stable")
        bounds = np.searchsorted(place.ravel()[order], np.arange(len(kinds) + 1))
        self.members: dict[Kind, NDArray[np.int64]] = {
            Kind(*map(int, kind)): order[bounds[index] : bounds[index + 1]] for index, kind in enumerate(kinds)
        }
        self.many = bool((columns["micro_batches"] > 1).any())
        self.seconds = np.full(len(space), np.inf)
        self.memory = np.full(len(space), _UNKNOWN)
        self.refused: dict[Kind, PlanError] = {}
        shards: dict[tuple[int, ...], set[int]] = {}
        for kind, members in self.members.items():
            shards.setdefault(_sizes_of(kind), set()).update(columns["dp_shard"][members].tolist())
        self.shards = {sizes: tuple(sorted(found)[:2]) for sizes, found in shards.items()}

    def best(self, top: int, refuses: Callable[[ParallelPlan], bool] | None) -> tuple[dict[str, int], list[int]]:
        """Return how many plans fell out, by reason, and the best plans' indices."""
        fell_out = dict(self.space.fell_out)
        found: list[tuple[float, int, int]] = []

        def leave(reason: str, count: int) -> None:
            if count:
                fell_out[reason] = fell_out.get(reason, 0) + count

        # Of those that tell as much, the one with shards; from few ranks on tp and cp to many.
        tells = {kind[:4]: kind for kind in sorted(self.members) if not kind.schedule}.values()
        order = sorted(tells, key=lambda kind: (kind.tp * kind.cp, kind))
        queue = [(0.0, kind, tuple(each for each in order if _tells(each, kind))) for kind in sorted(self.members)]
        while queue:
            bound, kind, tellers = heapq.heappop(queue)
            members = self.members[kind]
            if len(found) == top and bound > found[-1][0] * (1 + 1e-6):
                leave("slower by its bound", len(members))
                continue
            if tellers:
                heapq.heappush(queue, (max(bound, self._bound(kind, tellers[0])), kind, tellers[1:]))
                continue
            try:
                memory, priced = self._evaluate(kind, members)
            except PlanError:
                leave("refused", len(members))
                continue
            self.memory[members], self.seconds[members] = memory, priced.total
            fits = members[memory <= self.hardware.room]
            leave("memory", len(members) - len(fits))
            kept = 0
            for index in fits[np.lexsort((fits, self.memory[fits], _rounded(self.seconds[fits])))].tolist():
                entry = float(_rounded(self.seconds[index])), int(self.memory[index]), index
                if kept == top or (len(found) == top and entry > found[-1]):
                    break
                if refuses is not None and refuses(self.space.plan(index)):
                    leave("refused", 1)
                    continue
                kept += 1
                found = sorted([*found, entry])[:top]
        return fell_out, [index for *_, index in found]

    def shortage(self, fell_out: Mapping[str, int]) -> str:
        """Say why nothing is left."""
        index = int(np.lexsort((np.arange(len(self.memory)), self.memory))[0])
        plan, excess = self.space.plan(index), int(self.memory[index]) - self.hardware.room
        message = f"none of {self.space.searched} plans of {self.space.ranks} ranks is left: {_counted(fell_out)}."
        if self.memory[index] == _UNKNOWN:
            return f"{message} The last one was refused: {[*self.refused.values()][-1]}"
        if excess <= 0:
            return message
        needs = f"{size(self.memory[index])} of {size(self.hardware.room)}, {size(excess)} too much"
        return f"{message} The one that needs least, {plan.mesh.described}, takes {needs}: give more ranks or memory."

    def played(
        self,
        indices: Sequence[int],
        whole: Callable[[ParallelPlan], Sequence[Trace]],
        kernels: Callable[[Collection[str]], Mapping[str, float]] | None,
        fell_out: dict[str, int],
    ) -> list[Candidate]:
        """Play plans whole, and return those that fit, the fastest first."""
        found: list[tuple[float, int, int, Candidate]] = []
        seconds: dict[str, float] = {}
        asked: set[str] = set()
        for index in indices:
            traces = whole(self.space.plan(index))
            self.traced += len(traces)
            memory = max(each.peak for each in traces)
            self.memory[index] = memory
            if memory > self.hardware.room:
                fell_out["memory"] = fell_out.get("memory", 0) + 1
                continue
            if kernels is not None:
                new = {key for each in traces for key in each.kernels} - asked
                asked |= new
                seconds |= kernels(sorted(new))
            kind, members, priced = self._kind(index), np.array([index]), None
            for each in traces:
                own = self._price(kind.schedule, members, count_work(each, seconds))
                priced = own if priced is None else priced.slower(own)
            assert priced is not None, "a plan has a rank"
            candidate = self.candidate(index, memory, priced.one())
            found.append((float(_rounded(candidate.seconds.total)), memory, index, candidate))
        return [candidate for *_, candidate in sorted(found, key=lambda each: each[:3])]

    def _kind(self, index: int) -> Kind:
        return next(kind for kind, members in self.members.items() if index in members)

    def candidate(self, index: int, memory: int | None = None, seconds: Seconds | None = None) -> Candidate:
        """Describe a plan, by its curves or what else is known of it."""
        row, plan = self.space.row(index), self.space.plan(index)
        if memory is None or seconds is None:
            memory = int(self.memory[index])
            seconds = self._evaluate(self._kind(index), np.array([index]))[1].one()
        binds = max(seconds.parts, key=lambda part: seconds.parts[part])
        micros = row["micro_batches"]
        samples = self.space.batch // (row["dp_replicate"] * row["dp_shard"] * micros)
        shares = [f"{part} {time / seconds.total:.0%}" for part, time in seconds.parts.items() if time > 0]
        what = [
            plan.mesh.described + (f", ep {row['ep']}" if row["ep"] > 1 else ""),
            f"{micros} micro-batch{'es' if micros > 1 else ''} of {samples} x {self.space.length} tokens",
            *([SCHEDULES[row["schedule"]]] if row["schedule"] else []),
            *(["blocks are computed again"] if row["recompute"] else []),
            *([] if row["reshard"] else ["gathered weights stay for backward"]),
            f"{size(memory)} of {size(self.hardware.room)}",
            f"{seconds.total:.3g} s: {', '.join(shares)}",
        ]
        return Candidate(plan, memory, seconds, None, binds, "; ".join(what))

    # ---- plans of a kind ----
    def _point(self, members: NDArray[np.int64]) -> Point:
        columns = {name: column[members] for name, column in self.space.columns.items()}
        samples = self.space.batch // (columns["dp_replicate"] * columns["dp_shard"])
        return Point(
            samples // columns["micro_batches"],
            self.space.length,
            columns["dp_shard"],
            columns["micro_batches"],
            self.space.model.layers // columns["pp"],
            columns["pp"],
        )

    def _evaluate(self, kind: Kind, members: NDArray[np.int64]) -> tuple[NDArray[np.int64], Priced]:
        """Return the memory and the seconds of plans of a kind."""
        point, memory, priced = self._point(members), np.zeros(len(members), dtype=np.int64), None
        for role in self._roles(kind):
            peaks = role.growths[-1].peak(point)
            if len(role.growths) > 1:
                peaks = np.where(point.micro_batches == 1, role.growths[0].peak(point), peaks)
            memory = np.maximum(memory, peaks)
            seconds = self._price(kind.schedule, members, role.tally.at(point))
            priced = seconds if priced is None else priced.slower(seconds)
        assert priced is not None, "every kind has a role"
        return memory, priced

    def _price(
        self,
        schedule: int,
        members: NDArray[np.int64],
        work: Mapping[Any, Any],
        mesh: Mapping[str, Any] = MappingProxyType({}),
        *,
        overlapped: bool = True,
    ) -> Priced:
        columns = self.space.columns
        return price(
            work,
            self.hardware,
            {**{axis: columns[axis][members] for axis in MESH}, **mesh},
            dtype=self.dtype,
            micro_batches=columns["micro_batches"][members],
            schedule=SCHEDULES[schedule],
            stages_a_rank=self.space.stages_a_rank[schedule],
            overlapped=overlapped,
        )

    def _bound(self, kind: Kind, teller: Kind) -> float:
        """Return seconds that no plan of a kind is below, from the work of another in one micro-batch."""
        if (teller, kind.schedule) not in self.told:
            self.told.add((teller, kind.schedule))
            told = [each for each in self.members if each.schedule == kind.schedule and _tells(teller, each)]
            members = np.concatenate([self.members[each] for each in told])
            with contextlib.suppress(PlanError):  # one that is refused tells nothing
                self.bounds[members] = np.maximum(self.bounds[members], self._least(kind.schedule, teller, members))
        return float(self.bounds[self.members[kind]].min())

    def _least(self, schedule: int, teller: Kind, members: NDArray[np.int64]) -> NDArray[np.float64]:
        shards = self.shards[_sizes_of(teller)]
        key = (*teller, shards)
        if key not in self.curves.bounds:
            points = list(_outline(self.space, teller, shards))
            traces = self._play(teller, points, (0,))
            self.curves.bounds[key] = Tally.fit(points, [count_work(each) for each in traces])
        tally, at, one = self.curves.bounds[key], self._point(members), np.ones(len(members), dtype=np.int64)
        ranks = {axis: self.space.columns[axis][members] for axis in ("tp", "cp")}
        fewer = teller.tp * teller.cp / (ranks["tp"] * ranks["cp"])
        samples = at.micro_batch * at.micro_batches * fewer
        point = replace(at, micro_batch=samples, micro_batches=one, shards=shards[0] * one, stages=one)
        work: Mapping[Any, Any] = tally.at(point)
        if schedule:  # the slower of the first and the last stage has half of what is outside of blocks, or more
            outside = tally.at(replace(point, blocks=np.zeros_like(point.blocks)))
            work = {name: value - outside[name] / 2 for name, value in work.items()}
        mesh = {"tp": teller.tp * one, "cp": teller.cp * one}
        priced = self._price(schedule, members, work, mesh, overlapped=False)
        return priced.total - priced.optimizer

    # ---- traces of a kind ----
    def _play(self, kind: Kind, points: Sequence[Point], ends: Sequence[int]) -> list[Trace]:
        """Return traces of the ranks at some ends at some points, end by end."""
        if kind in self.refused:
            raise self.refused[kind]
        asked = [(kind, point, end) for end in ends for point in points]
        new = [each for each in asked if each not in self.traces]
        plans = [self._plan(kind, point) for _, point, _ in new]
        places = [
            {**dict.fromkeys(plan.mesh.axes, 0), **({"pp": end % point.stages} if kind.schedule else {})}
            for plan, (_, point, end) in zip(plans, new, strict=True)
        ]
        self.traced += len(new)
        try:
            self.traces.update(zip(new, self.play(self.trace, plans, places), strict=True))
        except PlanError as error:
            self.refused[kind] = error
            raise
        return [self.traces[each] for each in asked]

    def _roles(self, kind: Kind) -> tuple[Role, ...]:
        """Return the ranks of a kind that decide: the one, or the first and the last stage."""
        shards = self.shards[_sizes_of(kind)]
        key = (*kind, shards, self.many)
        if key not in self.curves.roles:
            grid, check = list(_grid(self.space, kind, shards, many=self.many)), _check(self.space, kind, shards)
            points = [*grid, check]
            ends = (0, -1) if kind.schedule else (0,)
            traces = self._play(kind, points, ends)
            roles = []
            for end in range(len(ends)):
                own = traces[end * len(points) : (end + 1) * len(points)]
                roles.append(self._role(grid, own[:-1], check, own[-1]))
            self.curves.roles[key] = tuple(roles)
        return self.curves.roles[key]

    def _plan(self, kind: Kind, point: Point) -> ParallelPlan:
        row = {
            **kind._asdict(),
            "dp_replicate": 1 + kind.replicated,
            "dp_shard": point.shards,
            "pp": point.stages,
            "micro_batches": point.micro_batches,
        }
        batch = point.micro_batch * point.micro_batches * point.shards * row["dp_replicate"]
        return ParallelPlan.from_dict(self.space.tables(row, layers=point.blocks * point.stages, batch_size=batch))

    def _role(self, points: list[Point], traces: list[Trace], check: Point, checked: Trace) -> Role:
        groups: dict[bool, dict[tuple[int, int], list[int]]] = {}
        for index, point in enumerate(points):
            # Steps of more micro-batches hold no more than the first of them here; they are for the work alone.
            few = point.micro_batches <= 2 * point.stages
            if few:
                several = groups.setdefault(point.micro_batches > 1, {})
                several.setdefault((point.blocks, point.stages), []).append(index)
        growths = {
            several: Growth(
                {at: Curve.fit([points[i] for i in own], [traces[i] for i in own]) for at, own in curves.items()},
                min(points[i].micro_batches for own in curves.values() for i in own),
            )
            for several, curves in groups.items()
        }
        tally = Tally.fit(points, [count_work(each) for each in traces])
        growths[check.micro_batches > 1].check(check, checked)
        tally.check(check, count_work(checked), tolerance=_TALLIES)
        return Role(tuple(growths[several] for several in sorted(growths)), tally)


def _sizes_of(kind: Kind) -> tuple[int, ...]:
    return kind.tp, kind.cp, kind.ep, kind.sharded, kind.replicated, kind.experts_sharded


def _tells(teller: Kind, kind: Kind) -> bool:
    """Tell whether a kind bounds the seconds of another."""
    fewer = kind.tp % teller.tp == kind.cp % teller.cp == 0 and teller.recompute <= kind.recompute
    return fewer and teller.ep == kind.ep and not teller.schedule


def _unit(space: Space, kind: Kind) -> int:
    """Return the least number of blocks of a rank."""
    return space.model.period * space.stages_a_rank[kind.schedule]


def _grid(space: Space, kind: Kind, shards: tuple[int, ...], *, many: bool) -> Iterator[Point]:
    """List where a kind is traced."""
    unit, sizes = _unit(space, kind), [(2, shards[0]), (3, shards[0]), *((2, each) for each in shards[1:])]
    for blocks in (3 * unit, 4 * unit):
        for stages in (2, 3) if kind.schedule else (1,):
            steps = [2 * stages] if kind.schedule else [1, 2] if many else [1]
            for micros in steps:
                for samples, share in sizes:
                    yield Point(samples, space.length, share, micros, blocks, stages)
        if kind.schedule:
            for share in shards:
                yield Point(2, space.length, share, 6, blocks, 2)


def _outline(space: Space, kind: Kind, shards: tuple[int, ...]) -> Iterator[Point]:
    """List those of a kind's points, without stages, that tell its work in one micro-batch at as many shards."""
    few, *_ = shards
    for point in _grid(space, kind, shards, many=False):
        if point.shards == few:
            yield point


def _check(space: Space, kind: Kind, shards: tuple[int, ...]) -> Point:
    """Return where a kind is traced to check it."""
    stages = 4 if kind.schedule else 1
    micros = 8 if kind.schedule else 1
    return Point(5, space.length, shards[-1], micros, 5 * _unit(space, kind), stages)


def _dtype(base: Mapping[str, Any]) -> str:
    run = base.get("run", {}).get("dtype", "float32")
    return base.get("fsdp", {}).get("param_dtype") or run


def _rounded(seconds: Any) -> Any:
    """Round to ten digits, so that sums in another order are no other plan."""
    seconds = np.asarray(seconds)
    scale = 10.0 ** (9 - np.floor(np.log10(np.maximum(seconds, 1e-300))))
    return np.rint(seconds * scale) / scale
