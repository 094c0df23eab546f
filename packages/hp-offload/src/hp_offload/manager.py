"""SwapManager: groups of storages that go to the host and come back, and the memory that holds them.

Note [A group's way]
    A group is what one block saves. Its storages leave when the next group begins, so the last one of a forward, which
    backward needs at once, never does. They are let go when that next group has run: by then the copy had a block's
    time, and what is computed next waits for it. In backward, the first use of a group brings it back if
    nothing did before, and brings the group before it on its way. The order is that of the forward in the first step,
    and what the first backward showed from then on.

Note [Who holds what]
    What stands in the graph holds an entry; an entry holds its memory, on the device or on the host; the manager holds
    neither. So a graph that is dropped, by an exception or because nobody calls backward, frees all of it.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from hp_offload.port import ALIGNMENT, Buffer, Event, Module, Storage, Stream, Tensor, link, port

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
    """Buffers of the host by size and whether they are for memory of the host, each allocated once and used again."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[tuple[Buffer, Event]]] = defaultdict(list)
        self.nbytes = 0

    def take(self, nbytes: int, from_host: bool) -> tuple[Buffer, Event]:
        if self._free[nbytes, from_host]:
            return self._free[nbytes, from_host].pop()
        self.nbytes += nbytes
        return link().host(nbytes, from_host), None

    def give(self, nbytes: int, from_host: bool, buffer: Buffer, event: Event) -> None:
        self._free[nbytes, from_host].append((buffer, event))

    def clear(self) -> None:
        for (nbytes, _), buffers in self._free.items():
            self.nbytes -= nbytes * len(buffers)
        self._free.clear()


class _Slot:
    """A buffer in use; it is free again when nothing refers to it."""

    def __init__(self, pool: Pool, nbytes: int, from_host: bool) -> None:
        self._pool, self.nbytes, self._from_host = pool, nbytes, from_host
        self.buffer, self.after = pool.take(nbytes, from_host)

    def __del__(self) -> None:
        self._pool.give(self.nbytes, self._from_host, self.buffer, self.after)


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
            slot = _Slot(pool, total, link().on_host(part[0].base))
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


