"""Transfers: the units that this rank reads, into its own tensors, memory of its host and ranks that want bytes.

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
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hp_checkpoint.disk.files import Kind, converted, converts
from hp_checkpoint.disk.manifest import Manifest
from hp_checkpoint.disk.storage import Arena, opened, read_at
from hp_checkpoint.errors import Ranks
from hp_checkpoint.layout.tensors import Piece, clip, kind_of, move, written_bytes
from hp_checkpoint.loading.reads import PER_ROUND, Exchange, Transfer, Units, reads

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


_CHECKED_BYTES = 256 << 10  # so many are still in a core's own cache when they are hashed


class Target:
    """A tensor that is loaded: its bytes, from the first one that arrives to the last."""

    def __init__(self, value: Any, remaining: int) -> None:
        self.value, self.remaining = value, remaining
        self.data: np.ndarray | None = None
        self.store: Callable[[], None] | None = None

    def memory(self) -> np.ndarray:
        """Return the bytes to write to."""
        if self.data is None:
            self.data, self.store = written_bytes(self.value)
        return self.data

    def arrived(self, count: int) -> None:
        """Count bytes that were written; with the last one they go into the tensor."""
        self.remaining -= count
        if not self.remaining:
            if self.store is not None:
                self.store()
            self.data = self.store = None


@dataclass(frozen=True)
class Request:
    """A piece of a file, in bytes of it, and the tensor that it goes to."""

    file: int
    piece: Piece
    target: Target


class Transfers:
    """One rank's part in the reading of a checkpoint.

    Args:
        plan: of this rank.
        units: of the files.
        requests: this rank's, in the order of the plan.
        manifest: of the checkpoint; a file without checksums is not verified, and only what is wanted of it is read.
        paths: of the files, by number.
        ranks: who loads.
    """

    def __init__(
        self,
        plan: Exchange,
        units: Units,
        requests: Sequence[Request],
        manifest: Manifest,
        paths: Sequence[Path],
        ranks: Ranks,
    ) -> None:
        self._plan, self._units, self._requests = plan, units, requests
        self._receives = _by_round(plan.receives)
        self._manifest, self._paths, self._ranks = manifest, paths, ranks
        self._buffer = np.empty(max((units.size(unit) for _, unit in plan.units), default=0), np.uint8)
        self._shared = HostMemory(PER_ROUND + manifest.block_bytes, ranks) if plan.remote else None
        self._offered: dict[int, int] = {}  # of each rank that copies from this one's memory, the last round

    def run(self) -> Exception | None:
        """Run all rounds. A rank that fails goes on sending, so that no other waits, and returns its error."""
        try:
            return self._run()
        finally:
            if self._shared is not None:
                self._shared.close()

    def _run(self) -> Exception | None:
        failure: Exception | None = None
        sends = _by_round(self._plan.sends)
        units = {number: list(group) for number, group in groupby(self._plan.units, lambda each: each[0])}
        for number in range(self._plan.rounds):
            sent = [0] * self._ranks.size
            wanted: dict[int, list[tuple[Transfer, int]]] = {}
            for transfer in sends.get(number, ()):
                wanted.setdefault(transfer.unit, []).append((transfer, sum(sent)))
                if self._is_sent(transfer.rank):  # they are sorted by rank
                    sent[transfer.rank] += transfer.nbytes
            outgoing = np.empty(sum(sent), np.uint8)
            self._wait_for_releases()
            for _, unit in units.get(number, ()):
                try:
                    self._take(wanted[unit], outgoing)
                except Exception as error:
                    failure = failure or error
            if self._shared is not None:
                self._copy_from_host(number, sends.get(number, ()), self._shared)
                if not self._shared.one_host:
                    self._swap(number, outgoing, sent)
        return failure

    def _is_sent(self, rank: int) -> bool:
        """Tell whether bytes travel to a rank, or from it, by the collectives."""
        return rank != self._ranks.rank and (self._shared is None or not self._shared.shares(rank))

    def _memory(self, wanted: Sequence[tuple[Transfer, int]], length: int) -> np.ndarray:
        """Return memory for a unit: where other ranks of the host find it, if some want it."""
        shared, own = self._shared, self._ranks.rank
        if shared is None or all(each.rank == own or self._is_sent(each.rank) for each, _ in wanted):
            return self._buffer[:length]
        return shared.own[wanted[0][0].place :][:length]

    def _take(self, wanted: Sequence[tuple[Transfer, int]], outgoing: np.ndarray) -> None:
        """Read a unit, write what this rank wants of it, and pack what others want at their places."""
        first, own = wanted[0][0], self._ranks.rank
        start, stop = self._units.range_of(first.unit, first.file)
        direct = self._direct(first, stop - start) if len(wanted) == 1 and first.rank == own else None
        data = self._memory(wanted, stop - start) if direct is None else direct
        self._read(first.file, start, [each for each, _ in wanted], data)
        for transfer, at in wanted:
            if direct is not None:
                self._requests[transfer.request].target.arrived(stop - start)
            elif transfer.rank == own:
                self._place(transfer, data, start)
            elif self._is_sent(transfer.rank):
                for piece in transfer.pieces:
                    packed = outgoing[at : at + piece.size]
                    move(piece.length, piece.count, data, piece.first - start, piece.stride, packed, 0, piece.length)
                    at += piece.size

    def _direct(self, transfer: Transfer, length: int) -> np.ndarray | None:
        """Return the memory of a tensor that this rank alone wants, if the unit is one run of it."""
        piece, *others = self._parts(transfer)
        if others or piece.count > 1 or piece.length != length:
            return None
        return self._requests[transfer.request].target.memory()[piece.local : piece.local + length]

    def _read(self, file: int, start: int, wanted: Sequence[Transfer], data: np.ndarray) -> None:
        """Read a unit and verify it; the checksum of a contiguous range while it is in the cache."""
        path = self._paths[file]
        rows = self._manifest.files[path.name].within(start, start + len(data))
        with opened(path) as descriptor:
            if not rows:
                for low, high in reads(piece for transfer in wanted for piece in transfer.pieces):
                    read_at(descriptor, data[low - start : high - start], low, path)
            elif any(row[2] > 1 for row in rows):
                read_at(descriptor, data, start, path)
                self._manifest.verify(path, start, data)
            else:
                for row in rows:
                    hasher, end = xxhash.xxh3_64(), row[0] + row[1]
                    for at in range(row[0], end, _CHECKED_BYTES):
                        chunk = data[at - start : min(at + _CHECKED_BYTES, end) - start]
                        read_at(descriptor, chunk, at, path)
                        hasher.update(chunk.data)
                    if hasher.intdigest() != row[4]:
                        raise self._manifest.changed(path, row)

    def _parts(self, transfer: Transfer) -> tuple[Piece, ...]:
        """Return the pieces of one of this rank's requests in a unit, with their places in the tensor."""
        return clip(self._requests[transfer.request].piece, *self._units.range_of(transfer.unit, transfer.file))

    def _place(self, transfer: Transfer, data: np.ndarray, start: int | None) -> int:
        """Write bytes into the tensor that wants them; return their number.

        Args:
            transfer: of this rank's.
            data: a unit's bytes, or the transfer's own, packed.
            start: where the unit starts in its file; None for packed bytes.
        """
        target, done = self._requests[transfer.request].target, 0
        for piece in self._parts(transfer):
            at, stride = (done, piece.length) if start is None else (piece.first - start, piece.stride)
            move(piece.length, piece.count, data, at, stride, target.memory(), piece.local, piece.local_stride)
            done += piece.size
        target.arrived(done)
        return done

    def _wait_for_releases(self) -> None:
        """Wait until the others need nothing that is in this rank's memory."""
        if self._shared is not None:
            for rank, number in self._offered.items():
                self._shared.wait_for_release(rank, number)

    def _copy_from_host(self, number: int, sends: Iterable[Transfer], shared: HostMemory) -> None:
        """Offer a round's bytes to the ranks of this host, and write what this rank wants of theirs."""
        for rank in {each.rank for each in sends if shared.shares(each.rank)}:
            shared.offer(rank, number)
            self._offered[rank] = number
        wanted = (each for each in self._receives.get(number, ()) if shared.shares(each.reader))
        for reader, transfers in groupby(wanted, lambda each: each.reader):  # they are sorted by reader
            memory = shared.memory_of(reader, number)
            for transfer in transfers:
                start, stop = self._units.range_of(transfer.unit, transfer.file)
                self._place(transfer, memory[transfer.place :][: stop - start], start)
            shared.release(reader, number)

    def _swap(self, number: int, outgoing: np.ndarray, sent: Sequence[int]) -> None:
        """Exchange the packed bytes of a round between hosts, and write what arrives."""
        incoming = [each for each in self._receives.get(number, ()) if self._is_sent(each.reader)]
        received = [0] * self._ranks.size
        for transfer in incoming:
            received[transfer.reader] += transfer.nbytes
        data = self._ranks.all_to_all(outgoing, received, sent)
        at = 0
        for transfer in incoming:  # sorted by reader
            at += self._place(transfer, data[at:], None)


def _by_round(transfers: Sequence[Transfer]) -> dict[int, list[Transfer]]:
    return {number: list(group) for number, group in groupby(transfers, lambda each: each.round)}


# ---- casts ----


def casts(own: Kind, saved: Kind) -> bool:
    """Tell whether a saved tensor is converted into one of another dtype."""
    return own.shape == saved.shape and own.dtype != saved.dtype and converts(saved.dtype, own.dtype)


class CastTarget(Target):
    """A tensor that is loaded from elements of another dtype.

    Args:
        name: of the tensor.
        value: the tensor.
        remaining: bytes that arrive.
        saved: the dtype that they have.
    """

    def __init__(self, name: str, value: Any, remaining: int, saved: str) -> None:
        super().__init__(value, remaining)
        self._saved, self._own, self._length = saved, kind_of(name, value).dtype, remaining

    def memory(self) -> np.ndarray:
        """Return memory for the saved elements."""
        if self.data is None:
            self.data, self.store = np.empty(self._length, np.uint8), self._convert
        return self.data

    def _convert(self) -> None:
        assert self.data is not None
        saved, self.data = self.data, None
        own = super().memory()
        own[...] = converted(saved, self._saved, self._own)
        if self.store is not None:
            self.store()
