"""What one rank does in each step of a redistribution.

Note [Even cuts are a transpose]
    An even cut of a contiguous tensor over n ranks is one digit of the element's number: the tensor is ``[O, n, I]``,
    rank ``i`` holds ``[:, i]``. ``O`` is the product of the sizes before the cut (times the split factor of a
    StridedShard), so the pieces lie one after the other exactly if ``O == 1``, and then collectives read and write the
    tensor itself. Two even cuts whose digits nest, ``[O, n, M, n, I]``, are exchanged by one all-to-all with at most
    one transpose before and one after it. Everything else goes by the intervals of `hp_dtensor.layout.sharding.parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from hp_dtensor.layout.placements import Placement, RaggedShard, Shard
from hp_dtensor.layout.sharding import Interval, cut_dim, ragged_of
from hp_dtensor.redistribution.cuts import Cut, Place, common
from hp_dtensor.redistribution.simulate import neutral
from hp_dtensor.redistribution.steps import Step
from hp_platform import get_platform

__all__ = ["Run", "all_gather", "all_reduce", "all_to_all", "reduce_scatter", "slice_", "to_partial"]

Run = Callable[[torch.Tensor], torch.Tensor]

OVERLAPPED = 1 << 20
"""From so many bytes a rank holds on, an all-to-all that packs leaves a rank's own piece out."""
PADDING = 1.25
"""Uneven pieces are padded for an all-gather up to this ratio of padded to real size, else sent by all-to-all."""


def all_reduce(op: str, place: Place, group: Any, *, owned: bool) -> Run:
    """Partial to Replicate. ``owned``: the argument may be overwritten."""
    send = get_platform().collectives.all_reduce
    empty = not prod(place.whole)

    def run(local: torch.Tensor) -> torch.Tensor:
        if not owned:
            local = local.clone()
        if not empty:
            send(local, op, group=group)
        return local

    return run


def slice_(placement: Placement, place: Place) -> Run:
    """Replicate to a shard: a copy, so that the whole tensor can be freed."""
    after, contiguous = place.after, torch.contiguous_format
    if not prod(after):
        return lambda local: local.new_empty(after)
    cut = Cut.of(placement, place)
    view, held = (cut.outer, cut.run, cut.inner), cut.held[place.me]
    if isinstance(placement, Shard) and not ragged_of(place.bare):
        dim, (start, length) = placement.dim, held[0]
        return lambda local: local.narrow(dim, start, length).clone(memory_format=contiguous)
    if cut.blocks is not None:
        blocks, n, me = cut.blocks, place.n, place.me
        return lambda local: local.view(blocks, n, -1).select(1, me).clone(memory_format=contiguous).view(after)

    def run(local: torch.Tensor) -> torch.Tensor:
        whole = local.view(view)
        return torch.cat([whole.narrow(1, start, length) for start, length in held], 1).view(after)

    return run


def to_partial(op: str, place: Place) -> Run:
    """Replicate to Partial."""
    fill = neutral(op)
    if place.first or fill is None:
        return torch.clone
    return lambda local: torch.full_like(local, fill)


def all_gather(cut: Cut, place: Place, group: Any) -> Run:
    """Gather a shard."""
    collectives = get_platform().collectives
    send, send_uneven = collectives.all_gather, collectives.all_to_all
    after, n = place.after, place.n
    if not prod(after):
        return lambda local: local.new_empty(after)
    if cut.blocks is not None:
        rows = cut.blocks
        stack = _stack(prod(after), rows, n)
        flat = rows > 1 or not _concatenate(place.before, after, n)

        def even(local: torch.Tensor) -> torch.Tensor:
            out = local.new_empty(after if rows == 1 else stack)
            if flat:
                send(out.view(-1), local.view(-1), group=group)
            else:
                send(out, local, group=group)
            return out if rows == 1 else out.transpose(0, 1).contiguous().view(after)

        return even
    lengths, width, me = cut.lengths, cut.outer * cut.inner, place.me
    longest = max(lengths)
    if n * longest > PADDING * cut.run:
        sizes = [length * width for length in lengths]

        def exact(local: torch.Tensor) -> torch.Tensor:
            out = local.new_empty(cut.run * width)
            send_uneven(out, local.view(-1).repeat(n), sizes, [sizes[me]] * n, group=group)
            return out.view(after) if cut.in_order else _join(out.split(sizes), cut).view(after)

        return exact

    def padded(local: torch.Tensor) -> torch.Tensor:
        out = local.new_empty((n, longest * width))
        piece = local.view(-1)
        if lengths[me] < longest:
            piece = local.new_empty(longest * width)
            piece[: lengths[me] * width] = local.view(-1)
        send(out.view(-1), piece, group=group)
        return _join([row[: length * width] for row, length in zip(out, lengths, strict=True)], cut).view(after)

    return padded


