"""Copies of a rank's state in memory that another process holds, from which a replaced process goes on.

Note [Slots]
    A copy outlives the process that writes it, because the memory is a memfd of another process, which the writer opens
    below ``/proc/<pid>/fd``: it has no name that could be left over, and ends with its last process. A writer may be
    killed at any instruction. So there are two slots, written in turns; the header of a slot is removed before its
    content changes and written after it, so a slot without a header is none. The header has the sum of the content's
    64-bit words, so content that has changed since is none either: it is refused, and said.

    A holder is one such pair of slots. Several hold the same, each in memory of its own. A third slot lets the copy of
    an older step stay, which was checked, while the other two are written.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint.disk.storage import Arena
from hp_checkpoint.errors import Ranks
from hp_checkpoint.layout.state import decode, flatten
from hp_checkpoint.layout.tensors import read_bytes

SLOTS = 2
_HEADER = struct.Struct("<qqqqqq16s")  # a mark, step, epoch, bytes of the text, bytes of all, bits, the host's boot
_MARK = 0x7970_6F43_5048
_AT = 128  # where the content begins
_WORD = 64  # bytes at which a tensor begins
_CHUNK = 1 << 20  # bytes that are copied and summed at a time: they are in the cache then
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class StaleEpochError(RuntimeError):
    """A process of an epoch that is over wanted to write what belongs to a newer one."""


@dataclass(frozen=True, slots=True)
class _Header:
    step: int
    epoch: int
    text: int
    size: int
    bits: int
    boot: bytes


class Copies:
    """The copies of one rank's state, of which this process writes the next and may read those of the one before it.

    Example:
        >>> copies = Copies([(first, second)], rank=0, epoch=0)    # descriptors that another process holds
        >>> copies.keep(7, {"model": dict(model.named_parameters()), "sample": 224})
        >>> copies.restore(7)["sample"]
        224

    Args:
        holders: of each, the two or three slots: descriptors of memfds, or paths below ``/proc/<pid>/fd`` of another
            process.
        rank: whose state it is, to name it.
        epoch: of this process.

    Attributes:
        refused: what was found to be wrong with copies, a line each.
    """

    def __init__(self, holders: Sequence[Sequence[int | str]], *, rank: int, epoch: int) -> None:
        self._slots = [[Arena(_opened(place)) for place in slots] for slots in holders]
        self._rank, self._epoch, self._boot = rank, epoch, _boot_id()
        self.refused: list[str] = []

    def keep(self, step: int, state: Mapping[str, Any], *, checked: int = 0) -> None:
        """Copy a state into the slot of the oldest step, of every holder.

        Args:
            step: that the state is of.
            state: nested dictionaries and lists of tensors, of which the local part is kept, and of JSON values.
            checked: where a holder has three slots, the newest copy up to this step is not written over. Default 0:
                none.

        Raises:
            StaleEpochError: a process of a newer epoch has written into the slots.
            OSError: there is no memory for the copy.
        """
        flat = flatten(state)
        contents = {address: read_bytes(value) for address, value in flat.tensors.items()}
        starts = np.cumsum([0, *(-(-len(each) // _WORD) * _WORD for each in contents.values())]).tolist()
        table = [[*address, len(each), at] for (address, each), at in zip(contents.items(), starts)]
        text = json.dumps({"tree": flat.tree, "tensors": table}).encode()
        begin = -(-len(text) // _WORD) * _WORD
        size = begin + starts[-1]
        for holder in self._slots:
            headers = [_read(other) for other in holder]
            newer = max((each.epoch for each in headers if each is not None), default=0)
            if newer > self._epoch:
                raise StaleEpochError(
                    f"rank {self._rank}: this process is of epoch {self._epoch}, and its copies are of epoch {newer}:"
                    " another process has taken its place"
                )
            arena = holder[_oldest([-1 if each is None else each.step for each in headers], checked)]
            if os.fstat(arena.descriptor).st_size < _AT + size:
                os.posix_fallocate(arena.descriptor, 0, _AT + size)  # memory that lacks is an error here, not SIGBUS
            memory = arena.reserve(_AT + size)
            memory[:_AT] = 0
            content = memory[_AT : _AT + size]
            content[len(text) : begin] = 0
            bits = _copied(content[:begin], np.frombuffer(text, np.uint8))
            for each, at in zip(contents.values(), starts):
                bits += _copied(content[begin + at : begin + at + -(-len(each) // _WORD) * _WORD], each)
            bits += _facts(step, self._epoch, len(text), size)
            packed = _HEADER.pack(_MARK, step, self._epoch, len(text), size, _wrapped(bits), self._boot)
            memory[: len(packed)] = np.frombuffer(packed, np.uint8)

    def steps(self, ranks: Ranks) -> list[set[int]]:
        """Return the steps that each rank can restore, by rank; all ranks call it together."""
        own = np.full(sum(map(len, self._slots)), -1, np.int64)  # as many bytes on each rank
        readable = sorted(self._readable())
        own[: len(readable)] = readable
        return [set(np.frombuffer(each, np.int64).tolist()) - {-1} for each in ranks.gather(own.tobytes())]

    def restore(self, step: int) -> dict[str, Any]:
        """Return a state that was kept, with arrays of bytes in the places of its tensors.

        What is kept next goes into the other slot.

        Raises:
            KeyError: no holder has the step whole.
        """
        holder, slot = self._readable()[step]
        arena = self._slots[holder][slot]
        header = _read(arena)
        assert header is not None
        content = arena.reserve(_AT + header.size)[_AT : _AT + header.size]
        text = json.loads(content[: header.text].tobytes())
        begin = -(-header.text // _WORD) * _WORD
        places = {(part, name): (size, begin + at) for part, name, size, at in text["tensors"]}

        def tensor(address: tuple[str, str]) -> np.ndarray:
            size, at = places[address]
            return content[at : at + size]

        self.forget(step)  # this epoch computes later steps again
        return decode(text["tree"], tensor, f"the copy of rank {self._rank}")

    def forget(self, step: int) -> None:
        """Drop the copies of steps after one."""
        for arena in (each for slots in self._slots for each in slots):
            later = _read(arena)
            if later is not None and later.step > step:
                arena.reserve(_AT)[:_AT] = 0

    def close(self) -> None:
        """Close this process's descriptors; the memory stays with the holder."""
        for arena in (each for holder in self._slots for each in holder):
            arena.close()
        self._slots = []

    def _readable(self) -> dict[int, tuple[int, int]]:
        """Return the steps that are whole, with the first holder and the slot that has each."""
        found: dict[int, tuple[int, int]] = {}
        for number, holder in enumerate(self._slots):
            for slot, arena in enumerate(holder):
                header = _read(arena)
                if header is None or header.step in found:
                    continue
                content = arena.reserve(_AT + header.size)[_AT : _AT + header.size]
                facts = _facts(header.step, header.epoch, header.text, header.size)
                if header.boot == self._boot and _wrapped(_bits(content) + facts) == header.bits:
                    found[header.step] = number, slot
                    continue
                text = f"the copy of rank {self._rank} of step {header.step} in holder {number} has other bits than"
                self._refuse(f"{text} were written: it is not used")
        return found

    def _refuse(self, text: str) -> None:
        if text not in self.refused:
            self.refused.append(text)


