"""Meaning of a mask of this rank's part, and the masks of the full sequence that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hp_styles.context.documents import Part, Run, Segment, plain_runs
from hp_styles.context.plan import chunks_of
from hp_styles.torch.context.call import Call

T = torch.Tensor


def _allowed(length: int, causal: bool, window: int | None, device: torch.device) -> T:
    """[length, length]: which keys of this rank's part a model that knows no other lets a query see."""
    place = torch.arange(length, device=device)
    return _within(place, place, causal, window)


def _within(queries: T, keys: T, causal: bool, window: int | None) -> T:
    """Return which keys are seen, by places in the sequence."""
    queries = queries[:, None]
    seen = keys <= queries if causal else torch.ones(len(queries), len(keys), dtype=torch.bool, device=keys.device)
    return seen if window is None else seen & (keys > queries - window)


@dataclass
class Reading:
    """Meaning of a mask.

    Attributes:
        causal: a query sees no later keys.
        kept: [batch, length]: no padding; None is all.
        packed: position ids that do not count up separate documents.
        joined: it is not, though there is such.
    """

    causal: bool
    kept: T | None = None
    packed: bool = False
    joined: bool = False


def _boolean(mask: T) -> T | None:
    if mask.dtype == torch.bool or not mask.is_floating_point():
        return mask if mask.dtype == torch.bool else None
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden if bool(((mask == 0) | hidden).all()) else None


def read_mask(call: Call, length: int) -> Reading:
    """Read the mask of a call, or what its absence says.

    Raises:
        NotImplementedError: it says something that can't be told from position ids, window and padding.
    """
    if call.mask is None:
        return Reading(call.causal, joined=call.positions is not None and bool(_jumps(call.positions).any()))
    mask = _boolean(call.mask)
    if mask is not None and tuple(mask.shape[1:]) == (1, length, length):
        kept = mask[:, 0].diagonal(dim1=-2, dim2=-1)
        for causal in (call.causal, not call.causal):
            window = call.window if causal else None
            seen = _allowed(length, causal, window, mask.device) & kept[:, None]
            apart = None
            if call.positions is not None:
                document = torch.nn.functional.pad(_jumps(call.positions), (1, 0)).cumsum(-1)
                apart = seen & (document[:, :, None] == document[:, None])
            padding = None if bool(kept.all()) else kept
            if torch.equal(mask[:, 0], seen):
                return Reading(causal, padding, joined=apart is not None and not torch.equal(apart, seen))
            if apart is not None and torch.equal(mask[:, 0], apart.expand_as(seen)):
                return Reading(causal, padding, packed=True)
    raise NotImplementedError(
        f"ContextParallel on {call.name}: its attention_mask of shape {tuple(call.mask.shape)}, for {length} tokens,"
        f" does not consist of causal={call.causal}, a sliding window of {call.window}, packed documents by"
        f" position_ids ({'given' if call.positions is not None else 'not given'}) and padded keys. Only these are"
        " supported where the sequence is sharded; a mask of the full sequence works where q, k and v are a module's"
        " inputs (qkv_indices=) and ulysses_degree is None"
    )


def _jumps(positions: T) -> T:
    """[rows, length - 1]: where position ids do not count up by one."""
    return positions.diff(dim=-1) != 1


def part_of(reading: Reading, positions: T | None, *, rank: int, size: int, length: int, load_balance: bool) -> Part:
    """Describe this rank's part to the other ranks.

    Raises:
        ValueError: position ids of another length.
    """
    if positions is not None and positions.shape[-1] != length:
        raise ValueError(
            f"ContextParallel: position_ids of shape {tuple(positions.shape)} for a part of {length} tokens; shard "
            "them like the tokens, with context_parallel_shard"
        )
    plain = plain_runs(rank, size, length, load_balance)
    kept = reading.kept
    if kept is None and (positions is None or _is_plain(positions, plain)):
        return Part((), reading.packed, reading.joined, positions is not None)
    starts = torch.zeros(1, length, dtype=torch.bool)
    starts[:, [run.start for run in plain]] = True
    if positions is not None:
        starts = starts.to(positions.device).repeat(len(positions), 1)
        starts[:, 1:] |= _jumps(positions)
    if kept is not None:
        starts = starts.to(kept.device).expand(len(kept), -1).clone()
        starts[:, 1:] |= kept.diff(dim=-1)
    found = starts.nonzero()
    here = positions.expand(len(starts), -1)[starts] if positions is not None else torch.zeros_like(found[:, 0])
    stay = kept[starts] if kept is not None else torch.ones_like(found[:, 0])
    rows: list[list[Run]] = [[] for _ in range(len(starts))]
    for row, start, position, is_kept in torch.stack([found[:, 0], found[:, 1], here, stay], 1).tolist():
        rows[row].append(Run(start, position, bool(is_kept)))
    return Part(tuple(map(tuple, rows)), reading.packed, reading.joined, positions is not None)


def _is_plain(positions: T, plain: Sequence[Run]) -> bool:
    runs = [*plain, Run(positions.shape[-1], 0)]
    pieces = [
        torch.arange(run.position, run.position + after.start - run.start, device=positions.device)
        for run, after in zip(runs, runs[1:], strict=False)
    ]
    return bool((positions == torch.cat(pieces)).all())


@dataclass
class Seen:
    """Keys of the full sequence that a query sees.

    Attributes:
        length: tokens of the full sequence.
        causal: none that are later.
        window: only so many up to its own.
        rows: documents and padding of each row; none where the sequence is one document.
    """

    length: int
    causal: bool
    window: int | None
    rows: tuple[tuple[Segment, ...], ...]
    _documents: T | None = field(default=None, repr=False)
    _whole: T | None = field(default=None, repr=False)

    @property
    def is_plain(self) -> bool:
        """True if no mask is needed but ``causal``."""
        return not self.rows and (self.window is None or self.window >= self.length)

    def documents(self, device: torch.device) -> T:
        """[rows, length]: the document of each token, -1 for padding."""
        if self._documents is None:
            rows = []
            for row in self.rows:
                ends = [*(after.start for after in row[1:]), self.length]
                sizes = [end - piece.start for piece, end in zip(row, ends, strict=True)]
                rows.append(torch.tensor([piece.document for piece in row]).repeat_interleave(torch.tensor(sizes)))
            self._documents = torch.stack(rows).to(device)
        return self._documents

    def mask(self, queries: T, keys: T) -> T:
        """Return the mask [rows or 1, 1, queries, keys], by places in the sequence."""
        seen = _within(queries, keys, self.causal, self.window)[None]
        if self.rows:
            documents = self.documents(keys.device)
            seen = seen & (documents[:, keys] >= 0)[:, None]
            if any(segment.document > 0 for row in self.rows for segment in row):
                seen = seen & (documents[:, queries, None] == documents[:, None, keys])
        return seen[:, None]

    def whole(self, device: torch.device) -> T:
        """Return the mask of all queries and keys."""
        if self._whole is None:
            place = torch.arange(self.length, device=device)
            self._whole = self.mask(place, place)
        return self._whole


def places(rank: int, size: int, length: int, load_balance: bool, device: torch.device) -> T:
    """Return the places of a rank's ``length`` tokens in the full sequence."""
    chunks = chunks_of(rank, size, load_balance)
    width = length // len(chunks)
    runs = [torch.arange(chunk * width, (chunk + 1) * width, device=device) for chunk in chunks]
    return runs[0] if len(runs) == 1 else torch.cat(runs)
