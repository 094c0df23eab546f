"""What one rank does in each step of a redistribution, on plain MindSpore tensors.

Every step goes by the intervals of `hp_dtensor.layout.sharding.parts`, on tensors seen as ``[outer, run, inner]``.
Functional throughout: a write into a view does not reach its base on MindSpore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from mindspore import Tensor, mint, ops

from hp_dtensor.layout.placements import RaggedShard
from hp_dtensor.layout.sharding import Interval, cut_dim
from hp_dtensor.redistribution.cuts import Cut, Place, common
from hp_dtensor.redistribution.simulate import neutral
from hp_dtensor.redistribution.steps import Step
from hp_platform import get_platform

__all__ = ["Run", "all_gather", "all_reduce", "all_to_all", "reduce_scatter", "slice_", "to_partial"]

Run = Callable[[Tensor], Tensor]


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    return mint.empty(tuple(shape), dtype=like.dtype)


def _join(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    return pieces[0] if len(pieces) == 1 else mint.cat(list(pieces), dim)


def _take(whole: Tensor, dim: int, held: Sequence[Interval]) -> Tensor:
    """Concatenate the intervals ``held`` of ``dim``."""
    if not held:
        return mint.narrow(whole, dim, 0, 0)
    return _join([mint.narrow(whole, dim, start, length) for start, length in held], dim)


def _pieces(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    found, at = [], 0
    for size in sizes:
        found.append(mint.narrow(flat, 0, at, size))
        at += size
    return found


def _padded(flat: Tensor, size: int) -> Tensor:
    missing = size - flat.shape[0]
    return flat if not missing else mint.cat([flat, ops.zeros((missing,), flat.dtype)])


def _in_place(pieces: Sequence[Tensor], held: Sequence[Sequence[Interval]], dim: int) -> Tensor:
    """Each rank's piece, cut in its intervals of ``dim``, put where the intervals are."""
    found: list[tuple[int, Tensor]] = []
    for piece, intervals in zip(pieces, held, strict=True):
        offset = 0
        for start, size in intervals:
            found.append((start, mint.narrow(piece, dim, offset, size)))
            offset += size
    found.sort(key=lambda each: each[0])
    return _join([piece for _, piece in found], dim)


def all_reduce(op: str, place: Place, group: Any) -> Run:
    """Partial to Replicate."""
    send = get_platform().collectives.all_reduce

    def run(local: Tensor) -> Tensor:
        local = local.copy()
        if prod(place.whole):
            send(local, op, group=group)
        return local

    return run


def slice_(placement: Any, place: Place) -> Run:
    """Replicate to a shard."""
    after = place.after
    if not prod(after):
        return lambda local: _empty(local, after)
    cut = Cut.of(placement, place)
    view, held = (cut.outer, cut.run, cut.inner), cut.held[place.me]
    return lambda local: _take(local.reshape(view), 1, held).reshape(after).copy()


def to_partial(op: str, place: Place) -> Run:
    """Replicate to Partial."""
    fill = neutral(op)
    if place.first or fill is None:
        return lambda local: local.copy()
    return lambda local: ops.full(local.shape, fill, dtype=local.dtype)


def all_gather(cut: Cut, place: Place, group: Any) -> Run:
    """Gather a shard; uneven shards are padded to the longest."""
    send = get_platform().collectives.all_gather
    after, n = place.after, place.n
    if not prod(after):
        return lambda local: _empty(local, after)
    lengths, width = cut.lengths, cut.outer * cut.inner
    longest = max(lengths)
    in_order = cut.in_order and min(lengths) == longest

    def run(local: Tensor) -> Tensor:
        out = _empty(local, (n * longest * width,))
        send(out, _padded(local.reshape(-1).contiguous(), longest * width), group=group)
        if in_order:
            return out.reshape(after)
        rows = _pieces(out, [longest * width] * n)
        pieces = [
            mint.narrow(row, 0, 0, length * width).reshape(cut.outer, length, cut.inner)
            for row, length in zip(rows, lengths, strict=True)
        ]
        return _in_place(pieces, cut.held, 1).reshape(after)

    return run


