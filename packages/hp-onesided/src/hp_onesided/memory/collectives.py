"""Collectives whose inputs lie in symmetric memory: each rank reads from the others' what it needs, once.

Note [Two meetings]
    All ranks meet before the first reads, so that every input is written, and hear there what each calls and where its
    input lies. They meet again after the last has read, so that an input may then be overwritten. A sum is in the order
    of the ranks, and rounded once, as that of the group's other collectives: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from typing import Any

from hp_onesided.memory.host import HostMemory
from hp_onesided.planning.headers import OPS, Call, reduces, reduction
from hp_onesided.planning.steps import GRAIN
from hp_onesided.port import Tensor, port


def all_gather(memory: HostMemory, output: Tensor, tensor: Tensor) -> None:
    """Concatenate each rank's tensor."""
    dtype, nbytes = _dtype("all_gather", output, tensor), tensor.nbytes
    _expect("all_gather", output, memory.size * nbytes)
    start, source = port().address(output), port().address(tensor)
    own = start + memory.rank * nbytes
    if source != own:
        _apart("all_gather", output, tensor)
    said = memory.meet(Call("all_gather", dtype, nbytes=nbytes), _place(memory, tensor), "the all_gather")
    for peer in _turns(memory):
        if nbytes and (peer != memory.rank or source != own):
            memmove(start + peer * nbytes, memory.address(peer, said[peer][1]), nbytes)
    memory.arrive("the all_gather")


def reduce_scatter(memory: HostMemory, output: Tensor, tensor: Tensor, op: str) -> None:
    """Reduce, and keep a piece."""
    dtype, nbytes = _dtype("reduce_scatter", output, tensor), output.nbytes
    carried, combine = _reduction("reduce_scatter", dtype, op)
    _expect("reduce_scatter", tensor, memory.size * nbytes)
    target, first = port().address(output), memory.rank * nbytes
    if target != port().address(tensor) + first:  # the own piece is read by no other rank
        _apart("reduce_scatter", output, tensor)
    call = Call("reduce_scatter", dtype, op, nbytes=nbytes)
    said = memory.meet(call, _place(memory, tensor), "the reduce_scatter")
    parts = [memory.address(peer, place) + first for peer, (_, place) in enumerate(said)]
    _reduce(memory, target, parts, nbytes, carried, combine)
    memory.arrive("the reduce_scatter")


def all_reduce(memory: HostMemory, tensor: Tensor, op: str) -> None:
    """Reduce in place: each rank its share of all, and then all read the others' shares."""
    dtype, nbytes = _dtype("all_reduce", tensor, tensor), tensor.nbytes
    carried, combine = _reduction("all_reduce", dtype, op)
    call = Call("all_reduce", dtype, op, nbytes=nbytes)
    said = memory.meet(call, _place(memory, tensor), "the all_reduce")
    places = [memory.address(peer, place) for peer, (_, place) in enumerate(said)]
    share = -(-nbytes // memory.size // GRAIN) * GRAIN if nbytes else 0
    own = places[memory.rank]

    def span(rank: int) -> tuple[int, int]:
        first = min(rank * share, nbytes)
        return first, min(share, nbytes - first)

    first, count = span(memory.rank)
    _reduce(memory, own + first, [place + first for place in places], count, carried, combine)
    memory.arrive("the all_reduce")
    for peer in _turns(memory):
        first, count = span(peer)
        if peer != memory.rank and count:
            memmove(own + first, places[peer] + first, count)
    memory.arrive("the all_reduce")


def all_to_all(
    memory: HostMemory, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
) -> None:
    """Send each rank a piece, and receive one from each."""
    dtype = _dtype("all_to_all", output, tensor)
    gets, gives = (_pieces(memory, each, rows) for each, rows in ((output, received), (tensor, sent)))
    _apart("all_to_all", output, tensor)
    call = Call("all_to_all", dtype, sent=gives, received=gets)
    said = memory.meet(call, _place(memory, tensor), "the all_to_all")
    start = port().address(output)
    for peer in _turns(memory):
        if gets[peer]:
            theirs, place = said[peer]
            target, first = start + sum(gets[:peer]), sum(theirs.sent[: memory.rank])
            memmove(target, memory.address(peer, place) + first, gets[peer])
    memory.arrive("the all_to_all")


def _turns(memory: HostMemory) -> list[int]:
    """Go through all ranks, from this one on, so that not all read the same one at once."""
    return [(memory.rank + ahead) % memory.size for ahead in range(memory.size)]


def _reduce(memory: HostMemory, target: int, parts: Sequence[int], nbytes: int, dtype: str, op: str) -> None:
    if nbytes and len(parts) > 1:
        memory.reduce(target, parts, nbytes, dtype, op)
    elif nbytes and target != parts[0]:
        memmove(target, parts[0], nbytes)


def _dtype(kind: str, output: Tensor, tensor: Tensor) -> str:
    names = {port().dtype(output), port().dtype(tensor)}
    if len(names) > 1 or None in names:
        raise ValueError(
            f"{kind}: input and output have to be plain tensors of the host, of one dtype, got {tensor.dtype} and"
            f" {output.dtype}."
        )
    for each in (output, tensor):
        if not each.is_contiguous():
            raise ValueError(f"{kind}: a tensor of shape {tuple(each.shape)} is not contiguous.")
    (name,) = names
    return str(name)


def _reduction(kind: str, dtype: str, op: str) -> tuple[str, str]:
    """Get what the cores reduce the values as, and by what."""
    if op not in OPS:
        raise ValueError(f"{kind}: op {op!r} is unknown. Choose one of: {', '.join(OPS)}.")
    if not reduces(dtype, op):
        raise TypeError(f"{kind}: there is no {op} of {dtype}.")
    return reduction(dtype, op)


def _expect(kind: str, tensor: Tensor, nbytes: int) -> None:
    if tensor.nbytes != nbytes:
        raise ValueError(f"{kind}: a tensor has {tensor.nbytes} bytes, and {nbytes} are expected.")


def _apart(kind: str, output: Tensor, tensor: Tensor) -> None:
    one, other = port().address(output), port().address(tensor)
    if one < other + tensor.nbytes and other < one + output.nbytes:
        raise ValueError(f"{kind}: the output would overwrite the input, which other ranks still read.")


def _place(memory: HostMemory, tensor: Tensor) -> int:
    """Get where in this rank's memory a tensor is."""
    if not tensor.nbytes:
        return 0
    at = port().address(tensor) - memory.address(memory.rank)
    if not 0 <= at <= memory.layout.nbytes - tensor.nbytes:
        raise ValueError("the input has to lie in this rank's symmetric memory: make it by `local`.")
    return at


def _pieces(memory: HostMemory, tensor: Any, rows: Sequence[int]) -> tuple[int, ...]:
    """Count the bytes for each rank."""
    size, length = memory.size, len(tensor)
    if not rows and length % size:
        raise ValueError(f"all_to_all: {length} rows can't be split equally among {size} ranks; give the rows of each.")
    counts = tuple(rows) or (length // size,) * size
    if len(counts) != size or sum(counts) != length or min(counts) < 0:
        raise ValueError(f"all_to_all: rows {list(counts)} for {size} ranks don't add up to the tensor's {length}.")
    return tuple(tensor.nbytes // length * count if length else 0 for count in counts)
