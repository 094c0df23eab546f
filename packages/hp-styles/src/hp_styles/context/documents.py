"""Documents and padding of a sequence that is sharded over ranks, joined from each rank's description of its part.

Note [What a position says]
    A transformers model sees this rank's part only: it makes a mask for packed documents where position ids do not
    count up by one, which they don't where two chunks of a part meet, and makes none where a document ends exactly
    where a part does. So the ranks tell each other where their position ids stop counting, and whether the model made
    a mask of that. The full sequence is read from all of it, by each rank alike, and what can't be read is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hp_styles.context.plan import chunk_order


@dataclass(frozen=True)
class Run:
    """Tokens of a row, one after the other, whose position ids count up by one, all padding or none of it.

    Attributes:
        start: place of the first in the rank's part of the row.
        position: its position id.
        kept: no padding.
    """

    start: int
    position: int
    kept: bool = True


@dataclass(frozen=True)
class Part:
    """A rank's description of its part of the sequence.

    Attributes:
        rows: the runs of each row of the batch; one row where all are alike, none without position ids and padding.
            Each chunk that the rank holds begins a run.
        packed: the model made a mask that keeps apart what position ids do not join.
        joined: it did not, where they do not count up by one.
        positioned: the module is given position ids.
    """

    rows: tuple[tuple[Run, ...], ...] = ()
    packed: bool = False
    joined: bool = False
    positioned: bool = True

    @property
    def padded(self) -> bool:
        """There is padding in it."""
        return any(not run.kept for row in self.rows for run in row)


@dataclass(frozen=True)
class Segment:
    """Tokens of the full sequence, one after the other.

    Attributes:
        start: place of the first.
        document: index of their document in the row; -1 is padding.
    """

    start: int
    document: int


@dataclass(frozen=True)
class _Piece:
    """A run, in the full sequence."""

    start: int
    stop: int
    position: int
    kept: bool
    leads: bool  # the first of its chunk


def plain_runs(rank: int, size: int, length: int, load_balance: bool) -> tuple[Run, ...]:
    """List the runs of a rank's part of a sequence that is one document without padding."""
    chunks = 2 if load_balance else 1
    width, order = length // chunks, chunk_order(size, load_balance)
    return tuple(Run(i * width, order[rank * chunks + i] * width) for i in range(chunks))


def _pieces(parts: Sequence[Part], row: int, length: int, load_balance: bool) -> list[_Piece]:
    """List the runs of a row in the order of the sequence."""
    size, chunks = len(parts), 2 if load_balance else 1
    width, order = length // chunks, chunk_order(len(parts), load_balance)
    pieces = []
    for rank, part in enumerate(parts):
        rows = part.rows or (plain_runs(rank, size, length, load_balance),)
        runs = rows[row if len(rows) > 1 else 0]
        for run, stop in zip(runs, [*(after.start for after in runs[1:]), length], strict=True):
            chunk, inside = divmod(run.start, width)
            shift = order[rank * chunks + chunk] * width - chunk * width
            pieces.append(_Piece(run.start + shift, stop + shift, run.position, run.kept, inside == 0))
    return sorted(pieces, key=lambda piece: piece.start)


