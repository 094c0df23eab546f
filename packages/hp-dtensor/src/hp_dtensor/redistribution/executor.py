"""Execution of a redistribution on one rank, by intervals, on the arrays of any framework; numpy's for all ranks.

A step that communicates is an `Exchange`: the local array is packed into one flat buffer, a collective sends it, and
what arrives is unpacked. ``simulate`` runs the same functions on numpy arrays, with the collectives written out. A
framework may have faster ways for even shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from hp_dtensor.layout.placements import RaggedShard
from hp_dtensor.layout.sharding import Interval, cut_dim
from hp_dtensor.redistribution.planner import plan
from hp_dtensor.redistribution.steps import (
    AllGather,
    AllReduce,
    Cut,
    Place,
    ReduceScatter,
    Slice,
    Step,
    ToPartial,
    common,
)
from hp_platform import get_platform
from hp_platform.extend import when_groups_end

if TYPE_CHECKING:
    from hp_dtensor.layout.spec import TensorSpec
from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np

from hp_dtensor.layout.sharding import local_shape

Run = Callable[[Any], Any]

PADDING = 1.25
"""Uneven pieces are padded for an all-gather up to this ratio of padded to real size, else sent by all-to-all."""
BOOL_OPS = {"sum": "max", "max": "max", "product": "min", "min": "min"}
"""The reduction of integers that reduces booleans: sum and max are "or", product and min "and"."""
PROGRAMS: dict[tuple[TensorSpec, TensorSpec], tuple[Run, ...]] = {}
_MAX_PROGRAMS = 8192


@dataclass(frozen=True, slots=True)
class Arrays:
    """Functions of a framework's arrays, which have ``reshape``; none writes into its argument.

    Attributes:
        narrow: takes a range of a dim, ``(x, dim, start, length)``; a view where the framework has them.
        split: splits along dim 0, ``(x, sizes)``; views where the framework has them.
        cat: concatenates in new memory, ``(pieces, dim)``.
        empty: makes an array of the dtype and the device of another, ``(like, shape)``.
        full: makes one of a number, ``(like, shape, value)``.
        copy: copies into new contiguous memory, ``(x)``.
    """

    narrow: Callable[[Any, int, int, int], Any]
    split: Callable[[Any, list[int]], Sequence[Any]]
    cat: Callable[[list[Any], int], Any]
    empty: Callable[[Any, Sequence[int]], Any]
    full: Callable[[Any, Sequence[int], int], Any]
    copy: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A step that communicates, as one rank does it.

    Attributes:
        collective: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_to_all"``.
        pack: makes the flat buffer that is sent, contiguous, from the contiguous local array.
        received: the number of elements that arrive.
        unpack: makes the new local array from the flat buffer that arrived.
        arguments: of the collective, after the two buffers: the reduction, or the sizes received and sent by rank.
    """

    collective: str
    pack: Run
    received: int
    unpack: Run
    arguments: tuple[Any, ...] = ()


# ---- programs ----
def program_of(
    spec_from: TensorSpec, spec_to: TensorSpec, runner: Callable[[Step, Place, Any, bool], Run]
) -> tuple[Run, ...]:
    """Prepare a redistribution and keep it in ``PROGRAMS``.

    Args:
        spec_from: the layout that a tensor is in.
        spec_to: the layout that it gets.
        runner: makes the function that does a step, from the step, its place, the process group and whether the
            function may overwrite its argument.

    Raises:
        ValueError: if the meshes or the shapes of the two specs differ.
    """
    mesh = spec_from.mesh
    if mesh != spec_to.mesh:
        raise ValueError(f"redistribute: the tensor is on {mesh!r}, the target on {spec_to.mesh!r}: one mesh is needed")
    if spec_from.shape != spec_to.shape:
        raise ValueError(f"redistribute: shape {spec_from.shape} cannot become {spec_to.shape}: only placements change")
    coordinate = mesh.get_coordinate()
    runs: list[Run] = []
    if coordinate is not None:  # a rank outside the mesh holds nothing and takes part in nothing
        for step in plan(spec_from.placements, spec_to.placements, spec_from.shape, tuple(mesh.shape)):
            place = Place.of(step, spec_from.shape, mesh.shape, coordinate, mesh.group_order(step.axis))
            runs.append(runner(step, place, mesh.get_group(step.axis) if place.n > 1 else None, bool(runs)))
    if len(PROGRAMS) >= _MAX_PROGRAMS:
        PROGRAMS.clear()
    program = PROGRAMS[spec_from, spec_to] = tuple(runs)
    return program


when_groups_end(PROGRAMS.clear)


def wrong_part(local: Sequence[int], spec: TensorSpec) -> ValueError:
    """Describe a local tensor whose shape is not what its layout gives this rank."""
    return ValueError(
        f"redistribute: the local tensor has shape {tuple(local)}, {spec.placements} of shape {spec.shape} on mesh"
        f" {spec.mesh.shape} gives this rank {spec.local_shape}"
    )


