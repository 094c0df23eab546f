"""The weights of a model as whole tensors, a bucket of them at a time: a serving engine is refreshed between two steps.

Note [A stream is left together]
    The ranks agree before each bucket, and after the last one. A rank that leaves its loop early, by `break`, an
    exception or `close()`, joins the next agreement once and says so; there all others raise a `CheckpointError` that
    names it. It waits until they come to that agreement, so nobody waits for a rank that does something else. Where all
    ranks leave in one bucket nobody is left to raise. So is a rank heard that has no memory for whole tensors of a
    bucket; what fails while bytes are on their way is heard as a lost rank is, within the group's time limit.

Note [Memory of a stream]
    A bucket is half whole tensors, and a quarter bytes on their way: with what a backend copies of these it is never
    more than the bucket. A tensor that is larger than half a bucket is alone, and fills up in parts of a quarter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from hp_checkpoint.api import bytes_of
from hp_checkpoint.errors import CheckpointError, Ranks
from hp_checkpoint.formats.hugging_face import of_model
from hp_checkpoint.layout.tensors import Piece, clip, scale
from hp_checkpoint.port import Buffer, Tensor, port
from hp_checkpoint.saving.save_plan import Source, describe_tensors, sources
from hp_platform import LostRankError, get_platform

_WHAT = "stream_weights"


def stream_weights(
    model: Any, *, bucket: int | str = "512MiB", ranks: Literal["all", 0] = "all"
) -> Generator[tuple[str, Tensor], None, None]:
    """Yield a model's weights as whole tensors by name, in bounded memory, so that a serving engine can take them.

    All ranks call it together, and all iterate to the end; the model has any layout, that of a pipeline's stages too.
    Names, dtypes and bits are those of the `state_dict()` that the model has in one process: of a transformers model
    the names of its class, with experts as the class stacks them. Parameters and persistent buffers are yielded, a tied
    one once, under the first of its names. An adapter is not merged: its matrices come beside the weights under it,
    by the names that they have in the model.

    Example:
        >>> for name, tensor in stream_weights(model, bucket="1GiB", ranks=0):  # every rank has the loop
        ...     engine[name].copy_(tensor)  # on rank 0 alone
        >>> engine.load_state_dict(dict(stream_weights(model)), strict=False)  # all at once; strict but for tied names

    Args:
        model: with memory; not changed while it is iterated. A pipelined model has different tensors on the ranks.
        bucket: bytes, as 536_870_912 or "512MiB". A rank holds at most so many, or the largest tensor and a quarter of
            so many where that is more, beside the tensor that the loop still has. A shard that is not contiguous is
            copied in addition.
        ranks: "all" yields on every rank; 0 yields on rank 0, and the others' loops have no turn. Default "all".

    Returns:
        An iterator of name and tensor, a plain one without gradient on the device that the ranks communicate with. It
        is the caller's own. Leave it early by `break`, an exception or, where the iterator has a name, its `close()`.

    Raises:
        ValueError: an argument that is none of the above, or ranks that pass different ones; on all ranks, from the
            call.
        TypeError: a tensor whose layout or dtype is not known.
        CheckpointError: some rank left its loop early, or has no memory for whole tensors; on all ranks that have
            not left.
    """
    everyone = Ranks()
    states: list[Any] = []

    def check() -> bytes:
        size = bytes_of(bucket, f"{_WHAT}: bucket")
        if isinstance(ranks, bool) or ranks not in ("all", 0):
            raise ValueError(f"{_WHAT}: ranks={ranks!r}: expected 'all' for every rank, or 0 for rank 0 alone")
        states.append((size, of_model(model)))
        return json.dumps({"bucket": size, "ranks": ranks}).encode()

    answers = everyone.agree(check, _WHAT)
    if len(set(answers)) > 1:
        given = ", ".join(f"rank {rank}: {answer.decode()}" for rank, answer in enumerate(answers[:8]))
        raise ValueError(f"{_WHAT}: the ranks pass different arguments: {given}; all read one stream")
    size, state = states[0]
    found = sources(describe_tensors(state, everyone, _WHAT), _WHAT)
    weights = [_Weight(address[1], source, state.tensors.get(address)) for address, source in found.items()]
    stream = _streamed(weights, size, None if ranks == "all" else 0, everyone)
    next(stream)
    return stream


@dataclass(frozen=True)
class _Weight:
    """A tensor of the model.

    Attributes:
        name: of a Hugging Face model.
        source: the ranks that give its elements.
        value: this rank's; None where it has none.
    """

    name: str
    source: Source
    value: Any


@dataclass(frozen=True)
class _Whole:
    """A tensor that is being filled: itself, its bytes, and what brings these into it."""

    tensor: Tensor
    buffer: Buffer
    store: Callable[[], None] | None


def _streamed(
    weights: Sequence[_Weight], bucket: int, receiver: int | None, ranks: Ranks
) -> Generator[Any, None, None]:
    """Yield None, then the weights; see Note [A stream is left together].

    Args:
        weights: of all ranks.
        bucket: bytes.
        receiver: the rank that yields; None for all.
        ranks: who takes part.
    """
    receives = receiver in (None, ranks.rank)
    wholes: list[_Whole] = []
    given, handed_over = 0, True

    def allocate(group: Sequence[_Weight]) -> bytes:
        if receives:
            kinds = [weight.source.kind for weight in group]
            wholes.extend(_Whole(*port().new_whole(kind.dtype, kind.shape)) for kind in kinds)
        return b""

    try:
        yield None  # from here on the end of the iterator is heard of
        for group in _groups(weights, bucket // 2):
            handed_over = False
            ranks.agree(lambda group=group: allocate(group), _WHAT)
            _fill(group, wholes, max(1, bucket // 4), receiver, ranks)
            handed_over = True
            for weight in group if receives else ():
                given += 1
                yield weight.name, wholes.pop(0).tensor
        handed_over = False
        ranks.agree(bytes, _WHAT)
    except BaseException:
        if handed_over:
            wholes.clear()
            complete = receives and given == len(weights)
            _tell("" if complete else f"its loop was left after {given} of {len(weights)} tensors", ranks)
        raise


def _tell(text: str, ranks: Ranks) -> None:
    """Join the next agreement of the others: with an error, unless the text is empty."""

    def left() -> bytes:
        if text:
            raise CheckpointError(text)
        return b""

    with suppress(CheckpointError, LostRankError):  # this rank leaves for a reason of its own
        ranks.agree(left, _WHAT)


def _groups(weights: Sequence[_Weight], limit: int) -> Iterator[list[_Weight]]:
    """Divide tensors into groups of at most so many bytes; a larger tensor is alone."""
    group: list[_Weight] = []
    size = 0
    for weight in weights:
        if group and size + weight.source.kind.nbytes > limit:
            yield group
            group, size = [], 0
        group.append(weight)
        size += weight.source.kind.nbytes
    if group:
        yield group


_Moves = list[tuple[int, Piece]]
"""The number of a tensor in its group, and a piece of it that some rank has, in bytes."""


def _fill(group: Sequence[_Weight], wholes: Sequence[_Whole], limit: int, receiver: int | None, ranks: Ranks) -> None:
    """Bring the elements of a group's tensors from the ranks that have them.

    Args:
        group: the tensors.
        wholes: to fill, where this rank yields.
        limit: bytes that are on their way at a time.
        receiver: as that of `_streamed`.
        ranks: likewise.
    """
    for start in range(0, sum(weight.source.kind.nbytes for weight in group), limit):
        moves = _moves(group, start, start + limit)
        if receiver is None and ranks.size > 1:
            _to_all(group, wholes, moves, ranks)
        else:
            _to_one(group, wholes, moves, receiver or 0, ranks)
    for whole in wholes:
        if whole.store is not None:
            whole.store()


def _moves(group: Sequence[_Weight], start: int, stop: int) -> dict[int, _Moves]:
    """Return by rank what a range of the group's bytes, one tensor after the other, consists of."""
    found: dict[int, _Moves] = {}
    for number, weight in enumerate(group):
        kind = weight.source.kind
        low, high = max(0, start), min(kind.nbytes, stop)
        for rank, pieces in weight.source.pieces.items() if low < high else ():
            parts = [part for piece in pieces for part in clip(scale(piece, kind.itemsize, 0), low, high)]
            if parts:
                found.setdefault(rank, []).extend((number, part) for part in parts)
        start, stop = start - kind.nbytes, stop - kind.nbytes
    return dict(sorted(found.items()))


