"""Messages between two ranks of a host: the sender copies to memory of its own, from which the receiver copies.

Note [Messages]
    A message is copied as it is sent, into a file in memory that later ones use again. So the send is over, whatever
    either rank does next: a rank that has sent waits for nobody, and one that computes or is in a collective holds up
    no other. What was not read yet stays in the sender's memory.

    Each rank's segment has a line for each peer: how many records it has written for it, how many of the peer's it has
    read, and the records, each of which says where a message is, and what. Where as many are written as there is room
    for, the last one says where the following ones are: a file with room for twice as many. A receiver gets the
    messages of a tag in their order; one whose tag nobody has asked for is copied aside when one behind it is wanted.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hp_onesided.cores.core import Team
from hp_onesided.cores.counters import Counters
from hp_onesided.cores.segment import MESSAGES, Place, Segment, allocate, place_of
from hp_onesided.cores.waiting import SLICE, Failure, WaitError, ended
from hp_onesided.planning.headers import DTYPES
from hp_onesided.planning.steps import GRAIN

_LEAST = 64 << 10
"""Bytes of a file for messages, at least."""
_KEPT = 2
"""Files for messages to a peer that stay when all of their messages were read, and stay mapped there."""
_WORDS = ctypes.c_int64 * 8
_MOVED = -1
"""In place of a file's number: this one has the following records."""
_log = logging.getLogger("hp_onesided")
_ENDING = 10.0
"""Seconds to wait for the end of a process whose files are gone: one that ends closes them before."""
_SILENT = 10.0
"""Seconds of waiting at a group's end before a log says so."""


@dataclass(slots=True, eq=False)
class Message:
    """A message as one of its ranks has it.

    Attributes:
        sending: this rank is the sender.
        peer: the other rank, in the group.
        address: of the values.
        nbytes: of them.
        dtype: of them.
        tag: of the message.
        tensor: whose the values are; None once they are copied.
        done: they are copied.
        problem: what else came in its place.
    """

    sending: bool
    peer: int
    address: int
    nbytes: int
    dtype: str
    tag: int
    tensor: Any
    done: bool = False
    problem: str = ""

    def end(self, problem: str = "") -> None:
        """Let go of the tensor."""
        self.tensor, self.problem, self.done = None, problem, True


@dataclass(slots=True, eq=False)
class _Memory:
    """A file that holds messages, one behind the other.

    Attributes:
        place: where the receiver finds the file, which is open here.
        nbytes: of it.
        segment: as it is mapped here.
        file: its number.
        used: bytes that messages have which may not be read yet.
        last: record of the last of them.
    """

    place: Place
    nbytes: int
    segment: Segment
    file: int
    used: int = 0
    last: int = -1


@dataclass(slots=True)
class _Records:
    """Where records are, one after the other, round and round.

    Attributes:
        address: of the first.
        room: for so many.
        base: number of the first.
        keeps: what keeps the memory mapped.
    """

    address: int
    room: int
    base: int = 0
    keeps: Segment | None = None

    def at(self, number: int) -> Any:
        """Get the words of a record."""
        return _WORDS.from_address(self.address + (number - self.base) % self.room * GRAIN)


