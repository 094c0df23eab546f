"""Redistribution between two meshes as data: which rank sends which elements to which, by ranges of each dim.

Note [Three legs of a transfer]
    A tensor goes from one mesh to another in three legs: a plan of `hp_dtensor.redistribution.planner` on the source
    mesh, which reduces partial axes; one exchange between the meshes, in which every rank receives each element that it
    needs once, or copies its own; a plan on the target mesh. Source ranks with the same elements take turns in sending.
    Partial axes may be reduced to shards, and replicated ones received as shards and gathered, if that is fewer bytes
    for the busiest rank.

Note [Groups of dims]
    Two layouts are compared dim by dim, since a shard of a dim has the same indices of it everywhere. Only a
    ``RaggedShard`` shards across several dims. These form one group, whose elements are numbered in the tensor's order.
    A rank's elements of a group ascend in that order, and its local tensor is the product over its groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from hp_dtensor.layout.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.layout.sharding import Interval, cut_dim, intervals, local_shape, normalize, parts, ragged_of
from hp_dtensor.layout.spec import Layout
from hp_dtensor.redistribution.executor import coordinates, neutral
from hp_dtensor.redistribution.planner import explain, plan
from hp_dtensor.redistribution.steps import Step, step_cost

Ranges = np.ndarray
"""[n, 2] of int64: (start, length), ascending, none empty."""
DimGroups = tuple[tuple[int, int], ...]
"""(first dim, dim after the last) of each group."""


def dim_groups(shape: Sequence[int], *layouts: Sequence[Placement]) -> DimGroups:
    """Group the dims, into as many groups as possible, so that no ``RaggedShard`` crosses from one to the next.

    ``dim_groups((2, 3, 4), (RaggedShard((1, 2), (1, 1)),)) == ((0, 1), (1, 3))``
    """
    if not shape:
        return ((0, 0),)
    joined = {d for placements in layouts if (ragged := ragged_of(placements)) for d in ragged[1].dims[1:]}
    starts = [dim for dim in range(len(shape)) if dim not in joined]
    return tuple(zip(starts, [*starts[1:], len(shape)], strict=True))


def local_ranges(
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    shape: Sequence[int],
    groups: DimGroups,
) -> tuple[Ranges, ...]:
    """Return the elements of each group of dims on the rank at ``coordinate``; ``Partial`` counts as ``Replicate``.

    Args:
        placements: one for each mesh axis, dims positive.
        mesh_shape: ranks on each mesh axis.
        coordinate: the rank's index on each mesh axis.
        shape: the global shape.
        groups: from `dim_groups`, for these placements among others.

    Raises:
        ValueError: a placement doesn't fit the shape.
    """
    shards: dict[int | None, list[tuple[Placement, int, int]]] = {}
    for placement, n, index in zip(placements, mesh_shape, coordinate, strict=True):
        shards.setdefault(cut_dim(placement), []).append((placement, n, index))
    by_dim = [_ranges(intervals(size, shards.get(dim, []))) for dim, size in enumerate(shape)]
    ragged = ragged_of(placements)
    result = []
    for first, stop in groups:
        elements, dim = _ranges([(0, 1)]), first
        if ragged and first <= (ragged[1].dims or (0,))[0] < max(stop, 1):
            axis, placement = ragged
            start = placement.dims[0] if placement.dims else 0
            end = start + len(placement.dims)
            elements = _product(elements, by_dim[first:start], shape[first:start])
            inner = _product(_ranges([(0, 1)]), by_dim[start:end], shape[start:end])
            part = parts(placement, int(inner[:, 1].sum()), mesh_shape[axis])[coordinate[axis]]
            inner = joined_ranges(np.concatenate([_within(inner, *each) for each in part or [(0, 0)]]))
            elements, dim = _nested(elements, inner, prod(shape[start:end])), end
        result.append(_product(elements, by_dim[dim:stop], shape[dim:stop]))
    return tuple(result)


def common_elements(first: Ranges, second: Ranges) -> np.ndarray:
    """Return the common elements, [n, 3]: (offset in the concatenation of ``first``, in that of ``second``, length)."""
    begin = np.searchsorted(second.sum(1), first[:, 0], "right")
    counts = np.searchsorted(second[:, 0], first.sum(1), "left") - begin
    i = np.repeat(np.arange(len(first)), counts)
    j = np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts - begin, counts)
    low = np.maximum(first[i, 0], second[j, 0])
    high = np.minimum(first[i].sum(1), second[j].sum(1))
    return np.stack(
        [low - first[i, 0] + _offsets(first)[i], low - second[j, 0] + _offsets(second)[j], high - low], 1
    ).astype(np.int64)


def count_common(first: Sequence[Ranges], second: Sequence[Ranges]) -> np.ndarray:
    """Return the number of elements that each two have in common, [len(first), len(second)]."""
    ours, others = sum(map(len, first)), sum(map(len, second))
    if len(first) * others < len(second) * ours:
        return count_common(second, first).T
    joined = np.concatenate([np.zeros((0, 2), np.int64), *first])
    of = np.repeat(np.arange(len(first)), [len(ranges) for ranges in first])
    result = np.zeros((len(first), len(second)), np.int64)
    for column, ranges in enumerate(second):
        counts = _below(ranges, joined.sum(1)) - _below(ranges, joined[:, 0])
        np.add.at(result[:, column], of, counts)
    return result


def _below(ranges: Ranges, numbers: np.ndarray) -> np.ndarray:
    """Return the number of elements of ``ranges`` below each of ``numbers``."""
    if not len(ranges):
        return np.zeros_like(numbers)
    index = np.maximum(np.searchsorted(ranges[:, 0], numbers, "right") - 1, 0)
    return _offsets(ranges)[index] + np.clip(numbers - ranges[index, 0], 0, ranges[index, 1])


def joined_ranges(ranges: Ranges) -> Ranges:
    """Join adjacent ranges, and drop empty ones."""
    ranges = ranges[ranges[:, 1] > 0]
    begins = np.ones(len(ranges), bool)
    begins[1:] = ranges[:-1].sum(1) != ranges[1:, 0]
    starts = ranges[begins, 0]
    ends = ranges[np.roll(begins, -1)].sum(1)
    return np.stack([starts, ends - starts], 1)


def _ranges(intervals: Sequence[tuple[int, int]]) -> Ranges:
    ranges = np.array(intervals, np.int64).reshape(-1, 2)
    return ranges[ranges[:, 1] > 0]


def _offsets(ranges: Ranges) -> np.ndarray:
    return np.cumsum(ranges[:, 1]) - ranges[:, 1]


def _within(ranges: Ranges, start: int, length: int) -> Ranges:
    """Return the part ``[start, start + length)`` of the concatenation."""
    offsets = _offsets(ranges)
    low, high = np.maximum(offsets, start), np.minimum(offsets + ranges[:, 1], start + length)
    result = np.stack([ranges[:, 0] + low - offsets, high - low], 1)
    return result[result[:, 1] > 0]


def _product(outer: Ranges, inner: Sequence[Ranges], sizes: Sequence[int]) -> Ranges:
    for ranges, size in zip(inner, sizes, strict=True):
        outer = _nested(outer, ranges, size)
    return outer


def _nested(outer: Ranges, inner: Ranges, size: int) -> Ranges:
    """Return the elements ``i * size + j`` for ``i`` in ``outer`` and ``j`` in ``inner``, a part of ``[0, size)``."""
    if len(inner) == 1 and inner[0, 1] == size:
        return outer * size
    rows = np.repeat(outer[:, 0] - _offsets(outer), outer[:, 1]) + np.arange(outer[:, 1].sum())
    starts = (rows[:, None] * size + inner[None, :, 0]).reshape(-1)
    return joined_ranges(np.stack([starts, np.tile(inner[:, 1], len(rows))], 1))


Shape = tuple[int, ...]
Box = tuple[tuple[Interval, ...], ...]
"""Intervals of each group of dims of a local tensor; the elements in all of them."""


@dataclass(frozen=True, slots=True)
class Move:
    """Elements that one rank sends to another.

    Args:
        source: the global rank that sends them.
        destination: the global rank that receives them; the same rank for a local copy.
        taken: their positions in the source's local tensor, seen as `Transfer.view`.
        put: their positions in the destination's local tensor. Both are in the tensor's order.
        sizes: their number in each group of dims.
    """

    source: int
    destination: int
    taken: Box
    put: Box
    sizes: Shape

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.sizes)


@dataclass(frozen=True)
class Transfer:
    """A plan to move a tensor to another mesh, from `plan_transfer`: Note [Three legs of a transfer].

    Args:
        source: the present layout.
        sent: the layout on the source mesh in which the tensor is sent; no ``Partial``.
        received: the layout on the target mesh in which it arrives.
        target: the target layout.
        shape: the global shape.
    """

    source: Layout
    sent: Layout
    received: Layout
    target: Layout
    shape: Shape

    @property
    def before(self) -> tuple[Step, ...]:
        """The steps on the source mesh."""
        return plan(_placed(self.source), _placed(self.sent), self.shape, self.source.mesh_shape)

    @property
    def after(self) -> tuple[Step, ...]:
        """The steps on the target mesh."""
        return plan(_placed(self.received), _placed(self.target), self.shape, self.target.mesh_shape)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both meshes, ascending: exactly these take part."""
        return tuple(sorted({*self.source.rank_list, *self.target.rank_list}))

    @property
    def sends(self) -> bool:
        """True if the exchange moves anything between different ranks."""
        return self.elements > 0

    def moves_from(self, rank: int) -> tuple[Move, ...]:
        """Return the moves from a rank, its own copy included, by ascending destination."""
        routes = self._exchange.routes
        return tuple(self._move(int(s), int(d)) for s, d in routes[routes[:, 0] == rank])

    def moves_to(self, rank: int) -> tuple[Move, ...]:
        """Return the moves to a rank, its own copy included, by ascending source."""
        routes = self._exchange.routes
        return tuple(self._move(int(s), int(d)) for s, d in routes[routes[:, 1] == rank])

    def view(self, layout: Layout, rank: int) -> Shape:
        """Return the local tensor's sizes in `sent` or `received`, the dims that a RaggedShard flattens as one."""
        return tuple(int(ranges[:, 1].sum()) for ranges in self._local_ranges(layout, rank))

    def fill(self, rank: int) -> int | None:
        """Return the constant that fills a rank's term of a ``Partial`` target, None if the rank receives the value."""
        return _fill(self.received, _coordinate(self.received, rank))

    @cached_property
    def elements(self) -> int:
        """The elements that the busiest rank sends or receives in the exchange, whichever is more."""
        routes, sizes = self._exchange.routes, self._exchange.elements
        apart = routes[:, 0] != routes[:, 1]
        return max(int(np.bincount(routes[apart, side], sizes[apart], 1).max()) for side in (0, 1))

    def explain(self, *, itemsize: int = 4) -> str:
        """Describe the transfer as text: a line per step and for the exchange, with bytes per rank, then the total."""
        rows = _rows(self.source, self.before, self.shape, itemsize)
        rows += [
            (
                "Transfer",
                f"{_numbered(self.source.rank_list)} to {_numbered(self.target.rank_list)}",
                f"{_placed(self.sent)} -> {_placed(self.received)}",
                itemsize * self.elements,
            )
        ]
        rows += _rows(self.target, self.after, self.shape, itemsize)
        widths = [max(len(row[i]) for row in rows) for i in range(3)]  # type: ignore[arg-type]
        lines = [
            "  ".join((*(text.ljust(w) for text, w in zip(texts, widths, strict=True)), f"{size} bytes"))
            for *texts, size in rows
        ]
        return "\n".join((*lines, f"total {sum(row[3] for row in rows)} bytes per rank"))

    @cached_property
    def _exchange(self) -> _Exchange:
        return _exchange(self.sent, self.received, self.shape)

    def _local_ranges(self, layout: Layout, rank: int) -> tuple[Ranges, ...]:
        return local_ranges(
            _placed(layout), layout.mesh_shape, _coordinate(layout, rank), self.shape, self._exchange.groups
        )

    def _move(self, source: int, destination: int) -> Move:
        taken, put, sizes = [], [], []
        for source_ranges, destination_ranges in zip(
            self._local_ranges(self.sent, source), self._local_ranges(self.received, destination), strict=True
        ):
            common = common_elements(source_ranges, destination_ranges)
            taken.append(_intervals(common[:, [0, 2]]))
            put.append(_intervals(common[:, [1, 2]]))
            sizes.append(int(common[:, 2].sum()))
        return Move(source, destination, tuple(taken), tuple(put), tuple(sizes))