def _oldest(steps: Sequence[int], checked: int) -> int:
    """Return the slot of the oldest step; of three not that which has the newest step up to a checked one."""
    stays = max((step for step in steps if 0 <= step <= checked), default=-1) if len(steps) > SLOTS else -1
    return min((slot for slot, step in enumerate(steps) if step < 0 or step != stays), key=lambda slot: steps[slot])


def _opened(place: int | str) -> int:
    """Return a descriptor of this process for a slot."""
    return os.dup(place) if isinstance(place, int) else os.open(place, os.O_RDWR | os.O_CLOEXEC)


def _read(arena: Arena) -> _Header | None:
    """Return a slot's header, None of one that has none or is cut."""
    size = os.fstat(arena.descriptor).st_size
    if size < _AT:
        return None
    mark, *values = _HEADER.unpack(arena.reserve(_AT)[: _HEADER.size].tobytes())
    header = _Header(*values)
    whole = mark == _MARK and 0 <= header.text <= header.size <= size - _AT and header.size % _WORD == 0
    return header if whole else None


def _copied(target: np.ndarray, source: np.ndarray) -> int:
    """Copy bytes, with zeros up to the end of the target, and return the sum of its words."""
    bits = 0
    for at in range(0, len(target), _CHUNK):
        part = source[at : at + _CHUNK]
        into = target[at : at + _CHUNK]
        into[: len(part)] = part
        into[len(part) :] = 0
        bits += _bits(into)
    return bits


def _bits(content: np.ndarray) -> int:
    """Return the sum of the 64-bit words, which overflows."""
    return _wrapped(int(content.view(np.int64).sum(dtype=np.int64)))


def _facts(step: int, epoch: int, text: int, size: int) -> int:
    """Return what a header adds to the sum, so that its own numbers are compared as well."""
    return step + (epoch << 16) + (text << 24) + (size << 32)


def _wrapped(bits: int) -> int:
    """Return a sum as a signed 64-bit number."""
    return (bits + 2**63) % 2**64 - 2**63


def _boot_id() -> bytes:
    with suppress(OSError, ValueError):
        return bytes.fromhex(_BOOT.read_text(encoding="ascii").strip().replace("-", ""))
    return bytes(16)


def hold(count: int, *, slots: int = SLOTS) -> list[list[Arena]]:
    """Make the memory of so many holders of one rank's copies, in the process that outlives the writers.

    Args:
        count: of holders.
        slots: of each; 3 where a checked copy is to stay.
    """
    return [[Arena() for _ in range(slots)] for _ in range(count)]
