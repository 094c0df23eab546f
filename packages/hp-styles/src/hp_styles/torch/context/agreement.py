"""Comparison of the ranks of a context axis before they compute, once per round; see Note [Rounds] in `rounds.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hp_dtensor import DTensor
from hp_platform.torch.internals import in_backward
from hp_styles.context.rounds import (
    ERRORS,
    Header,
    Part,
    Round,
    Rounds,
    check_alike,
    check_refusals,
    error_number,
    joined_parts,
)
from hp_styles.torch.context.call import Call, Reading, Seen, part_of, read_mask
from hp_styles.torch.context.exchange import SequenceGroup, like

T = torch.Tensor
_SEQUENCE = 2


@dataclass(frozen=True)
class _Agreed:
    """Result of the ranks' comparison at the first attention of a kind.

    Attributes:
        lengths: of the batch, the queries and the keys.
        parts: each rank's description of its part of the sequence.
        part: this rank's.
        rows: the documents and the padding of the full sequence.
    """

    lengths: tuple[int, ...]
    parts: tuple[Part, ...]
    part: Part
    rows: tuple[Any, ...]


@dataclass(frozen=True)
class _Expected:
    """Tensors of attention that follows: batch and sequence are those of the first of its kind."""

    tensors: tuple[tuple[int, int, torch.dtype], ...]  # heads, head size

    def zeros(self, lengths: tuple[int, ...], like: T) -> tuple[T, ...]:
        """Return the numbers of a rank that keeps an error."""
        batch, queries, keys = lengths
        sizes = (queries, keys, keys)[: len(self.tensors)]
        return tuple(
            like.new_zeros(batch, heads, length, size, dtype=dtype)
            for (heads, size, dtype), length in zip(self.tensors, sizes, strict=True)
        )


def _lengths(parts: Sequence[T]) -> tuple[int, ...]:
    return parts[0].shape[0], parts[0].shape[_SEQUENCE], parts[-1].shape[_SEQUENCE]


@dataclass
class AttentionAgreement:
    """Comparison of a module's attention over the ranks, in one call.

    Attributes:
        group: the ranks.
        number: of the module, alike on all ranks.
        rounds: of the style.
        degrees: ranks of a Ulysses group, and of an inner ring.
        call: the module's arguments.
        round: the results of other calls.
        early: something is sent before attention reads it.
    """

    group: SequenceGroup
    number: int
    rounds: Rounds
    degrees: tuple[int, int]
    call: Call
    round: Round
    early: bool = False

    def of(
        self, checked: Callable[[], tuple[T, ...]], tensors: Sequence[T], is_causal: bool | None
    ) -> tuple[Any, Seen]:
        """Return the result of ``checked``, and what a query sees.

        Args:
            checked: this rank's parts of q, k and v, or of the one of them that is sent first, [batch, heads, sequence,
                head size]; or an error.
            tensors: the tensors that they are parts of.
            is_causal: None where it is not known yet.

        Returns:
            Zeros where this rank keeps an error: Note [Later attention] in `hp_styles.context.rounds`.

        Raises:
            Exception: that of ``checked``; what differs between ranks; where other ranks refuse, an error of its class.
        """
        parts, part, fault, causal, reading = tuple(tensors), Part(positioned=False), None, is_causal, None
        try:
            refused = self.round.fault or self.round.late
            if refused is not None:
                raise refused
            parts = checked()
            self.call.refuse_cache(f"{'Async' * self.early}ContextParallel", filled=not self.early)
            if self.group.size > 1:
                causal, reading, part = self._read(parts, is_causal)
        except ERRORS as error:
            fault = error
        if self.group.size == 1:
            if fault is not None:
                raise fault
            return parts, Seen(parts[-1].shape[_SEQUENCE], bool(is_causal), None, ())
        parts, rows = self._settled(parts, part, causal, fault)
        length = parts[-1].shape[_SEQUENCE] * self.group.size
        seen = Seen(length, bool(causal), self.call.window if causal else None, rows)
        return parts, self.round.kept.setdefault(("seen", seen.causal, seen.window, rows, length), seen)

    def keep(self, fault: Exception) -> None:
        """Keep an error until the round ends; in backward, where it has no end, raise it.

        Raises:
            Exception: ``fault``.
        """
        if in_backward():
            raise fault
        self.round.late = self.round.late or fault
        self.round.followed[self.group.mesh] = self.group

    def _read(self, parts: tuple[T, ...], is_causal: bool | None) -> tuple[bool | None, Reading, Part]:
        """Read whether attention is causal, its mask, and this rank's description of its part."""
        call, group, lengths = self.call, self.group, [x.shape[_SEQUENCE] for x in parts]
        if len(set(lengths)) > 1:  # attention to another sequence
            if call.mask is not None or (call.positions is not None and call.positions.shape[-1] != lengths[0]):
                raise NotImplementedError(
                    f"ContextParallel on {call.name}: {lengths[0]} queries and {lengths[-1]} keys, with an"
                    " attention_mask or position_ids of another length; masks are supported only where a sequence "
                    "attends to itself"
                )
            return is_causal, Reading(bool(is_causal)), Part(positioned=False)
        key = ("reading", id(call.mask), id(call.positions), call.causal, call.window, lengths[0])
        if key not in self.round.kept:
            reading = read_mask(call, lengths[0])
            sizes = {"rank": group.place, "size": group.size, "length": lengths[0], "load_balance": group.load_balance}
            part = part_of(reading, call.positions, **sizes)
            self.round.kept[key] = reading, part, call.mask, call.positions  # which keeps their ids
        reading, part, *_ = self.round.kept[key]
        causal = is_causal
        if call.mask is not None:
            causal = reading.causal
        elif call.takes_mask and (lengths[0] == 1 or is_causal is None):  # of one token, transformers does not say
            causal = call.causal
        if call.window is not None and causal is False and call.window < 2 * lengths[0] * group.size:
            raise NotImplementedError(
                f"ContextParallel on {call.name}: a sliding window of {call.window} that sees keys on both sides, over"
                f" {lengths[0] * group.size} tokens; windows are supported only under a causal mask"
            )
        return causal, reading, part

    def _settled(
        self, parts: tuple[T, ...], part: Part, causal: bool | None, fault: Exception | None
    ) -> tuple[tuple[T, ...], Any]:
        """Exchange descriptions of the parts, and derive the documents and padding of the full sequence."""
        kind = self.call.name, self.call.causal  # alike on all ranks, as no length is
        first, place = self.round.kinds.get(kind), self.round.place(self.number)
        if first is not None and place in self.rounds.follows:
            return self._following(first, self.rounds.follows[place], parts, part, fault)
        shapes = tuple(tuple(x.shape) for x in parts)
        number = error_number(fault)
        header = Header(shapes, causal, self.call.window, self.group.load_balance, self.degrees, part, number)
        headers = self._exchanged(header)
        check_alike(headers, self.group.ranks, fault)
        described = tuple(h.part for h in headers)
        rows = joined_parts(
            described,
            length=parts[0].shape[_SEQUENCE],
            load_balance=self.group.load_balance,
            ranks=self.group.ranks,
        )
        expected = _Expected(tuple((x.shape[1], x.shape[3], x.dtype) for x in parts))
        if first is None and self.rounds.firsts.setdefault(kind, expected) != expected:  # it's another model's
            self.rounds.follows.clear()
            self.rounds.firsts = {kind: expected}
        first = self.round.kinds.setdefault(kind, _Agreed(_lengths(parts), described, part, rows))
        if (first.lengths, first.parts) == (_lengths(parts), described):
            self.rounds.follows[place] = expected
        return parts, rows

    def _following(
        self, first: _Agreed, expected: _Expected, parts: tuple[T, ...], part: Part, fault: Exception | None
    ) -> tuple[tuple[T, ...], Any]:
        """Return the same for attention that is compared with the first of its kind in the round."""
        self.round.followed[self.group.mesh] = self.group
        if fault is None and _lengths(parts) != first.lengths:
            batch, queries, keys = _lengths(parts)
            fault = ValueError(
                f"ContextParallel on {self.call.name}: this rank's parts are {queries} queries and {keys} keys, batch"
                f" {batch}; in the steps before, they were as long as those of the first {self.call.name} of the step,"
                f" which here are {first.lengths[1]} and {first.lengths[2]}, batch {first.lengths[0]}. Shard the"
                " sequence to one length on all ranks; if a layer changes it on all of them, repeat the step: lengths"
                " are then compared at each layer"
            )
        if fault is None and part != first.part:
            fault = RuntimeError(
                f"ContextParallel on {self.call.name}: its attention_mask describes other documents or padding than "
                "modules before it in the same step; only one of each is supported per step"
            )
        if fault is None:
            return parts, first.rows
        self.keep(fault)
        return expected.zeros(first.lengths, parts[0]), first.rows

    def _exchanged(self, header: Header) -> list[Header]:
        """Exchange descriptions, in one message, or in two where a rank's part has too many runs for one."""
        messages = self.group.gathered(header.numbers())
        longest = Header.longest(messages)
        if not longest:
            return [Header.read(numbers) for numbers in messages]
        mine = header.runs()
        runs = self.group.gathered([*mine, *[0] * (longest - len(mine))])
        return [Header.read(numbers, more) for numbers, more in zip(messages, runs, strict=True)]


def end_round(now: Round, rounds: Rounds) -> None:
    """Refuse a round in which a rank kept an error; Note [Later attention] in `hp_styles.context.rounds`.

    Raises:
        Exception: that of this rank; where others have one, an error of its class.
    """
    followed, now.followed = now.followed, {}
    for group in followed.values():
        number = error_number(now.late)
        rows = group.gathered([-1 if number is None else number])
        faults = [None if row[0] < 0 else row[0] for row in rows]
        if any(fault is not None for fault in faults):
            rounds.follows.clear()
            fault, now.late = now.late, None
            check_refusals(faults, group.ranks, fault)


def zeros_like_queries(query: T, value: T) -> T:
    """Return zeros in place of attention's output, on a rank that keeps an error."""
    local = query.to_local() if isinstance(query, DTensor) else query
    return like(local.new_zeros((*local.shape[:-1], value.shape[-1])), query)