@lru_cache(maxsize=512)
def plan_transfer(source: Layout, target: Layout, shape: Shape) -> Transfer:
    """Plan the transfer to a layout on another mesh that moves the fewest bytes on the busiest rank.

    It depends only on its arguments, so that every rank computes the same without communication. The meshes may share
    ranks, or have the same ranks in another order or shape.

    Args:
        source: the present layout, with placements.
        target: the target layout, with placements.
        shape: the global shape.

    Raises:
        ValueError: a layout without placements, or placements that don't fit the shape on any rank of the mesh.
    """
    for layout in (source, target):
        _check(layout, shape)
    best: tuple[tuple[int, int], Transfer] | None = None
    for sent in _ways(source, shape, reduce=True):
        for received in _ways(target, shape, reduce=False):
            transfer = Transfer(source, sent, received, target, shape)
            steps = [(step, source.mesh_shape) for step in transfer.before]
            steps += [(step, target.mesh_shape) for step in transfer.after]
            bytes_ = transfer.elements + sum(step_cost(step, shape, mesh_shape) for step, mesh_shape in steps)
            if best is None or (bytes_, len(steps)) < best[0]:
                best = (bytes_, len(steps)), transfer
    assert best is not None
    return best[1]


def explain_transfer(source: Layout, target: Layout, shape: Shape, *, itemsize: int = 4) -> str:
    """Describe the way between two layouts as text, on one mesh (`explain`) or between two (`Transfer.explain`).

    Args:
        source: the present layout, as ``DTensor.sharding``.
        target: the target layout.
        shape: the global shape.
        itemsize: bytes per element.
    """
    if (source.mesh_shape, source.rank_list) == (target.mesh_shape, target.rank_list):
        names = source.mesh_dim_names
        return explain(_placed(source), _placed(target), shape, source.mesh_shape, itemsize=itemsize, axis_names=names)
    return plan_transfer(source, target, shape).explain(itemsize=itemsize)


