"""Rounds: ranks of a context axis compare what they compute, and describe documents and padding of their parts.

Note [Rounds]
    A rank that alone sees something new (a length, a mask) must not be the only one to ask the others. So they compare
    at the first attention of each kind (a class of modules, causal or not: an encoder's, a decoder's) in each call of
    the module that `parallelize_module` was given, whatever that call's data is, and what comes later in the call is
    held against it on each rank alone. A module that is called outside of such a call is one itself. In backward, where
    checkpoints run modules again, a round ends where a module comes for the second time.

Note [What a position says]
    A transformers model sees this rank's part only: it makes a mask for packed documents where position ids do not
    count up by one, which they don't where two chunks of a part meet, and makes none where a document ends exactly
    where a part does. So the ranks tell each other where their position ids stop counting, and whether the model made
    a mask of that. The full sequence is read from all of it, by each rank alike, and what can't be read is refused.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

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


@dataclass
class Round:
    """Calls of attention that belong together.

    Attributes:
        settled: results of comparisons, by what they apply to.
        kept: results that are computed once, by their inputs, which stay alive with them.
        kinds: results of comparisons, by the kind of module.
        seen: modules that were called.
        fault: the error that this rank raises for all of them.
        met: number of calls of each module's attention.
        late: an error that this rank found too late to tell the others.
        followed: groups of ranks with attention that compared nothing.
    """

    settled: dict[Any, Any] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)
    kinds: dict[Any, Any] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    fault: Exception | None = None
    met: dict[int, int] = field(default_factory=dict)
    late: Exception | None = None
    followed: dict[Any, Any] = field(default_factory=dict)

    def place(self, module: int) -> tuple[int, int]:
        """Count one more attention of a module; its place is alike on all ranks, and in all rounds."""
        self.met[module] = self.met.get(module, 0) + 1
        return module, self.met[module]


class Rounds(threading.local):
    """The rounds of one style, on each thread; see Note [Rounds].

    Attributes:
        open: modules that are called, from the outermost on.
        current: the round.
        follows: places whose attention follows the first of its kind, with what each expects; Note [Later attention].
        firsts: what the first of each kind expected; where that changes, nothing follows any more.
    """

    def __init__(self) -> None:
        self.follows: dict[Any, Any] = {}
        self.firsts: dict[Any, Any] = {}
        self.open: list[Any] = []
        self.current = Round()

    def enter(self, root: Any, *, anew: bool = False) -> None:
        """Begin a call of the module around those of the style; with ``anew``, an open one was ended by an error."""
        if anew:
            self.open = list(itertools.takewhile(lambda each: each is not root, self.open))
        if not self.open:
            self.current = Round()
        self.open.append(root)

    def leave(self, root: Any) -> None:
        """End the call, perhaps by an error before it was entered."""
        if self.open and self.open[-1] is root:
            self.open.pop()
            if not self.open:
                self.current = Round()

    def of(self, module: int, *, backward: bool) -> Round:
        """Return the round of a call of a module that has the style.

        Args:
            module: its number: alike on all ranks, which its id is not.
            backward: autograd runs it again.
        """
        if not self.open and (not backward or module in self.current.seen):
            self.current = Round()
        self.current.seen.add(module)
        return self.current

    def __deepcopy__(self, memo: Any) -> Rounds:
        return Rounds()


ERRORS = (ValueError, TypeError, NotImplementedError, RuntimeError)  # the third is one of the fourth
"""Classes of errors that a rank raises; the others then raise one of the same class."""
RUNS = 64
"""Runs of a part that fit into the message; of more, another message follows."""
_TENSORS, _DIMS, _FIXED, _RUN = 3, 6, 11, 4
SIZE = _FIXED + _TENSORS * _DIMS + RUNS * _RUN


@dataclass(frozen=True)
class Header:
    """Description of a rank's next computation.

    Attributes:
        shapes: of q, k and v, or of the one of them that is sent first.
        causal: None where it is not known yet.
        window: keys that a query sees; None is all.
        load_balance: the style's.
        degrees: ranks of its Ulysses groups, and of its inner rings.
        part: its part of the sequence.
        fault: index in `ERRORS` of the error that this rank raises, or None.
    """

    shapes: tuple[tuple[int, ...], ...]
    causal: bool | None
    window: int | None
    load_balance: bool
    degrees: tuple[int, int]
    part: Part
    fault: int | None = None

    def numbers(self) -> list[int]:
        """Encode the message; of more than `RUNS` runs, the first ones."""
        part = self.part
        fixed = [
            -1 if self.fault is None else self.fault,
            -1 if self.causal is None else int(self.causal),
            self.window or 0,
            int(self.load_balance),
            *self.degrees,
            int(part.positioned),
            int(part.packed),
            int(part.joined),
            len(self.shapes),
            sum(len(row) for row in part.rows),
        ]
        dims = [n for shape in self.shapes for n in (*shape[:_DIMS], *[-1] * (_DIMS - len(shape)))]
        dims += [-1] * (_TENSORS * _DIMS - len(dims))
        runs = self.runs()[: RUNS * _RUN]
        return [*fixed, *dims, *runs, *[0] * (RUNS * _RUN - len(runs))]

    def runs(self) -> list[int]:
        """Encode all runs of the part."""
        rows = enumerate(self.part.rows)
        return [n for i, row in rows for run in row for n in (i, run.start, run.position, int(run.kept))]

    @staticmethod
    def read(numbers: Sequence[int], runs: Sequence[int] | None = None) -> Header:
        """Decode a rank's message, with its runs where they came in a second message."""
        fault, causal, window, load_balance, ulysses, inner, positioned, packed, joined, tensors, count = numbers[
            :_FIXED
        ]
        dims = numbers[_FIXED : _FIXED + _TENSORS * _DIMS]
        shapes = (tuple(n for n in dims[i * _DIMS : (i + 1) * _DIMS] if n >= 0) for i in range(tensors))
        flat = (numbers[_FIXED + _TENSORS * _DIMS :] if runs is None else runs)[: count * _RUN]
        quads = [flat[i : i + _RUN] for i in range(0, len(flat), _RUN)]
        rows = [
            tuple(Run(start, position, bool(kept)) for _, start, position, kept in row)
            for _, row in groupby(quads, lambda quad: quad[0])
        ]
        return Header(
            tuple(shapes),
            None if causal < 0 else bool(causal),
            window or None,
            bool(load_balance),
            (ulysses, inner),
            Part(tuple(rows), bool(packed), bool(joined), bool(positioned)),
            None if fault < 0 else fault,
        )

    @staticmethod
    def longest(messages: Sequence[Sequence[int]]) -> int:
        """Return the most numbers that the runs of a rank take; 0 if all fit in the messages."""
        most = max(numbers[_FIXED - 1] for numbers in messages)
        return most * _RUN if most > RUNS else 0