class _Peer:
    """The messages to and from one peer."""

    def __init__(self, team: Team, counters: Counters, peer: int) -> None:
        own, other = team.segments[team.rank], team.segments[peer]
        mine, theirs = own.address + team.shape.line(peer), other.address + team.shape.line(team.rank)
        self._counters, self._rank, self._pid = counters, peer, team.pids[peer]
        self._segment, self._process = other, team.processes[peer]
        self._wrote, self._taken = mine, mine + GRAIN  # counters of this rank
        self.came, self.read = theirs, theirs + GRAIN  # counters of the peer
        self._mine, self._theirs = (_Records(each + 2 * GRAIN, MESSAGES) for each in (mine, theirs))
        self._written: list[_Memory] = []  # files of the records that this rank writes
        self.number = self.next = 0  # records that were written, and that were read
        self._files: list[_Memory] = []  # of messages; that which is written to is the last
        self._made = 0
        self._mapped: dict[int, Segment] = {}
        self._aside: list[tuple[list[int], bytes]] = []
        self.wanted: list[Message] = []

    def send(self, message: Message) -> None:
        """Copy a message, and write its record.

        Raises:
            OSError: the system has no memory for it.
        """
        read = _value(self.read)
        if self.number - read == self._mine.room - 1:
            self._move()
        if len(self._written) > 1 and self._written[-1].last < read:  # as were all records of the files before
            for before in self._written[:-1]:
                os.close(before.place.descriptor)
            del self._written[:-1]
        memory = self._room(message.nbytes, read)
        if message.nbytes:
            ctypes.memmove(memory.segment.address + memory.used, message.address, message.nbytes)
        self._write(memory, memory.file, message.nbytes, message.tag, DTYPES.index(message.dtype), memory.used)
        memory.used += -(-message.nbytes // GRAIN) * GRAIN
        message.end()

    def want(self, message: Message) -> None:
        """Ask for a message, which may be aside."""
        for index, (record, values) in enumerate(self._aside):
            if record[6] == message.tag:
                del self._aside[index]
                _deliver(message, record, values)
                return
        self.wanted.append(message)

    def take(self) -> None:
        """Take what came, if anything is wanted."""
        while self.wanted and self.next < _value(self.came):
            self._counters.wait(self.came, self.next + 1, self._rank, 0.0)  # what is before it is seen after it
            record = list(self._theirs.at(self.next))
            if record[0] == _MOVED:
                segment = self._map(record)
                self._theirs = _Records(segment.address, record[4] // GRAIN, self.next + 1, segment)
            else:
                self._take(record)
            self.next += 1
            self._counters.add(self._taken, 1)

    def close(self) -> None:
        """Let go of all memory."""
        for memory in (*self._files, *self._written):
            os.close(memory.place.descriptor)
        self._files, self._written, self._mapped = [], [], {}

    def _write(
        self, memory: _Memory, file: int, nbytes: int = 0, tag: int = 0, dtype: int = 0, offset: int = 0
    ) -> None:
        place, kind = memory.place, dtype + (offset << 8)
        words = file, place.descriptor, place.device, place.inode, memory.nbytes, nbytes, tag, kind
        self._mine.at(self.number)[:] = words
        memory.last = self.number
        self.number += 1
        self._counters.add(self._wrote, 1)

    def _move(self) -> None:
        """Say in the last record that there is room for where the following ones are."""
        made = self._make(2 * self._mine.room * GRAIN)
        self._write(made, _MOVED)
        self._written.append(made)
        self._mine = _Records(made.segment.address, made.nbytes // GRAIN, self.number, made.segment)

    def _room(self, nbytes: int, read: int) -> _Memory:
        """Find a file with room, or make one; let go of those that are read and too many."""
        for memory in self._files:
            if memory.last < read:
                memory.used = 0
        idle = sorted((each for each in self._files if not each.used), key=lambda each: each.nbytes)
        for memory in idle[:-_KEPT]:
            os.close(memory.place.descriptor)
            self._files.remove(memory)
        roomy = [each for each in self._files if each.used + nbytes <= each.nbytes]
        if roomy:
            found = roomy[-1]  # the last one, if it has room
            self._files.remove(found)
        else:
            found = self._make(max(nbytes, _LEAST, 2 * sum(each.used for each in self._files)))
        self._files.append(found)
        return found

    def _make(self, nbytes: int) -> _Memory:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = allocate(size)
        self._made += 1
        return _Memory(place_of(descriptor), size, Segment(descriptor, size), self._made)

    def _take(self, record: list[int]) -> None:
        file, nbytes, tag, offset = record[0], record[5], record[6], record[7] >> 8
        segment = self._mapped.pop(file, None)
        self._mapped[file] = segment = self._map(record) if segment is None else segment
        while len(self._mapped) > _KEPT:
            del self._mapped[next(iter(self._mapped))]
        source = segment.address + offset
        message = next((each for each in self.wanted if each.tag == tag), None)
        if message is None:
            self._aside.append((record, ctypes.string_at(source, nbytes)))
        else:
            self.wanted.remove(message)
            _deliver(message, record, source)

    def _map(self, record: list[int]) -> Segment:
        _, descriptor, device, inode, size = record[:5]
        try:
            return Place(self._pid, descriptor, device, inode).map(size)
        except OSError as error:
            if self._segment.has_left():
                raise WaitError(Failure.LEFT, self._rank) from None
            patience = 0.0 if error.errno == errno.ENOMEM else _ENDING
            if ended({self._rank: self._process}, patience) is not None:
                raise WaitError(Failure.DIED, self._rank) from None
            raise


class Messages:
    """Messages of the ranks of a group that share a host: Note [Messages].

    Args:
        team: the ranks.
        counters: by which they wait for each other.
        failed: tells whether this process has given up.
    """

    def __init__(self, team: Team, counters: Counters, failed: Callable[[], bool]) -> None:
        self._team, self._counters, self._failed = team, counters, failed
        self._peers = {peer: _Peer(team, counters, peer) for peer in range(len(team.segments)) if peer != team.rank}
        self._lock = threading.Lock()
        self._over = threading.Event()  # nobody waits any more

    def begin(self, message: Message) -> None:
        """Send a message, or ask for one.

        Raises:
            OSError: the system has no memory for it.
        """
        with self._lock:
            peer = self._peers[message.peer]
            if message.sending:
                peer.send(message)
            else:
                peer.want(message)
                peer.take()

    def is_done(self, message: Message) -> bool:
        """Tell whether a message is done, after all that can be done now.

        Raises:
            OSError: the peer's memory can't be mapped.
        """
        if not message.done:
            with self._lock:
                self._peers[message.peer].take()
        return message.done

    def wait(self, message: Message) -> None:
        """Wait for a message.

        Raises:
            WaitError: the peer has ended, or did not come within the group's limit.
            OSError: the peer's memory can't be mapped.
        """
        deadline, peer = time.monotonic() + self._team.limit, self._peers[message.peer]
        while not self.is_done(message):
            if self._over.is_set() or self._failed():
                raise WaitError(Failure.ABORTED, self._team.rank)
            if time.monotonic() > deadline:
                raise WaitError(Failure.LATE, message.peer)
            self._sleep(peer.came, peer.next + 1, message.peer)

    def abort(self) -> None:
        """End the waits for messages; from any thread."""
        self._over.set()

    def close(self, patience: float) -> Mapping[int, int]:
        """Wait until the peers have read what was sent to them, and let go of all memory.

        Args:
            patience: seconds.

        Returns:
            The number of messages that a peer, by its rank, did not read, though it lives and has not left.
        """
        begun, lost, told = time.monotonic(), dict[int, int](), False
        for rank, peer in self._peers.items():
            gone = False
            while peer.number > _value(peer.read) and not gone and time.monotonic() < begun + patience:
                try:
                    self._sleep(peer.read, peer.number, rank)
                except WaitError:
                    gone = True
                if not told and time.monotonic() > begun + _SILENT:
                    _log.warning("a group's end waits until rank %d of it has received what was sent to it", rank)
                    told = True
            unread = peer.number - _value(peer.read)
            if unread and not gone and not self._team.segments[rank].has_left():
                lost[rank] = unread
        self._over.set()
        with self._lock:
            for peer in self._peers.values():
                peer.close()
        return lost

    def _sleep(self, address: int, value: int, peer: int) -> None:
        """Sleep until a counter of a peer has a value, or for a moment.

        Raises:
            WaitError: the peer has left, or a rank has ended that had not left.
        """
        try:
            self._counters.wait(address, value, peer, SLICE)
        except WaitError as error:
            if error.failure is Failure.LATE:
                return
            if error.failure is not Failure.DIED:
                raise
            left = {rank for rank, segment in enumerate(self._team.segments) if segment.has_left()}
            if peer in left:
                raise WaitError(Failure.LEFT, peer) from None
            dead = ended({rank: process for rank, process in self._team.processes.items() if rank not in left})
            if dead is not None:
                raise WaitError(Failure.DIED, dead) from None


def _deliver(message: Message, record: list[int], source: int | bytes) -> None:
    nbytes, dtype = record[5], DTYPES[record[7] & 255]
    if (nbytes, dtype) != (message.nbytes, message.dtype):
        message.end(f"sent {nbytes} bytes of {dtype}, and {message.nbytes} bytes of {message.dtype} were expected")
        return
    if nbytes:
        ctypes.memmove(message.address, source, nbytes)
    message.end()


def _value(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
