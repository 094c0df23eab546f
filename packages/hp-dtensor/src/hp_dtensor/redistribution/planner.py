"""The cheapest legal sequence of one-axis steps between two placements of a tensor.

Note [Legal steps]
    Placements apply from the left mesh axis to the right one. So a shard of a dim can be added or removed only on the
    last axis that shards the dim: no axis to its right shards it, and no ``RaggedShard`` contains it. Reductions apply
    from the right axis to the left one, so a Partial can be added or removed only if its reduction commutes with those
    to its right, as sum and avg do. Such steps lead from any placements to Replicate on all axes, and from there to any
    placements, so a plan always exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import TypeVar

from hp_dtensor.layout.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.sharding import cut_dim, normalize, ragged_fits, ragged_of
from hp_dtensor.redistribution.steps import LOCAL, Step, step_cost, step_type

Placements = tuple[Placement, ...]
T = TypeVar("T")
PLANNED = 8
"""The number of sets of placements that are priced by their plans; an estimate selects them."""


def plan(src: Placements, dst: Placements, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[Step, ...]:
    """Plan the steps that turn ``src`` into ``dst``: fewest bytes per rank, then fewest collectives, then fewest steps.

    ``plan((Shard(0),), (Replicate(),), (4, 4), (2,))`` is one ``AllGather``. Axes of one rank need no steps.

    Args:
        src: the present placements, one for each mesh axis.
        dst: the target placements.
        shape: global shape of the tensor.
        mesh_shape: ranks on each mesh axis.

    Returns:
        The steps; () if there is nothing to do.

    Raises:
        ValueError: if either doesn't fit the shape or the mesh.
    """
    return () if src == dst else _plan(src, dst, shape, mesh_shape)


@lru_cache(maxsize=8192)
def _plan(src: Placements, dst: Placements, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[Step, ...]:
    search = _Search(shape, mesh_shape)
    start, goal = search.canonical(src), search.canonical(dst)
    choices = search.choices(start, goal)
    queue: list[tuple[int, int, int, int, Placements]] = [(0, 0, 0, 0, start)]
    best: dict[Placements, tuple[int, int, int]] = {start: (0, 0, 0)}
    came: dict[Placements, Step] = {}
    pushed = 0
    while queue:
        moved, collectives, count, _, state = heappop(queue)
        if state == goal:
            break
        if (moved, collectives, count) > best[state]:
            continue
        for step in search.steps(state, choices):
            price = (moved + search.cost(step), collectives + (not isinstance(step, LOCAL)), count + 1)
            if price < best.get(step.after, (price[0] + 1, 0, 0)):
                best[step.after] = price
                came[step.after] = step
                pushed += 1
                heappush(queue, (*price, pushed, step.after))
    else:
        raise AssertionError(f"no plan from {src} to {dst} for shape {shape} on mesh {mesh_shape}")
    steps: list[Step] = []
    state = goal
    while state != start:
        steps.append(came[state])
        state = came[state].before
    return tuple(reversed(steps))


class _Search:
    """The placements that a tensor can have on the way, and the steps between them."""

    def __init__(self, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.mesh_shape = mesh_shape

    def canonical(self, placements: Placements) -> Placements:
        """Check placements and make dims positive; on an axis of one rank all but RaggedShard become Replicate."""
        normalized = normalize(placements, self.shape, self.mesh_shape)
        for dim, size in enumerate(self.shape):
            sizes = {size}
            for axis, (placement, n) in enumerate(zip(normalized, self.mesh_shape, strict=True)):
                if cut_dim(placement) == dim:
                    factor = _factor(placement)
                    wrong = [s for s in sizes if s % factor]
                    if wrong:
                        raise ValueError(
                            f"{placement!r} on mesh axis {axis}: split_factor {factor} must divide the size of dim"
                            f" {dim}, which is {wrong[0]} there (shape {self.shape}, placements {normalized})"
                        )
                    sizes = _cut_sizes(sizes, placement, n)
        ragged = ragged_of(normalized)
        if ragged and not self._ragged_fits(normalized, ragged[1]):
            raise ValueError(
                f"{ragged[1]!r} on mesh axis {ragged[0]}: the number of elements in dims {ragged[1].dims} must be "
                f"a multiple of sum(units) = {sum(ragged[1].units)}, got {sorted(self._runs(normalized, ragged[1]))} "
                f"(shape {self.shape}, placements {normalized})"
            )
        return tuple(
            p if n > 1 or isinstance(p, RaggedShard) else Replicate()
            for p, n in zip(normalized, self.mesh_shape, strict=True)
        )

    def choices(self, src: Placements, dst: Placements) -> list[list[Placement]]:
        """Return the placements that each axis may take on the way."""
        dims = {d for p in (*src, *dst) if (d := cut_dim(p)) is not None}
        if self.shape and sum(isinstance(p, Partial) for p in src) and len(src) > 1:
            # A sum over two axes moves fewer bytes as reduce-scatter, all-reduce of the chunk, all-gather.
            dims.add(max(range(len(self.shape)), key=self.shape.__getitem__))
        shards = [Shard(d) for d in sorted(dims)] if len(src) > 1 else []
        return [
            list(dict.fromkeys((dst[axis], src[axis], Replicate(), *(shards if n > 1 else ()))))
            for axis, n in enumerate(self.mesh_shape)
        ]

    def steps(self, state: Placements, choices: list[list[Placement]]) -> Iterator[Step]:
        """Yield all legal steps from ``state``; see Note [Legal steps]."""
        for axis, targets in enumerate(choices):
            source = state[axis]
            if not _last(source, axis, state):
                continue
            for target in targets:
                if target == source:
                    continue
                kind = step_type(source, target)
                if kind is None or not _last(target, axis, state):
                    continue
                after = (*state[:axis], target, *state[axis + 1 :])
                if self._fits(after, target):
                    yield kind(axis, state, after)

    def cost(self, step: Step) -> int:
        """Return the price of a step; see `step_cost`."""
        return step_cost(step, self.shape, self.mesh_shape)

    def _fits(self, state: Placements, target: Placement) -> bool:
        if isinstance(target, StridedShard):
            return all(s % target.split_factor == 0 for s in self._sizes_before(state, target))
        return not isinstance(target, RaggedShard) or self._ragged_fits(state, target)

    def _sizes_before(self, state: Placements, target: StridedShard) -> set[int]:
        sizes = {self.shape[target.dim]}
        for placement, n in zip(state, self.mesh_shape, strict=True):
            if placement is target:
                break
            if cut_dim(placement) == target.dim:
                sizes = _cut_sizes(sizes, placement, n)
        return sizes

    def _runs(self, state: Placements, ragged: RaggedShard) -> set[int]:
        counts = {1}
        for dim in ragged.dims:
            sizes = {self.shape[dim]}
            for placement, n in zip(state, self.mesh_shape, strict=True):
                if cut_dim(placement) == dim:
                    sizes = _cut_sizes(sizes, placement, n)
            counts = {count * size for count in counts for size in sizes}
        return counts

    def _ragged_fits(self, state: Placements, ragged: RaggedShard) -> bool:
        """Tell whether the units fit some rank: if other axes shard unevenly, their ranks' units differ."""
        counts = self._runs(state, ragged)
        return any(ragged_fits(ragged, count) for count in counts if count or not sum(ragged.units) or counts == {0})