def _to_all(group: Sequence[_Weight], wholes: Sequence[_Whole], moves: Mapping[int, _Moves], ranks: Ranks) -> None:
    """Send each rank's part to all others, all parts at once."""
    under_way = []
    for rank, own in moves.items():
        buffer = port().new_buffer(_size(own))
        if rank == ranks.rank:
            _pack(group, own, buffer)
        tensor = port().to_sent(buffer)
        handle = get_platform().collectives.broadcast(tensor, rank, group=ranks.group, async_op=True)
        under_way.append((own, tensor, handle))
    for own, tensor, handle in under_way:
        handle.wait()
        _unpack(wholes, own, port().from_sent(tensor), 0)


def _to_one(
    group: Sequence[_Weight], wholes: Sequence[_Whole], moves: Mapping[int, _Moves], receiver: int, ranks: Ranks
) -> None:
    """Send the other ranks' parts to the receiver, which copies its own."""
    receives, own = ranks.rank == receiver, moves.get(ranks.rank, [])
    if receives:
        for number, piece in own:
            local, whole = port().local_buffer(group[number].value), wholes[number].buffer
            _move(piece, local, piece.local, piece.local_stride, whole, piece.first, piece.stride)
    sizes = [0 if rank == receiver else _size(moves.get(rank, [])) for rank in range(ranks.size)]
    if not any(sizes):
        return
    output, buffer = port().new_buffer(sum(sizes) if receives else 0), port().new_buffer(sizes[ranks.rank])
    if not receives:
        _pack(group, own, buffer)
    received = sizes if receives else [0] * ranks.size
    sent = [sizes[ranks.rank] if rank == receiver else 0 for rank in range(ranks.size)]
    target, tensor = port().to_sent(output), port().to_sent(buffer)
    get_platform().collectives.all_to_all(target, tensor, received, sent, group=ranks.group)
    output, at = port().from_sent(target), 0
    for rank, parts in moves.items() if receives else ():
        if rank != receiver:
            _unpack(wholes, parts, output, at)
            at += sizes[rank]


def _size(moves: _Moves) -> int:
    return sum(piece.size for _, piece in moves)


def _pack(group: Sequence[_Weight], moves: _Moves, buffer: Buffer) -> None:
    """Copy this rank's pieces into a buffer, one after the other."""
    at = 0
    for number, piece in moves:
        local = port().local_buffer(group[number].value)
        _move(piece, local, piece.local, piece.local_stride, buffer, at, piece.length)
        at += piece.size


def _unpack(wholes: Sequence[_Whole], moves: _Moves, buffer: Buffer, at: int) -> None:
    """Copy pieces of a buffer, one after the other from a place on, into the tensors."""
    for number, piece in moves:
        _move(piece, buffer, at, piece.length, wholes[number].buffer, piece.first, piece.stride)
        at += piece.size


def _move(piece: Piece, source: Buffer, start: int, stride: int, target: Buffer, at: int, step: int) -> None:
    port().move_runs(piece.length, piece.count, source, start, stride, target, at, step)