def joined_parts(
    parts: Sequence[Part], *, length: int, load_balance: bool, ranks: Sequence[int]
) -> tuple[tuple[Segment, ...], ...]:
    """Derive the documents and the padding of the full sequence.

    Args:
        parts: each rank's description, in the order of the axis.
        length: tokens of a rank.
        load_balance: the style's.
        ranks: the ranks' names, for errors.

    Returns:
        The segments of each row; nothing where the sequence is one document without padding.

    Raises:
        ValueError: position ids that are not those of one sequence, or that can be read in two ways.
    """
    if all(not part.rows for part in parts):
        return ()
    unnamed = [rank for rank, part in zip(ranks, parts, strict=True) if not part.positioned]
    if unnamed and len(unnamed) < len(parts):
        raise ValueError(
            f"ContextParallel: ranks {unnamed} pass no position_ids, but the others do; pass them on all ranks"
        )
    if not unnamed:
        _check_cut(parts, length, load_balance)
    packed = [rank for rank, part in zip(ranks, parts, strict=True) if part.packed]
    joined = [rank for rank, part in zip(ranks, parts, strict=True) if part.joined]
    padded = [rank for rank, part in zip(ranks, parts, strict=True) if part.padded]
    if packed and (joined or padded):
        raise ValueError(
            f"ContextParallel: the models of ranks {packed} keep documents apart where position_ids do not count up,"
            f" which they do without an attention_mask; those of ranks {sorted({*joined, *padded})} have one, or a"
            " key/value cache. Pass an attention_mask on all ranks or on none, and use_cache=False"
        )
    count = max(len(part.rows) for part in parts)
    rows = []
    for row in range(count):
        pieces = _pieces(parts, row, length, load_balance)
        if not unnamed:
            _check_breaks(pieces, bool(packed), bool(joined or padded))
        rows.append(tuple(_segments(pieces, bool(packed))))
    plain = all(len(row) == 1 and row[0].document == 0 for row in rows)
    return () if plain else tuple(rows)


def _check_cut(parts: Sequence[Part], length: int, load_balance: bool) -> None:
    """Refuse position ids that restart on every rank, or belong to a sequence sharded with the other load_balance."""
    size = len(parts)
    if size == 1:
        return
    runs = [
        (rank, run)
        for rank, part in enumerate(parts)
        for row in part.rows or (plain_runs(rank, size, length, load_balance),)
        for run in row
    ]
    if all(run.position == run.start for _, run in runs):
        raise ValueError(
            f"ContextParallel: position_ids count from 0 to {length - 1} on each of the {size} ranks. Models count "
            "so by default, and so does generate(): pass position_ids sharded like the tokens,"
            " context_parallel_shard(torch.arange(full_length)[None], mesh). If documents are as long as a rank's "
            "part, use load_balance=True"
        )
    chunks = 1 if load_balance else 2
    if length % chunks:
        return
    width, order = length // chunks, chunk_order(size, not load_balance)

    def place(rank: int, start: int) -> int:
        chunk, inside = divmod(start, width)
        return order[rank * chunks + chunk] * width + inside

    if all(run.position == place(rank, run.start) for rank, run in runs):
        raise ValueError(
            f"ContextParallel: position_ids belong to a sequence that is sharded with load_balance={not load_balance},"
            f" the style has load_balance={load_balance}; pass the same to context_parallel_shard and to the style"
        )


def _breaks(pieces: Sequence[_Piece]) -> Iterator[tuple[_Piece, _Piece]]:
    """Find neighbours whose position ids do not count up."""
    for before, after in zip(pieces, pieces[1:], strict=False):
        if after.position != before.position + before.stop - before.start:
            yield before, after


def _check_breaks(pieces: Sequence[_Piece], packed: bool, joined: bool) -> None:
    for before, after in _breaks(pieces):
        ended = before.position + before.stop - before.start - 1
        here = f"token {after.start} of the sequence has position id {after.position}, the one before it {ended}"
        if packed and after.position != 0:
            raise ValueError(
                f"ContextParallel: {here}, but a document begins at 0. Shard position_ids by context_parallel_shard"
                " with the style's load_balance"
            )
        if not packed and after.leads and before.kept and after.kept:
            masked = "there is an attention_mask or a key/value cache, so position_ids do not separate documents"
            two = "a new document cannot be recognised there, since no document ends inside a rank's chunk"
            raise ValueError(
                f"ContextParallel: {here}, on another rank or in another chunk, and {masked if joined else two}. Shard"
                " position_ids like the tokens, by context_parallel_shard with the style's load_balance; for packed"
                " documents leave attention_mask out, pass use_cache=False, and shard with load_balance=True"
            )


def _segments(pieces: Sequence[_Piece], packed: bool) -> Iterator[Segment]:
    starts = {after.start for _, after in _breaks(pieces)} if packed else set()
    document, last = 0, None
    for piece in pieces:
        document += piece.start in starts
        now = document if piece.kept else -1
        if now != last:
            yield Segment(piece.start, now)
        last = now