def run_of(step: Step, place: Place, group: Any, op: str, arrays: Arrays) -> Run:
    """Make the function that does a step.

    Args:
        step: the step.
        place: this rank's.
        group: the process group of the step's axis.
        op: the reduction, for a step that reduces; it may be another than the step's.
        arrays: the framework's.
    """
    if (alone := local_run(step, place, arrays)) is not None:
        return alone
    if isinstance(step, AllReduce):
        reduce = get_platform().collectives.all_reduce

        def all_reduce(local: Any) -> Any:
            local = arrays.copy(local)
            reduce(local, op, group=group)
            return local

        return all_reduce
    way = exchange(step, place, op, arrays)
    send: Any = getattr(get_platform().collectives, way.collective)

    def run(local: Any) -> Any:
        packed = way.pack(local)
        out = arrays.empty(packed, (way.received,))
        send(out, packed, *way.arguments, group=group)
        return way.unpack(out)

    return run


# ---- steps ----
def neutral(op: str) -> int | None:
    """Return what other ranks than the first hold of a replicated value as ``Partial(op)``; None: the value."""
    return {"sum": 0, "product": 1}.get(op)


def local_run(step: Step, place: Place, arrays: Arrays) -> Run | None:
    """Make the function that does a step without communication; None for a step that communicates."""
    after = place.after
    if isinstance(step, ToPartial):
        fill = neutral(step.op)
        if place.first or fill is None:
            return arrays.copy
        return lambda local: arrays.full(local, local.shape, fill)
    if not prod(after if isinstance(step, Slice) else place.whole):
        return lambda local: arrays.empty(local, after)
    if isinstance(step, Slice):
        cut = Cut.of(step.target, place)
        view, intervals = (cut.outer, cut.run, cut.inner), cut.held[place.me]
        return lambda local: _joined(arrays, _ranges(arrays, local.reshape(view), 1, intervals), 1).reshape(after)
    if place.n == 1:  # only a RaggedShard is undone or made on an axis of one rank
        return lambda local: arrays.copy(local).reshape(after)
    return None


def exchange(step: Step, place: Place, op: str, arrays: Arrays) -> Exchange:
    """Plan a step that communicates and is no all-reduce.

    Args:
        step: the step.
        place: this rank's, among two or more, of a tensor with elements.
        op: the reduction, for a step that reduces.
        arrays: the framework's.
    """
    if isinstance(step, AllGather):
        return _all_gather(Cut.of(step.source, place), place, arrays)
    if isinstance(step, ReduceScatter):
        return _reduce_scatter(op, Cut.of(step.target, place), place, arrays)
    source, target = cuts_of(step, place)
    if (source.outer, source.run) == (target.outer, target.run):
        return _same_run(source, target, place, arrays)
    first = (cut_dim(step.source) or 0) < (cut_dim(step.target) or 0)
    return _crossed(source, target, place, arrays, source_first=first)


def cuts_of(step: Step, place: Place) -> tuple[Cut, Cut]:
    """Return what an all-to-all undoes and what it makes, of one run of elements where one of them is ragged."""
    source, target = Cut.of(step.source, place), Cut.of(step.target, place)
    if isinstance(step.target, RaggedShard):
        return source.of_run(target.run), target
    return source, target.of_run(source.run) if isinstance(step.source, RaggedShard) else target


def _all_gather(cut: Cut, place: Place, arrays: Arrays) -> Exchange:
    """Gather a shard; uneven pieces are padded to the longest, or sent exactly where that adds too much."""
    after, n, me = place.after, place.n, place.me
    lengths, width = cut.lengths, cut.outer * cut.inner
    longest = max(lengths)
    exact = n * longest > PADDING * cut.run
    sizes = [(length if exact else longest) * width for length in lengths]

    def pack(local: Any) -> Any:
        flat = local.reshape((-1,))
        return arrays.cat([flat] * n, 0) if exact else _padded(arrays, flat, 0, longest * width)

    def unpack(out: Any) -> Any:
        if cut.in_order and sum(sizes) == cut.run * width:
            return out.reshape(after)
        pieces = [
            (piece if size == length * width else arrays.narrow(piece, 0, 0, length * width)).reshape(
                (cut.outer, length, cut.inner)
            )
            for piece, size, length in zip(arrays.split(out, sizes), sizes, lengths, strict=True)
        ]
        return _put(arrays, pieces, cut.held, 1).reshape(after)

    if exact:
        return Exchange("all_to_all", pack, sum(sizes), unpack, (sizes, [sizes[me]] * n))
    return Exchange("all_gather", pack, sum(sizes), unpack)


