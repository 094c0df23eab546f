"""Memory that the ranks of one host share during a load, and messages about what is in it.

Note [Ranks of one host]
    What one rank reads and others of its host want doesn't go through the network: the reader puts a unit into memory
    that the others have mapped, tells them, and they copy their strided pieces from there into their tensors. Memory
    and messages are a memfd and a pipe of each rank, which the others open below ``/proc/<pid>/fd``, so there is no
    name to clean up after a crash and no limit of ``/dev/shm``; a rank that waits does not poll, and the end of another
    one's process is seen. Where one rank of a host can't open another's (a container of its own, no ``/proc``), the
    ranks of that host use the collectives, as those of different hosts do.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import struct
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hp_checkpoint.disk.storage import Arena
from hp_checkpoint.recovery.ranks import Ranks

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HOST = 16
_NONCE = 16
_MESSAGE = struct.Struct("<qqq")  # rank, what, round
_OWN = struct.Struct("<qqq")  # process, descriptors of the memory and of the pipe
_OFFERED, _RELEASED, _ENDED = range(3)


@dataclass(frozen=True)
class _Neighbour:
    """What this rank has opened of another one: its memory, its pipe, and its process."""

    memory: np.ndarray
    pipe: int
    process: int


class HostMemory:
    """This rank's memory and that of the others of its host; all ranks make it together.

    Args:
        size: bytes of each rank's.
        ranks: who loads.

    Attributes:
        own: this rank's memory.
        one_host: all ranks share theirs.
    """

    def __init__(self, size: int, ranks: Ranks) -> None:
        self._rank = ranks.rank
        self._seen: dict[tuple[int, int], int] = {}
        self._gone: set[int] = set()
        self._others: dict[int, _Neighbour] = {}
        self._open = ExitStack()
        with ExitStack() as during:
            self._inbox, self.own, record = _created(size, self._open, during)
            records = ranks.gather(record)
            same = [rank for rank, each in enumerate(records) if each[:_HOST] == record[:_HOST]]
            opened = {rank: _opened(records[rank][_HOST:], size, self._open) for rank in same if rank != ranks.rank}
            all_opened = ranks.gather(bytes([None not in opened.values()]))
        shared = all(all_opened[rank] == b"\x01" for rank in same)
        if shared:
            self._others = {rank: each for rank, each in opened.items() if each is not None}
        self.one_host = shared and len(same) == ranks.size
        self._poll = select.poll()
        if self._others:
            self._poll.register(self._inbox, select.POLLIN)
        for neighbour in self._others.values():
            self._poll.register(neighbour.process, select.POLLIN)

    def shares(self, rank: int) -> bool:
        """Tell whether another rank has this one's memory, and this one its."""
        return rank in self._others

    def offer(self, rank: int, number: int) -> None:
        """Tell a rank that what it wants of a round is in this rank's memory."""
        self._tell(rank, _OFFERED, number)

    def memory_of(self, rank: int, number: int) -> np.ndarray:
        """Return another rank's memory once it has offered a round.

        Where the rank has ended the content is not that of the round; the next collective raises.
        """
        self._wait(rank, _OFFERED, number)
        return self._others[rank].memory

    def release(self, rank: int, number: int) -> None:
        """Tell another rank that this one has copied what it wanted of a round."""
        self._tell(rank, _RELEASED, number)

    def wait_for_release(self, rank: int, number: int) -> None:
        """Wait until a rank has copied what it wanted of a round."""
        self._wait(rank, _RELEASED, number)

    def close(self) -> None:
        """Tell the others that this rank neither reads nor copies any more, and give everything back."""
        for rank in self._others:
            self._tell(rank, _ENDED, 0)
        self._open.close()
        self._others, self.own = {}, np.empty(0, np.uint8)

    def _tell(self, rank: int, what: int, number: int) -> None:
        with suppress(OSError):  # it has ended
            os.write(self._others[rank].pipe, _MESSAGE.pack(self._rank, what, number))

    def _wait(self, rank: int, what: int, number: int) -> None:
        while self._seen.get((rank, what), -1) < number and rank not in self._gone:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            content = os.read(self._inbox, 256 * _MESSAGE.size) if self._inbox in ready else b""
            for sender, told, of_round in _MESSAGE.iter_unpack(content):
                self._seen[sender, told] = of_round
                if told == _ENDED:
                    self._gone.add(sender)
            if not content:  # what a process told before its end is read first
                self._gone |= {each for each, other in self._others.items() if other.process in ready}


def _created(size: int, lasting: ExitStack, during: ExitStack) -> tuple[int, np.ndarray, bytes]:
    """Make this rank's pipe and memory; return them with what the others need to open them.

    Args:
        size: of the memory.
        lasting: closes what this rank needs.
        during: closes what is needed until the others have opened theirs.
    """
    nonce = secrets.token_bytes(_NONCE)
    try:
        host = bytes.fromhex(_BOOT.read_text().strip().replace("-", ""))
        inbox, outlet = os.pipe()
        lasting.callback(os.close, inbox)
        during.callback(os.close, outlet)
        arena = Arena()
        during.callback(arena.close)
        memory = arena.reserve(size + _NONCE)
    except (OSError, ValueError):  # the record of no host
        return -1, np.empty(0, np.uint8), secrets.token_bytes(_HOST + _OWN.size + _NONCE)
    memory[size : size + _NONCE] = np.frombuffer(nonce, np.uint8)
    return inbox, memory[:size], host + _OWN.pack(os.getpid(), arena.descriptor, outlet) + nonce


def _opened(record: bytes, size: int, lasting: ExitStack) -> _Neighbour | None:
    """Open what another process has made; None where it can't be, or another process has its number here."""
    process, descriptor, outlet = _OWN.unpack(record[: _OWN.size])
    try:
        mapped = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            memory = np.frombuffer(mmap.mmap(mapped, size + _NONCE, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(mapped)
        if memory[size:].tobytes() != record[_OWN.size :]:
            return None
        pipe = os.open(f"/proc/{process}/fd/{outlet}", os.O_WRONLY | os.O_CLOEXEC)
        lasting.callback(os.close, pipe)
        handle = os.pidfd_open(process)
        lasting.callback(os.close, handle)
    except (OSError, ValueError, AttributeError):  # the last one: a system without handles of processes
        return None
    return _Neighbour(memory[:size], pipe, handle)