def reduce_scatter(op: str, cut: Cut, place: Place, group: Any) -> Run:
    """Partial to a shard; uneven pieces are padded to the longest."""
    send = get_platform().collectives.reduce_scatter
    after, me = place.after, place.me
    if not prod(place.whole):
        return lambda local: _empty(local, after)
    lengths, width = cut.lengths, cut.outer * cut.inner
    size = max(lengths) * width

    def run(local: Tensor) -> Tensor:
        whole = local.reshape(cut.outer, cut.run, cut.inner)
        packed = _join([_padded(_take(whole, 1, held).reshape(-1), size) for held in cut.held]).contiguous()
        out = _empty(local, (size,))
        send(out, packed, op, group=group)
        return mint.narrow(out, 0, 0, lengths[me] * width).reshape(after).copy()

    return run


def all_to_all(step: Step, place: Place, group: Any) -> Run:
    """One shard to another."""
    after = place.after
    if not prod(place.whole):
        return lambda local: _empty(local, after)
    source, target = Cut.of(step.source, place), Cut.of(step.target, place)
    if isinstance(step.target, RaggedShard):
        source = source.of_run(target.run)
    elif isinstance(step.source, RaggedShard):
        target = target.of_run(source.run)
    if (source.outer, source.run) == (target.outer, target.run):
        return _same_run(source, target, place, group)
    first = (cut_dim(step.source) or 0) < (cut_dim(step.target) or 0)
    return _crossed(source, target, place, group, source_first=first)


def _send(pieces: Sequence[Tensor], receive_sizes: Sequence[int], group: Any) -> list[Tensor]:
    flat = [piece.reshape(-1) for piece in pieces]
    out = _empty(flat[0], (sum(receive_sizes),))
    sizes = [piece.shape[0] for piece in flat]
    get_platform().collectives.all_to_all(out, _join(flat).contiguous(), receive_sizes, sizes, group=group)
    return _pieces(out, receive_sizes)


def _same_run(source: Cut, target: Cut, place: Place, group: Any) -> Run:
    """Both placements cut the same run: ranks exchange the intersections of their intervals."""
    outer, inner, me, after = source.outer, source.inner, place.me, place.after
    sent = [common(source.held[me], there) for there in target.held]
    received = [common(target.held[me], there) for there in source.held]
    counts = [sum(length for _, length in each) for each in received]

    def run(local: Tensor) -> Tensor:
        view = local.reshape(outer, sum(source.lengths[me : me + 1]), inner)
        got = _send([_take(view, 1, each) for each in sent], [outer * inner * count for count in counts], group)
        if not prod(after):
            return _empty(local, after)
        pieces = [piece.reshape(outer, count, inner) for piece, count in zip(got, counts, strict=True)]
        return _in_place(pieces, received, 1).reshape(after).copy()

    return run


def _crossed(source: Cut, target: Cut, place: Place, group: Any, *, source_first: bool) -> Run:
    """Exchange between placements that shard different dims."""
    me, after = place.me, place.after
    left, right = (source, target) if source_first else (target, source)
    middle = left.inner // (right.run * right.inner)
    from_dim, to_dim = (1, 3) if source_first else (3, 1)

    def view(source_size: int, target_size: int) -> tuple[int, ...]:
        sizes = (source_size, target_size) if source_first else (target_size, source_size)
        return (left.outer, sizes[0], middle, sizes[1], right.inner)

    lengths, wanted = source.lengths, target.lengths
    received_views = [view(length, wanted[me]) for length in lengths]

    def run(local: Tensor) -> Tensor:
        whole = local.reshape(view(lengths[me], target.run))
        got = _send([_take(whole, to_dim, held) for held in target.held], [prod(v) for v in received_views], group)
        if not prod(after):
            return _empty(local, after)
        pieces = [piece.reshape(shape) for piece, shape in zip(got, received_views, strict=True)]
        return _in_place(pieces, source.held, from_dim).reshape(after).copy()

    return run