def _reduce_scatter(op: str, cut: Cut, place: Place, arrays: Arrays) -> Exchange:
    """Reduce and cut; uneven pieces are padded to the longest."""
    after, lengths, width = place.after, cut.lengths, cut.outer * cut.inner
    longest, mine = max(lengths), lengths[place.me]

    def pack(local: Any) -> Any:
        whole = local.reshape((cut.outer, cut.run, cut.inner))
        return arrays.cat([_padded(arrays, _take(arrays, whole, 1, each), 1, longest) for each in cut.held], 0)

    def unpack(out: Any) -> Any:
        piece = out.reshape((cut.outer, longest, cut.inner))
        return (piece if mine == longest else arrays.copy(arrays.narrow(piece, 1, 0, mine))).reshape(after)

    return Exchange("reduce_scatter", lambda local: pack(local).reshape((-1,)), longest * width, unpack, (op,))


def _same_run(source: Cut, target: Cut, place: Place, arrays: Arrays) -> Exchange:
    """Exchange the intersections of the ranks' intervals, where both placements cut the same run."""
    outer, inner, me, after = source.outer, source.inner, place.me, place.after
    sent = [common(source.held[me], each) for each in target.held]
    received = [common(target.held[me], each) for each in source.held]
    lengths_in, lengths_out = ([sum(length for _, length in each) for each in way] for way in (received, sent))
    sizes_in, sizes_out = ([outer * inner * length for length in lengths] for lengths in (lengths_in, lengths_out))
    packs, unpacks = (outer > 1 or not _is_prefix(way) for way in (sent, received))
    view = outer, source.lengths[me], inner

    def pack(local: Any) -> Any:
        if not packs:
            return local.reshape((-1,))
        whole = local.reshape(view)
        return arrays.cat([_take(arrays, whole, 1, each).reshape((-1,)) for each in sent], 0)

    def unpack(out: Any) -> Any:
        if not unpacks or not prod(after):
            return out.reshape(after)
        pieces = arrays.split(out, sizes_in)
        shaped = [piece.reshape((outer, length, inner)) for piece, length in zip(pieces, lengths_in, strict=True)]
        return _put(arrays, shaped, received, 1).reshape(after)

    return Exchange("all_to_all", pack, sum(sizes_in), unpack, (sizes_in, sizes_out))


def _crossed(source: Cut, target: Cut, place: Place, arrays: Arrays, *, source_first: bool) -> Exchange:
    """Exchange the pieces of two placements that cut different dims."""
    me, after = place.me, place.after
    left, right = (source, target) if source_first else (target, source)
    middle = left.inner // (right.run * right.inner)
    from_dim, to_dim = (1, 3) if source_first else (3, 1)

    def view(source_size: int, target_size: int) -> tuple[int, ...]:
        sizes = (source_size, target_size) if source_first else (target_size, source_size)
        return (left.outer, sizes[0], middle, sizes[1], right.inner)

    lengths, targets = source.lengths, target.lengths
    local_view, views_in = view(lengths[me], target.run), [view(length, targets[me]) for length in lengths]
    sizes_in, sizes_out = [prod(each) for each in views_in], [prod(view(lengths[me], length)) for length in targets]

    def pack(local: Any) -> Any:
        whole = local.reshape(local_view)
        return arrays.cat([_take(arrays, whole, to_dim, each).reshape((-1,)) for each in target.held], 0)

    def unpack(out: Any) -> Any:
        if not prod(after):
            return out.reshape(after)
        pieces = zip(arrays.split(out, sizes_in), views_in, strict=True)
        return _put(arrays, [piece.reshape(shape) for piece, shape in pieces], source.held, from_dim).reshape(after)

    return Exchange("all_to_all", pack, sum(sizes_in), unpack, (sizes_in, sizes_out))


# ---- intervals of arrays ----
def _ranges(arrays: Arrays, whole: Any, dim: int, intervals: Sequence[Interval]) -> list[Any]:
    return [arrays.narrow(whole, dim, start, length) for start, length in intervals]


def _joined(arrays: Arrays, pieces: list[Any], dim: int) -> Any:
    return arrays.copy(pieces[0]) if len(pieces) == 1 else arrays.cat(pieces, dim)


def _take(arrays: Arrays, whole: Any, dim: int, intervals: Sequence[Interval]) -> Any:
    """Take intervals of ``dim``, one after the other; a view where they are one."""
    pieces = _ranges(arrays, whole, dim, intervals or [(0, 0)])
    return pieces[0] if len(pieces) == 1 else arrays.cat(pieces, dim)