def _join(pieces: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """Join each rank's shard to the global tensor."""
    found: list[tuple[int, torch.Tensor]] = []
    for piece, held, length in zip(pieces, cut.held, cut.lengths, strict=True):
        offset = 0
        for start, size in held:
            found.append((start, piece.view(cut.outer, length, cut.inner).narrow(1, offset, size)))
            offset += size
    return torch.cat([piece for _, piece in sorted(found, key=lambda each: each[0])], 1)


def reduce_scatter(op: str, cut: Cut, place: Place, group: Any) -> Run:
    """Partial to a shard; uneven pieces are padded."""
    send = get_platform().collectives.reduce_scatter
    after, n, me = place.after, place.n, place.me
    if not prod(place.whole):
        return lambda local: local.new_empty(after)
    if cut.blocks is not None:
        rows = cut.blocks
        stack = _stack(prod(place.whole), rows, n)
        flat = rows > 1 or not _concatenate(after, place.whole, n)
        strides = (stack[2], n * stack[2], 1)

        def even(local: torch.Tensor) -> torch.Tensor:
            if rows > 1:
                local = local.as_strided(stack, strides).contiguous()
            out = local.new_empty(after)
            if flat:
                send(out.view(-1), local.view(-1), op, group=group)
            else:
                send(out, local, op, group=group)
            return out

        return even
    lengths = cut.lengths
    longest = max(lengths)

    def padded(local: torch.Tensor) -> torch.Tensor:
        whole = local.view(cut.outer, cut.run, cut.inner)
        packed = local.new_zeros((n, cut.outer, longest, cut.inner))
        for row, held in zip(packed, cut.held, strict=True):
            offset = 0
            for start, length in held:
                row[:, offset : offset + length] = whole.narrow(1, start, length)
                offset += length
        out = local.new_empty((cut.outer, longest, cut.inner))
        send(out.view(-1), packed.view(-1), op, group=group)
        return out.narrow(1, 0, lengths[me]).contiguous().view(after)

    return padded


def all_to_all(step: Step, place: Place, group: Any) -> Run:
    """One shard to another."""
    after = place.after
    if not prod(place.whole):
        return lambda local: local.new_empty(after)
    source, target = Cut.of(step.source, place), Cut.of(step.target, place)
    if isinstance(step.target, RaggedShard):
        source = source.of_run(target.run)
    elif isinstance(step.source, RaggedShard):
        target = target.of_run(source.run)
    if source.blocks is not None and target.blocks is not None:
        if target.blocks % (source.blocks * place.n) == 0 or source.blocks % (target.blocks * place.n) == 0:
            return _nested_all_to_all(source.blocks, target.blocks, place, group)
    if (source.outer, source.run) == (target.outer, target.run):
        return _same_run_all_to_all(source, target, place, group)
    first = (cut_dim(step.source) or 0) < (cut_dim(step.target) or 0)
    return _crossed_all_to_all(source, target, place, group, source_first=first)


def _nested_all_to_all(source: int, target: int, place: Place, group: Any) -> Run:
    send = get_platform().collectives.all_to_all
    before, after, n = place.before, place.after, place.n
    if source < target:  # [source, n, middle, n, I] with the first n cut: [source, middle, n, I] is sent
        rows, columns = target // n, source
    else:  # [target, n, middle, n, I] with the second n cut: [target, n, middle, I] is sent
        rows, columns = target, source // n
    packed, received = _stack(prod(before), rows, n), _stack(prod(after), columns, n)
    strides = (packed[2], n * packed[2], 1)
    flat_in, flat_out = rows == 1 and before[0] % n > 0, columns == 1 and after[0] % n > 0
    me, piece = place.me, prod(before) // n
    others = slice(1, n) if me == 0 else slice(0, n - 1)
    sizes = [piece] * n
    sizes_of_others = [0 if peer == me else piece for peer in range(n)]

    def keeping_own(local: torch.Tensor) -> torch.Tensor:
        """Copy this rank's own chunk to its place while those of others are in flight."""
        pieces = local.as_strided(packed, strides)
        out = local.new_empty(received)
        if me in (0, n - 1):
            sent = pieces[others].contiguous()
            args = out[others].view(-1), sent.view(-1), sizes_of_others, sizes_of_others
            work: Any = send(*args, group=group, async_op=True)
            out[me].view(packed[1:]).copy_(pieces[me])
            work.wait()
        else:  # its own piece stands between those of others
            send(out.view(-1), pieces.contiguous().view(-1), sizes, sizes, group=group)
        return out

    def run(local: torch.Tensor) -> torch.Tensor:
        if rows > 1 and local.numel() * local.element_size() >= OVERLAPPED:
            out = keeping_own(local)
            return out.view(after) if columns == 1 else out.transpose(0, 1).contiguous().view(after)
        if rows > 1:
            local = local.as_strided(packed, strides).contiguous()
        elif flat_in:
            local = local.view(-1)
        out = local.new_empty(after if columns == 1 else received)
        send(out.view(-1) if flat_out else out, local, group=group)
        return out if columns == 1 else out.transpose(0, 1).contiguous().view(after)

    return run


def _stack(elements: int, rows: int, n: int) -> tuple[int, int, int]:
    """Return the shape of ``n`` consecutive shards of so many rows."""
    return n, rows, elements // (n * rows)


def _concatenate(piece: tuple[int, ...], whole: tuple[int, ...], n: int) -> bool:
    """Whether ``n`` pieces make the whole on dim 0, in shape too; if not, collectives get flat views."""
    return bool(piece) and len(piece) == len(whole) and piece[0] * n == whole[0]


def _same_run_all_to_all(source: Cut, target: Cut, place: Place, group: Any) -> Run:
    """Both placements cut the same run: ranks exchange the intersections of their intervals."""
    send = get_platform().collectives.all_to_all
    outer, inner, me, after = source.outer, source.inner, place.me, place.after
    sent = [common(source.held[me], there) for there in target.held]
    received = [common(target.held[me], there) for there in source.held]
    send_sizes = [outer * inner * sum(length for _, length in each) for each in sent]
    receive_sizes = [outer * inner * sum(length for _, length in each) for each in received]
    pack, unpack = (outer > 1 or not _is_prefix(each) for each in (sent, received))

    def run(local: torch.Tensor) -> torch.Tensor:
        if pack:
            view, local = local.view(outer, -1, inner), local.new_empty(sum(send_sizes))
            _each_piece(local, sent, outer, inner, lambda piece, at, n: piece.copy_(view.narrow(1, at, n)))
        out = local.new_empty(sum(receive_sizes))
        send(out, local.view(-1), receive_sizes, send_sizes, group=group)
        if unpack:
            flat, out = out, local.new_empty((outer, out.numel() // (outer * inner), inner))
            _each_piece(flat, received, outer, inner, lambda piece, at, n: out.narrow(1, at, n).copy_(piece))
        return out.view(after)

    return run


def _is_prefix(pieces: Sequence[Sequence[Interval]]) -> bool:
    """Whether the pieces of all ranks, one after the other, are already the local tensor."""
    at = 0
    for start, length in (piece for each in pieces for piece in each):
        if start != at:
            return False
        at += length
    return True


def _each_piece(
    flat: torch.Tensor, pieces: Sequence[Sequence[Interval]], outer: int, inner: int, do: Callable[[Any, int, int], Any]
) -> None:
    offset = 0
    for start, length in (piece for each in pieces for piece in each):
        size = outer * length * inner
        do(flat[offset : offset + size].view(outer, length, inner), start, length)
        offset += size


def _crossed_all_to_all(source: Cut, target: Cut, place: Place, group: Any, *, source_first: bool) -> Run:
    """Exchange between placements that shard different dims, at least one of them unevenly."""
    send = get_platform().collectives.all_to_all
    me, after = place.me, place.after
    left, right = (source, target) if source_first else (target, source)
    middle = left.inner // (right.run * right.inner)
    from_dim, to_dim = (1, 3) if source_first else (3, 1)

    def view(source_size: int, target_size: int) -> tuple[int, ...]:
        sizes = (source_size, target_size) if source_first else (target_size, source_size)
        return (left.outer, sizes[0], middle, sizes[1], right.inner)

    lengths, wanted = source.lengths, target.lengths
    sent_views = [view(lengths[me], length) for length in wanted]
    received_views = [view(length, wanted[me]) for length in lengths]
    send_sizes, receive_sizes = [prod(v) for v in sent_views], [prod(v) for v in received_views]
    local_view, out_view = view(lengths[me], target.run), view(source.run, wanted[me])

    def run(local: torch.Tensor) -> torch.Tensor:
        whole = local.view(local_view)
        packed = local.new_empty(local.numel())
        for flat, shape, held in zip(packed.split(send_sizes), sent_views, target.held, strict=True):
            _copy(flat.view(shape), whole, to_dim, held, into_intervals=False)
        received = local.new_empty(sum(receive_sizes))
        send(received, packed, receive_sizes, send_sizes, group=group)
        out = local.new_empty(out_view)
        for flat, shape, held in zip(received.split(receive_sizes), received_views, source.held, strict=True):
            _copy(flat.view(shape), out, from_dim, held, into_intervals=True)
        return out.view(after)

    return run


def _copy(
    piece: torch.Tensor, whole: torch.Tensor, dim: int, held: Sequence[Interval], *, into_intervals: bool
) -> None:
    """Copy between a piece and the intervals of ``whole`` that it holds."""
    offset = 0
    for start, length in held:
        inside, outside = piece.narrow(dim, offset, length), whole.narrow(dim, start, length)
        if into_intervals:
            outside.copy_(inside)
        else:
            inside.copy_(outside)
        offset += length