# ---- the exchange ----
@dataclass(frozen=True)
class _Exchange:
    groups: tuple[tuple[int, int], ...]
    routes: np.ndarray
    """[n, 2]: (source rank, destination rank), ascending."""
    elements: np.ndarray
    """[n]: the number of elements of each."""


def _exchange(sent: Layout, received: Layout, shape: Shape) -> _Exchange:
    groups = dim_groups(shape, _placed(sent), _placed(received))
    holders = _alike(sent)
    getters = _alike(received)
    counts = _counts(
        [local_ranges(_placed(sent), sent.mesh_shape, c, shape, groups) for c in holders],
        [local_ranges(_placed(received), received.mesh_shape, c, shape, groups) for c in getters],
    )
    kind = {rank: i for i, (_, ranks) in enumerate(getters.items()) for rank in ranks}
    getting = np.array([r for r in received.rank_list if _fill(received, _coordinate(received, r)) is None], np.int64)
    kinds = np.array([kind[int(rank)] for rank in getting], np.int64)
    routes, elements = [], []
    for row, ranks in zip(counts, holders.values(), strict=True):
        amount = row[kinds]
        receivers = np.nonzero(amount)[0]
        has = np.isin(getting[receivers], ranks)
        for indices, senders in ((receivers[has], None), (receivers[~has], np.array(ranks, np.int64))):
            to = getting[indices]
            by = to if senders is None else senders[np.arange(len(to)) % len(senders)]
            routes.append(np.stack([by, to], 1))
            elements.append(amount[indices])
    route_array, sizes = np.concatenate(routes), np.concatenate(elements)
    order = np.lexsort((route_array[:, 1], route_array[:, 0]))
    return _Exchange(groups, route_array[order], sizes[order])