def _put(arrays: Arrays, pieces: Sequence[Any], held: Sequence[Sequence[Interval]], dim: int) -> Any:
    """Put each rank's piece, its intervals of ``dim`` one after the other, where the intervals are."""
    ranges: list[tuple[int, Any]] = []
    for piece, intervals in zip(pieces, held, strict=True):
        offset = 0
        for start, length in intervals:
            ranges.append((start, arrays.narrow(piece, dim, offset, length) if len(intervals) > 1 else piece))
            offset += length
    return _joined(arrays, [piece for _, piece in sorted(ranges, key=lambda each: each[0])], dim)


def _padded(arrays: Arrays, x: Any, dim: int, length: int) -> Any:
    shape = tuple(x.shape)
    if shape[dim] == length:
        return x
    return arrays.cat([x, arrays.full(x, (*shape[:dim], length - shape[dim], *shape[dim + 1 :]), 0)], dim)


def _is_prefix(ways: Sequence[Sequence[Interval]]) -> bool:
    """Tell whether the pieces of all ranks, one after the other, are already the local tensor."""
    at = 0
    for start, length in (piece for each in ways for piece in each):
        if start != at:
            return False
        at += length
    return True


Coordinate = tuple[int, ...]


def coordinates(mesh_shape: Sequence[int]) -> Iterator[Coordinate]:
    """All coordinates of a mesh, the last axis fastest."""
    return product(*map(range, mesh_shape))


def simulate(
    steps: Sequence[Step], locals_: Mapping[Coordinate, np.ndarray], shape: Sequence[int], mesh_shape: Sequence[int]
) -> dict[Coordinate, np.ndarray]:
    """Return the local array of each rank after the steps.

    Args:
        steps: from `plan`.
        locals_: the local array of each mesh coordinate.
        shape: the global shape.
        mesh_shape: ranks on each mesh axis.

    Returns:
        The local array of each mesh coordinate; the given ones are not changed.

    Raises:
        ValueError: if a local array's shape is not what the placements give.
    """
    held = dict(locals_)
    if steps:
        for coordinate, array in held.items():
            expected = local_shape(shape, steps[0].before, mesh_shape, coordinate)
            if array.shape != expected:
                raise ValueError(
                    f"the local array at {coordinate} has shape {array.shape}, expected {expected} for shape "
                    f"{tuple(shape)} with placements {steps[0].before} on mesh {tuple(mesh_shape)}"
                )
    for step in steps:
        after: dict[Coordinate, np.ndarray] = {}
        for first in coordinates(mesh_shape):
            if first[step.axis]:
                continue
            group = [(*first[: step.axis], i, *first[step.axis + 1 :]) for i in range(mesh_shape[step.axis])]
            places = [Place.of(step, tuple(shape), tuple(mesh_shape), coordinate) for coordinate in group]
            after.update(zip(group, _run(step, places, [held[coordinate] for coordinate in group]), strict=True))
        held = after
    return held


def reduce_arrays(arrays: Sequence[Any], op: str) -> Any:
    """Reduce arrays of equal shape by a ``Partial`` op; integers keep their type, and avg rounds down for them."""
    stacked = np.stack(arrays)
    if op == "avg":
        total = stacked.sum(0, dtype=stacked.dtype)
        return total // len(arrays) if stacked.dtype.kind in "iu" else total / len(arrays)
    if op in ("sum", "product"):
        return (stacked.sum if op == "sum" else stacked.prod)(0, dtype=stacked.dtype)
    return stacked.min(0) if op == "min" else stacked.max(0)


_ARRAYS = Arrays(
    lambda x, dim, start, length: x[(slice(None),) * dim + (slice(start, start + length),)],
    lambda x, sizes: np.split(x, np.cumsum(sizes)[:-1]),
    np.concatenate,
    lambda like, shape: np.empty(shape, like.dtype),
    lambda like, shape, value: np.full(shape, value, like.dtype),
    np.copy,
)


def _run(step: Step, places: Sequence[Place], locals_: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Do a step for all ranks of a group."""
    runs = [local_run(step, place, _ARRAYS) for place in places]
    if any(runs):
        return [run(local) for run, local in zip(runs, locals_, strict=True) if run is not None]
    if isinstance(step, AllReduce):
        return [reduce_arrays(locals_, step.op)] * len(places)
    op = step.op if isinstance(step, ReduceScatter) else ""
    ways = [exchange(step, place, op, _ARRAYS) for place in places]
    sent = [way.pack(local) for way, local in zip(ways, locals_, strict=True)]
    if ways[0].collective == "all_gather":
        got = [np.concatenate(sent)] * len(ways)
    elif ways[0].collective == "reduce_scatter":
        got = np.split(reduce_arrays(sent, op), len(ways))
    else:  # sizes sent are the second argument
        pieces = [_ARRAYS.split(each, way.arguments[1]) for each, way in zip(sent, ways, strict=True)]
        got = [np.concatenate(received) for received in zip(*pieces, strict=True)]
    return [way.unpack(each) for way, each in zip(ways, got, strict=True)]