def _last(placement: Placement, axis: int, state: Placements) -> bool:
    """Tell whether ``placement`` can be added or removed on ``axis`` next to the other axes' placements."""
    if isinstance(placement, (Shard, StridedShard)):
        dim = placement.dim
        return not any(cut_dim(p) == dim for p in state[axis + 1 :]) and not any(
            isinstance(p, RaggedShard) and dim in p.dims for a, p in enumerate(state) if a != axis
        )
    if isinstance(placement, Partial):
        return all(_commute(placement.op, p.op) for p in state[axis + 1 :] if isinstance(p, Partial))
    if isinstance(placement, RaggedShard):
        return not any(isinstance(p, RaggedShard) for a, p in enumerate(state) if a != axis)
    return True


def _commute(a: str, b: str) -> bool:
    return a == b or {a, b} == {"sum", "avg"}


def _cut_sizes(sizes: set[int], placement: Placement, n: int) -> set[int]:
    """Return the sizes that a dim may have on ranks after one more shard, from the ``sizes`` it may have before."""
    after: set[int] = set()
    for size in sizes:
        factor = _factor(placement)
        block = size // factor
        full = -(-block // n)
        full_ranks = block // full if full else 0  # ranks with a full chunk
        after.add(full * factor)
        if full_ranks < n:
            after.add((block - full_ranks * full) * factor)
        if full_ranks + 1 < n:
            after.add(0)
    return after


def _factor(placement: Placement) -> int:
    return placement.split_factor if isinstance(placement, StridedShard) else 1


def cost(
    src: Placements, dst: Placements, shape: tuple[int, ...], mesh_shape: tuple[int, ...], itemsize: int = 4
) -> int:
    """Return the bytes that a rank moves to turn ``src`` into ``dst``; see `step_cost`.

    Args:
        src: the present placements.
        dst: the target placements.
        shape: global shape.
        mesh_shape: ranks on each mesh axis.
        itemsize: bytes per element.
    """
    return itemsize * sum(step_cost(step, shape, mesh_shape) for step in plan(src, dst, shape, mesh_shape))


def explain(
    src: Placements,
    dst: Placements,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    *,
    itemsize: int = 4,
    axis_names: Sequence[str] | None = None,
) -> str:
    """Describe the plan as text: one line per step with its axis, change and bytes per rank, then the total."""
    steps = plan(src, dst, shape, mesh_shape)
    if not steps:
        return "nothing to do"
    rows = [
        (
            type(step).__name__,
            f"{axis_names[step.axis] if axis_names else step.axis} ({mesh_shape[step.axis]} ranks)",
            f"{step.source!r} -> {step.target!r}",
            f"{itemsize * step_cost(step, shape, mesh_shape)} bytes",
        )
        for step in steps
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join((*(text.ljust(w) for text, w in zip(row[:3], widths, strict=True)), row[3])) for row in rows]
    return "\n".join((*lines, f"total {cost(src, dst, shape, mesh_shape, itemsize)} bytes per rank"))


# ---- choosing among targets ----
def cheapest(
    choices: Sequence[T],
    targets: Sequence[Sequence[Placements]],
    sources: Sequence[Placements],
    shapes: Sequence[Sequence[int]],
    mesh_shape: Sequence[int],
    itemsizes: Sequence[int],
) -> T:
    """Return the choice that redistributes the operands with the fewest bytes per rank; of equal ones the first.

    The price is that of the planner's plans. A plan over three axes takes milliseconds to find, so only the `PLANNED`
    choices are planned that cost least if each axis changes by itself.

    Args:
        choices: the choices; at least one.
        targets: for each choice, the placements of each operand.
        sources: the present placements of each operand.
        shapes: global shape of each operand.
        mesh_shape: ranks on each mesh axis.
        itemsizes: bytes per element of each operand.
    """
    operands = [*zip(sources, (tuple(shape) for shape in shapes), itemsizes, strict=True)]
    mesh = tuple(mesh_shape)

    def estimate(index: int) -> int:
        moves = zip(targets[index], operands, strict=True)
        return sum(size * _axis_by_axis(src, dst, shape, mesh) for dst, (src, shape, size) in moves if src != dst)

    def price(index: int) -> float:
        moves = zip(targets[index], operands, strict=True)
        try:
            return sum(cost(src, dst, shape, mesh, size) for dst, (src, shape, size) in moves if src != dst)
        except ValueError:  # no tensor of this shape has these placements
            return math.inf

    best = (math.inf, 0)
    for index in sorted(range(len(choices)), key=estimate)[:PLANNED]:
        best = min(best, (price(index), index))
        if not best[0]:
            break
    return choices[best[1]]


@lru_cache(maxsize=16384)
def _axis_by_axis(src: Placements, dst: Placements, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> int:
    """Return the elements that a rank moves if the axes change in order, through Replicate if a step needs that."""
    total, state = 0, src
    for axis, target in enumerate(dst):
        if state[axis] == target:
            continue
        direct = step_type(state[axis], target) is not None
        for each in (target,) if direct else (Replicate(), target):
            after = (*state[:axis], each, *state[axis + 1 :])
            kind = step_type(state[axis], each)
            assert kind is not None
            total += step_cost(kind(axis, state, after), shape, mesh_shape)
            state = after
    return total
