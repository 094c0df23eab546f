"""Groups of storages on their way: what one block saved, and the memory that holds it.

Note [Who holds what]
    What stands in the graph holds an entry; an entry holds its memory, on the device or on the host; the manager holds
    neither. So a graph that is dropped, by an exception or because nobody calls backward, frees all of it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hp_offload.port import ALIGNMENT, Buffer, Event, Storage, Stream, link

if TYPE_CHECKING:
    from hp_offload.manager import SwapManager


_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def name_of_group(function: Any, module: Any | None) -> str:
    """Return the name of what a call saves: the module's own, alike in each step, or the function's.

    Args:
        function: what is called.
        module: whose forward it is; None for a function of its own.
    """
    if module is None:
        return getattr(function, "__qualname__", type(function).__name__)
    if module not in _names:
        _names[module] = f"{type(module).__name__}.{next(_numbers)}"
    return _names[module]


class Pool:
    """Buffers of the host by size, each allocated once and used again."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[Buffer, Event]]] = defaultdict(list)
        self.nbytes = 0

    def take(self, nbytes: int) -> tuple[Buffer, Event]:
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        self.nbytes += nbytes
        return link().host(nbytes), None

    def give(self, nbytes: int, buffer: Buffer, event: Event) -> None:
        self._free[nbytes].append((buffer, event))

    def clear(self) -> None:
        for nbytes, buffers in self._free.items():
            self.nbytes -= nbytes * len(buffers)
        self._free.clear()


class _Slot:
    """A buffer in use; it is free again when nothing refers to it."""

    def __init__(self, pool: Pool, nbytes: int) -> None:
        self._pool, self.nbytes = pool, nbytes
        self.buffer, self.after = pool.take(nbytes)

    def __del__(self) -> None:
        self._pool.give(self.nbytes, self.buffer, self.after)


class Entry:
    """One storage of a group.

    Attributes:
        run: the group's run that it belongs to.
        nbytes: of the storage.
        base: memory on the device that holds it; None while it is on the host.
        offset: where it begins in `base`, in bytes.
    """

    __slots__ = ("__weakref__", "base", "borrowed", "event", "left", "like", "nbytes", "offset", "run", "slot")

    def __init__(self, run: GroupRun, storage: Storage, nbytes: int, borrowed: bool) -> None:
        self.run, self.nbytes, self.borrowed = run, nbytes, borrowed
        self.base: Storage | None = storage
        self.like = link().empty_like(storage)
        self.offset = 0
        self.slot: tuple[_Slot, int] | None = None
        self.event: Event = None
        self.left = False

    def bring(self) -> tuple[Storage, int]:
        """Return the memory that holds the storage, on the device, and the offset in it."""
        self.run.begin_backward()
        if self.base is None or self.left:
            self.run.load([self])
        if self.event is not None:
            link().wait(self.event)
            self.event = None
        assert self.base is not None
        return self.base, self.offset


class GroupRun:
    """What a group saved in one forward, until its backward is over.

    Args:
        manager: the one manager.
        name: of the group.
        fused: copy all storages as one.
        before: the run of the group before it.
    """

    def __init__(self, manager: SwapManager, name: str, fused: bool, before: GroupRun | None) -> None:
        self.manager, self.name, self.fused = manager, name, fused
        self.before = weakref.ref(before) if before is not None else lambda: None
        self.state = "here"  # leaving, away, coming, back
        self.in_backward = False
        self._entries: list[weakref.ref[Entry]] = []
        self._by_address: dict[int, weakref.ref[Entry]] = {}
        self.protected: set[int] = set()
        self.held: list[Entry] = []

    def entries(self) -> list[Entry]:
        """List the entries that something still needs."""
        return [entry for reference in self._entries if (entry := reference()) is not None]

    def add(self, storage: Storage, *, borrowed: bool = False) -> Entry | None:
        """Take a storage in, once; None where it is empty or protected."""
        address = link().address(storage)
        if not address or address in self.protected:
            return None
        known = self._by_address.get(address)
        entry = known() if known is not None else None
        if entry is not None and entry.base is not None:
            return entry
        nbytes = link().nbytes(storage)
        entry = Entry(self, storage, nbytes, borrowed)
        self._entries.append(weakref.ref(entry))
        self._by_address[address] = weakref.ref(entry)
        return entry

    def launch_offload(self, stream: Stream | None = None) -> None:
        """Begin to copy the storages to the host."""
        if self.state != "here":
            return
        leaving = [entry for entry in self.entries() if link().address(entry.base) not in self.protected]
        self.state = "leaving"
        self.manager.note("launch_offload", self.name)
        stream = stream or self.manager.streams[0]
        pool = self.manager.pool
        for part in [leaving] if self.fused and leaving else [[entry] for entry in leaving]:
            offsets, total = _offsets([entry.nbytes for entry in part])
            slot = _Slot(pool, total)
            slot.after = event = link().copy_out([entry.base for entry in part], slot.buffer, stream, slot.after)
            for entry, offset in zip(part, offsets):
                entry.slot, entry.event = (slot, offset), event

    def wait_offload(self) -> None:
        """Let the device's memory go, once the copies are done."""
        if self.state != "leaving":
            return
        self.state = "away"
        self.manager.note("wait_offload", self.name)
        for entry in self.entries():
            if entry.slot is None:
                continue
            if entry.event is not None:
                link().wait(entry.event)
                entry.event = None
            if entry.borrowed:
                link().free(entry.base)
                entry.left = True
            else:
                entry.base = None

    def launch_load(self, stream: Stream | None = None) -> None:
        """Begin to copy the storages back to the device."""
        if self.state == "leaving":
            self.state = "back"  # backward came before they were let go: they never left
            for entry in self.entries():
                entry.slot = None
        if self.state != "away":
            return
        self.state = "coming"
        self.manager.note("launch_load", self.name)
        self.load([entry for entry in self.entries() if entry.slot is not None], stream)

    def load(self, entries: Sequence[Entry], stream: Stream | None = None) -> None:
        """Copy some storages back, those that share a buffer by one copy."""
        stream = stream or self.manager.streams[1]
        slots: dict[int, tuple[Storage, Event]] = {}
        for entry in entries:
            if entry.slot is None:
                continue
            slot, offset = entry.slot
            if entry.borrowed:
                entry.event = link().fill(entry.base, slot.buffer, entry.nbytes, stream)
                entry.left = False
            else:
                if id(slot) not in slots:
                    slots[id(slot)] = link().copy_back(slot.buffer, slot.nbytes, entry.like, stream)
                entry.base, entry.event = slots[id(slot)]
                entry.offset = offset
            slot.after = entry.event
        for entry in entries:
            entry.slot = None

    def wait_load(self) -> None:
        """Make what is computed from here on wait for the copies."""
        if self.state != "coming":
            return
        self.state = "back"
        self.manager.note("wait_load", self.name)
        for entry in self.entries():
            if entry.event is not None:
                link().wait(entry.event)
                entry.event = None

    def begin_backward(self) -> None:
        """Bring the group back, and begin with the one that backward needs next."""
        if self.in_backward:
            return
        self.in_backward = True
        self.manager.began_backward(self)
        self.launch_load()
        self.wait_load()
        following = self.manager.following(self)
        if following is not None:
            following.launch_load()


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where storages begin that are copied as one, and the bytes of all."""
    if len(sizes) == 1:
        return [0], sizes[0]
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, total