class SwapManager:
    """Moves groups of storages between the device and the host; one object a process.

    `swap` and the wrappers use it; call it yourself to move storages that you hold:

        manager = SwapManager()
        manager.add_storage("embeddings", tensor)
        manager.launch_offload("embeddings")
        manager.wait_offload("embeddings")     # the device's memory is free now
        manager.launch_load("embeddings")
        manager.wait_load("embeddings")        # the tensor has its values again
    """

    _instance: SwapManager | None = None

    def __new__(cls) -> SwapManager:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance._start()
        return cls._instance

    def _start(self) -> None:
        self.pool = Pool()
        self._streams: tuple[Stream | None, Stream | None] | None = None
        self._own: dict[str, GroupRun] = {}
        self._last: weakref.ref[GroupRun] | None = None
        self._leaving: weakref.ref[GroupRun] | None = None
        self._next_in_backward: dict[str, str] = {}
        self._chosen: dict[str, str] = {}
        self._backward: weakref.ref[GroupRun] | None = None
        self._log: list[tuple[str, str]] | None = None

    @property
    def streams(self) -> tuple[Stream | None, Stream | None]:
        """The streams of copies to the host and to the device; None on a device without streams."""
        if self._streams is None:
            self._streams = link().streams()
        return self._streams

    @property
    def host_bytes(self) -> int:
        """Count the bytes of the host's memory that are allocated for copies, in use or not."""
        return self.pool.nbytes

    def release_host_memory(self) -> None:
        """Give back the host's memory that no group uses now."""
        self.pool.clear()

    @contextlib.contextmanager
    def record(self) -> Iterator[list[tuple[str, str]]]:
        """Write down, while inside, what is done with which group, in order."""
        outer, self._log = self._log, []
        try:
            yield self._log
        finally:
            self._log = outer

    def note(self, what: str, name: str) -> None:
        """Write an event down, if anybody records."""
        if self._log is not None:
            self._log.append((what, name))

    # ---- groups of saved tensors ----
    def begin(self, name: str, fused: bool = False) -> GroupRun:
        """Begin a group's forward: the group before it leaves."""
        last = self._last() if self._last is not None else None
        leaving = self._leaving() if self._leaving is not None else None
        if leaving is not None:
            leaving.wait_offload()
        if last is not None and last.in_backward:
            last = None  # a new step
        if last is not None:
            last.launch_offload()
            self._leaving = weakref.ref(last)
        run = GroupRun(self, name, fused, last)
        self._last = weakref.ref(run)
        return run

    def end(self, run: GroupRun) -> None:
        """End a group's forward: the group before it is let go."""
        before = run.before()
        if before is not None and not run.in_backward:
            before.wait_offload()

    def began_backward(self, run: GroupRun) -> None:
        """Note the order of groups in backward."""
        previous = self._backward() if self._backward is not None else None
        if previous is not None and previous.before() is not None:
            self._next_in_backward[previous.name] = run.name
        self._backward = weakref.ref(run)

    def following(self, run: GroupRun) -> GroupRun | None:
        """Return the group that backward needs after this one, if it is away."""
        name = self._chosen.get(run.name) or self._next_in_backward.get(run.name)
        before = run.before()
        candidate = before
        while name is not None and candidate is not None and candidate.name != name:
            candidate = candidate.before()
        return candidate or before

    def set_forward_prefetch_layer(self, first: str, second: str) -> None:
        """Bring the group `first` back while `second`, which follows it in forward, is in its backward.

        Args:
            first: a group's name.
            second: another's. The default is the order of the first step.
        """
        if first == second:
            raise ValueError(f"set_forward_prefetch_layer takes two groups, got {first!r} twice.")
        self._chosen[second] = first

    @contextlib.contextmanager
    def saving(self, name: str, module: Module | None = None) -> Iterator[GroupRun]:
        """Put what is saved for backward while inside into a group that the caller moves, as a pipeline does.

            with manager.saving("stage 0, micro-batch 3", stage) as group:
                loss = stage(x)
            group.launch_offload()
            group.wait_offload()       # the device's memory is free now
            group.launch_load()
            group.wait_load()
            loss.backward()            # brings back what is away still

        Args:
            name: of the group; each call makes one of its own.
            module: its parameters and buffers stay, as do all leaves.
        """
        run = GroupRun(self, name, False, None)
        with port().saving(run, module):
            yield run

    # ---- storages that the caller holds ----
    def ensure_group(self, group_name: str) -> None:
        """Open a group for `add_storage`, if there is none of this name."""
        if group_name not in self._own:
            self._own[group_name] = GroupRun(self, group_name, False, None)

    def add_storage(self, group_name: str, storage: Storage | Tensor) -> None:
        """Put a storage into a group, once; memory that is empty or protected is left out.

        Args:
            group_name: opened if it is new.
            storage: a storage, or a tensor, whose storage it is. Nobody may use its values while the group is away.

        Raises:
            RuntimeError: the group is on its way.
        """
        self.ensure_group(group_name)
        run = self._own[group_name]
        if run.state != "here":
            raise RuntimeError(
                f"add_storage: group {group_name!r} is {run.state}; add storages before"
                " launch_offload, or after wait_load."
            )
        entry = run.add(link().storage(storage), borrowed=True)
        if entry is not None and all(entry is not each for each in run.held):
            run.held.append(entry)

    def protect_alias_tensors(self, group_name: str, tensors: Sequence[Tensor]) -> None:
        """Leave the storages of tensors, and of all views of them, where they are.

        Args:
            group_name: opened if it is new.
            tensors: those that are used while the group is away.
        """
        self.ensure_group(group_name)
        addresses = (link().address(link().storage(tensor)) for tensor in tensors)
        self._own[group_name].protected.update(addresses)

    def launch_offload(self, group_name: str, copy_stream: Stream | None = None) -> None:
        """Begin to copy a group to the host, on `copy_stream` or the manager's own stream."""
        self._named(group_name, "launch_offload").launch_offload(copy_stream)

    def wait_offload(self, group_name: str, copy_stream: Stream | None = None) -> None:
        """Wait for the copies, and free the group's memory on the device."""
        self._named(group_name, "wait_offload").wait_offload()

    def launch_load(self, group_name: str, copy_stream: Stream | None = None) -> None:
        """Begin to copy a group back, on `copy_stream` or the manager's own stream."""
        run = self._named(group_name, "launch_load")
        if run.state == "leaving":
            run.wait_offload()
        run.launch_load(copy_stream)

    def wait_load(self, group_name: str, copy_stream: Stream | None = None) -> None:
        """Wait for the copies; the group is open for the next round then, without storages."""
        self._named(group_name, "wait_load").wait_load()
        self._own.pop(group_name)

    def _named(self, group_name: str, what: str) -> GroupRun:
        if group_name not in self._own:
            names = ", ".join(map(repr, self._own)) or "none"
            raise ValueError(f"{what}: no group is named {group_name!r}; there are: {names}. add_storage opens one.")
        return self._own[group_name]