def _alike(layout: Layout) -> dict[Shape, list[int]]:
    """Return the ranks that have the same shard, by the coordinate of the first."""
    alike: dict[Shape, list[int]] = {}
    sharded = [not isinstance(p, (Replicate, Partial)) for p in _placed(layout)]
    for rank, coordinate in zip(layout.rank_list, coordinates(layout.mesh_shape), strict=True):
        alike.setdefault(tuple(i * k for i, k in zip(coordinate, sharded, strict=True)), []).append(rank)
    return alike


def _counts(first: Sequence[tuple[Ranges, ...]], second: Sequence[tuple[Ranges, ...]]) -> np.ndarray:
    """Return the number of elements that each two have in common: the product over the groups of dims."""
    total = np.ones((len(first), len(second)), np.int64)
    for group in range(len(first[0])):
        (few, of), (others, to) = _distinct([m[group] for m in first]), _distinct([t[group] for t in second])
        total *= count_common(few, others)[of][:, to]
    return total


def _distinct(arrays: Sequence[Ranges]) -> tuple[list[Ranges], list[int]]:
    """Return the distinct arrays, and for each input the index of its equal among them."""
    numbers: dict[bytes, int] = {}
    of = [numbers.setdefault(ranges.tobytes(), len(numbers)) for ranges in arrays]
    return [np.frombuffer(key, np.int64).reshape(-1, 2) for key in numbers], of


