"""Flight recorders: what a rank did last, where a process that hangs can be asked no more.

Note [Flight recorder]
    A rank that is stopped, loops, or is in a call that keeps the interpreter to itself answers nobody. So it notes its
    collectives beforehand, by plain stores into a file that is mapped into memory: the launcher reads the file. A
    collective is numbered on its channel, which is a group, or a sender and its receiver; the ranks of a channel have
    the same numbers, so those that wait and the one that they wait for can be told by comparison
    (`hp_platform.failures.hangs`).

    The words of a page, of 8 bytes: a head (`_HEAD`), the number of collectives begun on each channel, and a ring of
    the last collectives. A channel's ranks don't fit into a word: they are a line of a second file. Python's stack is
    written to a third one at SIGUSR1, by `faulthandler`, which needs no interpreter. It is the stack of the thread that
    got the signal, the main one: those of threads that run meanwhile can't be read without a crash of the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_platform.groups import number_of, when_groups_end
from hp_platform.port import Handle, port

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "barrier")
PHASES = ("start", "step", "save", "validate", "end")
STACKS = "stacks"

_CODES = {kind: code for code, kind in enumerate(KINDS)}
_PID, _PHASE, _STEP, _BEGUN, _WAITING, _BEATS = range(6)
_HEAD, _CHANNELS, _RING, _FIELDS = 16, 1024, 64, 3
_RING_AT = _HEAD + _CHANNELS
_WORDS = _RING_AT + _RING * _FIELDS
_NOWHERE = -1  # in place of the channel and the number of the collective that a rank waits in
_NUMBERS = 48  # bits of a collective's number
_MASK = (1 << _NUMBERS) - 1


@dataclass(frozen=True, slots=True)
class Channel:
    """Ranks whose collectives have one order.

    Attributes:
        ranks: global ranks; of messages the sender and the receiver.
        messages: True between two ranks, False in a group.
        number: tells groups of the same ranks apart.
    """

    ranks: tuple[int, ...]
    messages: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective that a rank has begun.

    Attributes:
        kind: as "all_reduce".
        channel: on which.
        number: from 1 on, of those on the channel.
        bytes: as observers are told.
    """

    kind: str
    channel: Channel
    number: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Flight:
    """A rank's last moves.

    Attributes:
        rank: which.
        pid: of its process.
        phase: one of "start", "step", "save", "validate" and "end".
        step: the number of steps that are done.
        begun: how many collectives it has begun on each channel.
        last: its last collectives, the newest last.
        waiting: the channel and the number of the collective that it waits in; None outside of all.
    """

    rank: int
    pid: int
    phase: str
    step: int
    begun: dict[Channel, int]
    last: tuple[Operation, ...]
    waiting: tuple[Channel, int] | None

    def operation(self, channel: Channel, number: int) -> Operation | None:
        """Return a collective, None of one that is too long ago."""
        return next((each for each in self.last if (each.channel, each.number) == (channel, number)), None)


