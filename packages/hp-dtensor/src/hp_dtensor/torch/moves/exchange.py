"""Fast ways of a redistribution's steps for even shards; other steps go by intervals.

Note [Even cuts are a transpose]
    An even cut of a contiguous tensor over n ranks is one digit of the element's number: the tensor is ``[O, n, I]``,
    rank ``i`` holds ``[:, i]``. ``O`` is the product of the sizes before the cut (times the split factor of a
    StridedShard), so the pieces lie one after the other exactly if ``O == 1``, and then collectives read and write the
    tensor itself. Two even cuts whose digits nest, ``[O, n, M, n, I]``, are exchanged by one all-to-all with at most
    one transpose before and one after it. Everything else goes by `hp_dtensor.redistribution.executor`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from hp_dtensor.layout.placements import Placement, Shard
from hp_dtensor.layout.sharding import ragged_of
from hp_dtensor.redistribution.executor import Arrays, Run, cuts_of, run_of
from hp_dtensor.redistribution.steps import AllGather, AllReduce, AllToAll, Cut, Place, ReduceScatter, Slice, Step
from hp_platform import get_platform

OVERLAPPED = 1 << 20
"""From so many bytes a rank holds on, an all-to-all that packs leaves a rank's own piece out."""


_ARRAYS = Arrays(
    torch.narrow,
    torch.split,
    torch.cat,
    torch.Tensor.new_empty,
    torch.Tensor.new_full,
    lambda x: x.clone(memory_format=torch.contiguous_format),
)


def run_step(step: Step, place: Place, group: Any, op: str, *, owned: bool) -> Run:
    """Make the function that does a step, the fastest that the step's shards allow.

    Args:
        step: the step.
        place: this rank's.
        group: the process group of the step's axis.
        op: the reduction, for a step that reduces; it may be another than the step's.
        owned: whether the function may overwrite its argument.
    """
    run = _fast(step, place, group, op, owned=owned) if prod(place.whole) else None
    return run_of(step, place, group, op, _ARRAYS) if run is None else run


def _fast(step: Step, place: Place, group: Any, op: str, *, owned: bool) -> Run | None:
    if isinstance(step, Slice):
        return _slice(step.target, place)
    if place.n == 1:
        return None
    if isinstance(step, AllReduce):
        return _all_reduce(op, group) if owned else None
    if isinstance(step, AllGather):
        return _all_gather(Cut.of(step.source, place), place, group)
    if isinstance(step, ReduceScatter):
        return _reduce_scatter(op, Cut.of(step.target, place), place, group)
    if isinstance(step, AllToAll):
        before, after = (cut.blocks for cut in cuts_of(step, place))
        if before is not None and after is not None:
            if after % (before * place.n) == 0 or before % (after * place.n) == 0:
                return _nested_all_to_all(before, after, place, group)
    return None


def _all_reduce(op: str, group: Any) -> Run:
    """Partial to Replicate, in the memory of the argument."""
    send = get_platform().collectives.all_reduce

    def run(local: torch.Tensor) -> torch.Tensor:
        send(local, op, group=group)
        return local

    return run


def _slice(placement: Placement, place: Place) -> Run | None:
    """Replicate to a shard: a copy, so that the whole tensor can be freed."""
    after, contiguous = place.after, torch.contiguous_format
    if not prod(after):
        return None
    cut = Cut.of(placement, place)
    if isinstance(placement, Shard) and not ragged_of(place.bare):
        dim, (start, length) = placement.dim, cut.held[place.me][0]
        return lambda local: local.narrow(dim, start, length).clone(memory_format=contiguous)
    if cut.blocks is None:
        return None
    blocks, n, me = cut.blocks, place.n, place.me
    return lambda local: local.view(blocks, n, -1).select(1, me).clone(memory_format=contiguous).view(after)


def _all_gather(cut: Cut, place: Place, group: Any) -> Run | None:
    """Gather a shard."""
    if cut.blocks is None:
        return None
    send = get_platform().collectives.all_gather
    after, n, rows = place.after, place.n, cut.blocks
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


def _reduce_scatter(op: str, cut: Cut, place: Place, group: Any) -> Run | None:
    """Partial to a shard."""
    if cut.blocks is None:
        return None
    send = get_platform().collectives.reduce_scatter
    after, n, rows = place.after, place.n, cut.blocks
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
    """Tell whether ``n`` pieces make the whole on dim 0, in shape too; if not, collectives get flat views."""
    return bool(piece) and len(piece) == len(whole) and piece[0] * n == whole[0]