# ---- layouts ----
def _placed(layout: Layout) -> tuple[Placement, ...]:
    assert layout.placements is not None
    return layout.placements


def _check(layout: Layout, shape: Shape) -> None:
    if layout.placements is None:
        raise ValueError(f"transfer: {layout!r} describes ranks only; call it with the axis of each tensor dim")
    placements = normalize(layout.placements, shape, layout.mesh_shape)
    ragged = ragged_of(placements)
    if ragged:
        bare = (*placements[: ragged[0]], Replicate(), *placements[ragged[0] + 1 :])
        sizes = sorted(
            {
                prod(local_shape(shape, bare, layout.mesh_shape, c)[d] for d in ragged[1].dims)
                for c in coordinates(layout.mesh_shape)
            }
        )
        if len(sizes) > 1:  # then each rank has units of its own, which the others don't know
            raise ValueError(
                f"transfer: {ragged[1]!r} of a tensor of shape {shape} placed {placements} shards {sizes} elements,"
                " depending on the rank, so its units differ between ranks; redistribute to another placement than"
                " RaggedShard on its own mesh first, then to the other mesh"
            )
    for coordinate in coordinates(layout.mesh_shape):
        local_shape(shape, placements, layout.mesh_shape, coordinate)


def _ways(layout: Layout, shape: Shape, *, reduce: bool) -> Iterator[Layout]:
    """Yield the layouts on its mesh in which a tensor may be sent (``reduce``: without Partial) or received."""
    placements = normalize(_placed(layout), shape, layout.mesh_shape)
    changed = Partial if reduce else Replicate
    settled = tuple(Replicate() if reduce and isinstance(p, Partial) else p for p in placements)
    yield layout._placed(settled, len(shape))
    ragged = ragged_of(placements)
    sharded = {cut_dim(p) for p in placements} | set(ragged[1].dims if ragged else ())
    free = [dim for dim in range(len(shape)) if dim not in sharded]
    if free and any(isinstance(p, changed) for p in placements):
        longest = Shard(max(free, key=lambda dim: shape[dim]))
        yield layout._placed(tuple(longest if isinstance(p, changed) else p for p in placements), len(shape))


def _coordinate(layout: Layout, rank: int) -> Shape:
    position = layout.rank_list.index(rank)
    return tuple(int(i) for i in np.unravel_index(position, layout.mesh_shape))


def _fill(layout: Layout, coordinate: Shape) -> int | None:
    # Reductions nest, the left axis's outermost: if a rank is not the first on several axes, the innermost counts.
    fill = None
    for placement, index in zip(_placed(layout), coordinate, strict=True):
        if isinstance(placement, Partial) and index and neutral(placement.op) is not None:
            fill = neutral(placement.op)
    return fill


# ---- text ----
def _rows(layout: Layout, steps: Sequence[Step], shape: Shape, itemsize: int) -> list[tuple[str, str, str, int]]:
    return [
        (
            type(step).__name__,
            f"{layout.mesh_dim_names[step.axis]} ({layout.mesh_shape[step.axis]} ranks)",
            f"{step.source!r} -> {step.target!r}",
            itemsize * step_cost(step, shape, layout.mesh_shape),
        )
        for step in steps
    ]


def _numbered(ranks: Sequence[int]) -> str:
    """Return ``0-3`` for consecutive ranks, otherwise a list, shortened."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}, ... ({len(ranks)})" if len(ranks) > 8 else f"rank{'s' * (len(ranks) > 1)} {shown}"


def _intervals(ranges: Ranges) -> tuple[Interval, ...]:
    return tuple((int(start), int(length)) for start, length in joined_ranges(ranges))
