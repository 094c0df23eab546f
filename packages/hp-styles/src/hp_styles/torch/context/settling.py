"""What the ranks of a context axis compare before they compute, once a round: Note [Rounds] in `context_rounds`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hp_styles.context_documents import Part, joined_parts
from hp_styles.context_header import ERRORS, Header, check_alike
from hp_styles.context_rounds import Round
from hp_styles.torch.context.call import Call
from hp_styles.torch.context.group import SequenceGroup
from hp_styles.torch.context.masks import Reading, Seen, part_of, read_mask

__all__ = ["Settling"]

T = torch.Tensor
_SEQUENCE = 2


@dataclass
class Settling:
    """What a call of a module and the ranks find out about its attention.

    Attributes:
        group: the ranks.
        ulysses: ranks of a Ulysses group.
        call: what the module is called with.
        round: what other calls found out.
        early: something is sent before attention reads it.
    """

    group: SequenceGroup
    ulysses: int
    call: Call
    round: Round
    early: bool = False

    def of(self, checked: Callable[[], tuple[T, ...]], given: Sequence[T], is_causal: bool | None) -> tuple[Any, Seen]:
        """What ``checked`` returns, and what a query sees.

        Args:
            checked: this rank's parts of q, k and v, or of the one of them that is sent first, [batch, heads, sequence,
                head size]; or an error.
            given: what they are parts of.
            is_causal: None where it is not known yet.

        Raises:
            Exception: that of ``checked``; what differs between ranks; where other ranks refuse, an error of its class.
        """
        parts, part, fault, causal, reading = tuple(given), Part(positioned=False), None, is_causal, None
        try:
            if self.round.fault is not None:
                raise self.round.fault
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
        rows = self._rows_of(parts, part, causal, fault)
        length = parts[-1].shape[_SEQUENCE] * self.group.size
        seen = Seen(length, bool(causal), self.call.window if causal else None, rows)
        return parts, self.round.kept.setdefault(("seen", seen.causal, seen.window, rows, length), seen)

    def _read(self, parts: tuple[T, ...], is_causal: bool | None) -> tuple[bool | None, Reading, Part]:
        """Whether attention is causal, what the mask says, what this rank says of its part."""
        call, group, lengths = self.call, self.group, [x.shape[_SEQUENCE] for x in parts]
        if len(set(lengths)) > 1:  # attention to another sequence
            if call.mask is not None or (call.positions is not None and call.positions.shape[-1] != lengths[0]):
                raise NotImplementedError(
                    f"ContextParallel on {call.name}: {lengths[0]} queries and {lengths[-1]} keys, with an"
                    " attention_mask or position_ids of another length; a mask is computed where a sequence attends"
                    " to itself"
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
                f" {lengths[0] * group.size} tokens; windows are computed under a causal mask"
            )
        return causal, reading, part

    def _rows_of(self, parts: Sequence[T], part: Part, causal: bool | None, fault: Exception | None) -> Any:
        """The documents and the padding of the whole sequence, from all ranks where they are not known."""
        group, settled = self.group, self.round.settled
        lengths = (tuple(parts[0].shape[:1]), tuple(x.shape[_SEQUENCE : _SEQUENCE + 1] for x in (parts[0], parts[-1])))
        key = (lengths, id(self.call.positions), self.call.causal)
        kind = self.call.name, self.call.causal  # alike on all ranks, as no length is
        known, self.round.kinds = kind in self.round.kinds, self.round.kinds | {kind}
        if known and (key in settled or fault is not None):
            if fault is not None:
                raise fault
            before, rows, _ = settled[key]
            if before != part:
                raise RuntimeError(
                    f"ContextParallel on {self.call.name}: its attention_mask tells of other documents or other padding"
                    " than those of modules before it in the same step; one of each is computed a step"
                )
            return rows
        shapes = tuple(tuple(x.shape) for x in parts)
        header = Header(shapes, causal, self.call.window, group.load_balance, self.ulysses, part)
        if fault is not None:
            header = replace(header, fault=next(i for i, kind in enumerate(ERRORS) if isinstance(fault, kind)))
        headers = self._exchanged(header, parts[0].device)
        check_alike(headers, group.ranks, fault)
        rows = joined_parts(
            [h.part for h in headers],
            length=parts[0].shape[_SEQUENCE],
            load_balance=group.load_balance,
            ranks=group.ranks,
        )
        settled[key] = part, rows, self.call.positions
        return rows

    def _exchanged(self, header: Header, device: torch.device) -> list[Header]:
        """What each rank says, from one message, or from two where a rank's part has too many runs for one."""
        messages = self.group.gathered(header.numbers(), device)
        longest = Header.longest(messages)
        if not longest:
            return [Header.read(numbers) for numbers in messages]
        mine = header.runs()
        runs = self.group.gathered([*mine, *[0] * (longest - len(mine))], device)
        return [Header.read(numbers, more) for numbers, more in zip(messages, runs, strict=True)]