def error_number(fault: Exception | None) -> int | None:
    """Return the index in `ERRORS` of the error that a rank raises."""
    return None if fault is None else next(i for i, kind in enumerate(ERRORS) if isinstance(fault, kind))


def check_refusals(faults: Sequence[int | None], ranks: Sequence[int], fault: Exception | None) -> None:
    """Refuse the step if any rank refuses it.

    Args:
        faults: for each rank the index in `ERRORS` of its error, or None.
        ranks: their names.
        fault: the error that this rank raises, if any.

    Raises:
        Exception: ``fault``; where other ranks refuse, an error of that class which names them.
    """
    if fault is not None:
        raise fault
    refusing = {rank: number for rank, number in zip(ranks, faults, strict=True) if number is not None}
    if refusing:
        raise ERRORS[min(refusing.values())](
            f"ContextParallel: ranks {list(refusing)} refuse this step, for the reasons that their errors give; this "
            "rank cannot compute it alone"
        )


def check_alike(headers: Sequence[Header], ranks: Sequence[int], fault: Exception | None) -> None:
    """Refuse ranks that differ.

    Args:
        headers: each rank's, in the order of the axis.
        ranks: their names.
        fault: the error that this rank raises, if any.

    Raises:
        ValueError: shapes, causality, windows or settings that differ.
        Exception: ``fault``; where other ranks refuse, an error of that class which names them.
    """
    check_refusals([h.fault for h in headers], ranks, fault)
    settings = {rank: (h.load_balance, *h.degrees) for rank, h in zip(ranks, headers, strict=True)}
    if len(set(settings.values())) > 1:
        each = "; ".join(f"rank {rank}: load_balance={b}, {u}, {i}" for rank, (b, u, i) in settings.items())
        raise ValueError(
            f"ContextParallel: the ranks' styles differ in load_balance or in the ranks of a Ulysses group or an inner"
            f" ring: {each}"
        )
    if len({(h.shapes, h.causal, h.window) for h in headers}) > 1:
        three = len(headers[0].shapes) == _TENSORS
        each = "; ".join(
            f"rank {rank}: {[n for shape in h.shapes for n in shape]}, is_causal={h.causal}, window={h.window}"
            for rank, h in zip(ranks, headers, strict=True)
        )
        raise ValueError(
            "ContextParallel: the ranks of the context axis hold parts of different shapes, or differ in is_causal."
            f" The shapes of {'q, k, v' if three else 'the tensor'}, in this order, are {each}. Shard the sequence with"
            " context_parallel_shard, which refuses lengths that do not divide"
        )