class FlightRecorder:
    """Notes of a rank's collectives in a file.

    Args:
        folder: the rank's files are ``rank-3.flight`` and so on.
        rank: the global rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._entries: dict[Any, list[int]] = {}  # the channel's number in the page, and that of its last collective
        self._numbers: dict[Channel, list[int]] = {}
        self._lines = open(folder / f"rank-{rank}.channels", "w", encoding="ascii", buffering=1)
        self._stacks = os.open(folder / f"rank-{rank}.{STACKS}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(folder / f"rank-{rank}.new", "w+b") as file:
            file.truncate(8 * _WORDS)
            self._page = memoryview(mmap.mmap(file.fileno(), 8 * _WORDS)).cast("q")
        self._page[_WAITING], self._page[_PID] = _NOWHERE, os.getpid()
        os.rename(folder / f"rank-{rank}.new", folder / f"rank-{rank}.flight")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=False)
        while _left:
            os.close(_left.pop())

    def note(self, phase: str, step: int) -> None:
        """Note a phase of the run, and how many steps are done."""
        self._page[_STEP] = step
        self._page[_PHASE] = PHASES.index(phase)

    def beat(self) -> None:
        """Note that the process goes on with what it does."""
        self._page[_BEATS] += 1

    def begin(self, kind: str, size: int, group: Any, peer: int | None = None) -> list[int]:
        """Note that a collective begins; return what `pending` takes.

        Args:
            kind: as observers are told.
            size: bytes.
            group: the platform's group.
            peer: of a message, the other rank inside the group.
        """
        key = group if peer is None else (group, kind, peer)
        try:
            entry = self._entries[key]
        except KeyError:
            entry = self._entries[key] = self._open(group, kind, peer)
        channel, number = entry
        entry[1] = number = number + 1
        page = self._page
        begun = page[_BEGUN]
        at = _RING_AT + begun % _RING * _FIELDS
        page[at] = _CODES[kind]
        page[at + 1] = size
        page[at + 2] = page[_WAITING] = channel << _NUMBERS | number
        page[_HEAD + channel] = number
        page[_BEGUN] = begun + 1
        return entry

    def end(self) -> None:
        """Note that the process goes on."""
        self._page[_WAITING] = _NOWHERE

    def pending(self, work: Handle, entry: list[int]) -> Handle:
        """Note that the process goes on, and make a handle that notes that it is waited for.

        Args:
            work: the collective's handle.
            entry: what `begin` returned for it.
        """
        self._page[_WAITING] = _NOWHERE
        return _Awaited(work, self._page, entry[0] << _NUMBERS | entry[1])

    def _open(self, group: Any, kind: str, peer: int | None) -> list[int]:
        """Give a channel its place in the page, at its first collective."""
        members = tuple(port().groups.members(group))
        if peer is None:
            # Ranks may use their groups in different orders, so the order of use tells only what was made elsewhere.
            here = {id(entry) for entry in self._entries.values()}
            taken = {each for each, entry in self._numbers.items() if id(entry) in here}
            channel = Channel(members, number=number_of(group) or 0)
            while channel in taken:
                channel = Channel(members, number=channel.number + 1)
        else:
            pair = (self._rank, members[peer])
            channel = Channel(pair if kind == "send" else pair[::-1], messages=True)
        known = self._numbers.get(channel)
        if known is None:
            # What has no place of its own is counted in the last one, which nobody compares.
            known = self._numbers[channel] = [min(len(self._numbers), _CHANNELS - 1), 0]
            self._lines.write(json.dumps([channel.ranks, channel.messages, channel.number]) + "\n")
        return known

    def forget(self) -> None:
        """Let go of the groups, which have ended."""
        self._entries.clear()

    def leave(self) -> None:
        """End the notes; a SIGUSR1 that is under way still writes a stack, where it would end the process."""
        self._page[_PHASE] = PHASES.index("end")
        self.forget()
        self._lines.close()
        _left.append(self._stacks)

    def close(self) -> None:
        """End the notes, and what SIGUSR1 does."""
        faulthandler.unregister(signal.SIGUSR1)
        self._lines.close()
        os.close(self._stacks)


class _Awaited:
    __slots__ = ("page", "place", "work")

    def __init__(self, work: Handle, page: memoryview, place: int) -> None:
        self.work, self.page, self.place = work, page, place

    def wait(self) -> None:
        page = self.page
        page[_WAITING] = self.place
        self.work.wait()
        page[_WAITING] = _NOWHERE


recorder: FlightRecorder | None = None
_left: list[int] = []  # files of stacks, of recorders that were left: the last one's is in use


def record_flight(folder: Path, rank: int) -> FlightRecorder:
    """Note this process's collectives from now on.

    Args:
        folder: where the launcher looks.
        rank: the global rank.
    """
    global recorder
    recorder = FlightRecorder(folder, rank)
    return recorder


def leave_flight() -> None:
    """End the notes of this process, which may begin others."""
    global recorder
    left, recorder = recorder, None
    if left is not None:
        left.leave()


@when_groups_end
def _forget() -> None:
    if recorder is not None:
        recorder.forget()


def _leave_after_fork() -> None:
    """Leave the page to the rank: what it forks is no rank, and shares the page's memory."""
    global recorder
    recorder = None


os.register_at_fork(after_in_child=_leave_after_fork)


def note_step(phase: str, step: int) -> None:
    """Note a phase of a run, and how many steps are done; without a recorder do nothing.

    Args:
        phase: one of "start", "step", "save", "validate" and "end".
        step: how many steps are done.
    """
    if recorder is not None:
        recorder.note(phase, step)


@contextlib.contextmanager
def beating(every: float = 1.0) -> Iterator[None]:
    """Note that this process goes on while it is in a block whose length nobody knows, as of tokenizing.

    A thread does, so the block may be a single call that lets go of the interpreter. That it gets nowhere is not seen.

    Args:
        every: seconds.
    """
    over = threading.Event()

    def beat() -> None:
        while not over.wait(every):
            if recorder is not None:
                recorder.beat()

    thread = threading.Thread(target=beat, name="hp_platform beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def read_flight(folder: Path, rank: int) -> Flight | None:
    """Read a rank's last moves, None of one that has not begun to note them.

    Args:
        folder: of the recorders.
        rank: which.
    """
    path = folder / f"rank-{rank}.flight"
    if not path.exists():
        return None
    page = memoryview(path.read_bytes()).cast("q")
    lines = (folder / f"rank-{rank}.channels").read_text(encoding="ascii").splitlines()[: _CHANNELS - 1]
    channels = dict(enumerate(Channel(tuple(ranks), *rest) for ranks, *rest in map(json.loads, lines)))
    begun, last, waiting = page[_BEGUN], [], page[_WAITING]
    for count in range(max(0, begun - _RING), begun):
        code, size, place = page[(at := _RING_AT + count % _RING * _FIELDS) : at + _FIELDS].tolist()
        if place >> _NUMBERS in channels:
            last.append(Operation(KINDS[code], channels[place >> _NUMBERS], place & _MASK, size))
    waited = channels.get(waiting >> _NUMBERS)
    return Flight(
        rank,
        page[_PID],
        PHASES[page[_PHASE]],
        page[_STEP],
        {channel: page[_HEAD + index] for index, channel in channels.items()},
        tuple(last),
        None if waited is None else (waited, waiting & _MASK),
    )


def flight_stack(folder: Path, rank: int) -> str:
    """Read the stack of its main thread that a rank wrote last at SIGUSR1; "" without one.

    Args:
        folder: of the recorders.
        rank: which.
    """
    path = folder / f"rank-{rank}.{STACKS}"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return text.rpartition("Stack (most recent call first):\n")[2]
