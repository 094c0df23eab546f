"""Symmetric memory of ranks that share a host: a segment of each, with the counters of the signals that it gets."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hp_onesided.cores.core import core_name
from hp_onesided.cores.counters import Counters, counters_by
from hp_onesided.cores.library import library
from hp_onesided.cores.processes import release
from hp_onesided.cores.segment import HEADERS, Place, Segment, allocate, place_of
from hp_onesided.cores.waiting import Failure, WaitError, lacking
from hp_onesided.memory.stores import compare, is_number, refusal
from hp_onesided.opening import map_all
from hp_onesided.planning.headers import Call, disagreement, words_of
from hp_onesided.planning.steps import GRAIN
from hp_onesided.port import Dtype, Group, Tensor, port
from hp_platform import LostRankError, get_group_local_rank, get_process_group_ranks
from hp_platform.extend import agree, hosts_of, own_network, process_state, share_bytes

_TURN = 0.5
"""Seconds after which a rank that waits sees that it has left the memory itself."""


@dataclass(frozen=True)
class Layout:
    """The places in each rank's segment.

    Attributes:
        size: ranks of the group.
        slots: signals; one more is the memory's own.
        nbytes: of the data.
    """

    size: int
    slots: int
    nbytes: int

    @property
    def header(self) -> int:
        """Bytes of a header: a call, and where in the memory its tensor is."""
        return -(-(words_of(self.size) + 1) * 8 // GRAIN) * GRAIN

    def counter(self, slot: int, sender: int) -> int:
        """Get where a sender's counter of a slot is; the memory's own slot comes after all others."""
        return HEADERS + 2 * self.header + (slot * self.size + sender) * GRAIN

    @property
    def data(self) -> int:
        """Where the data begins."""
        return -(-self.counter(self.slots + 1, 0) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def total(self) -> int:
        """Bytes of a segment."""
        return self.data + self.nbytes


class HostMemory:
    """The memory of one allocation; all ranks of the group make it together.

    Args:
        group: whose ranks share a host.
        nbytes: of each rank.
        slots: signals.

    Attributes:
        rank: this one, in the group.
        members: global ranks of the group.
        limit: seconds that the group waits for a rank.

    Raises:
        ValueError: ranks ask for different sizes.
        RuntimeError: the ranks can't share memory; the text names the rank and the reason. All on all ranks alike.
    """

    def __init__(self, group: Group, nbytes: int, slots: int) -> None:
        self.members = tuple(get_process_group_ranks(group))
        self.rank, self.size = get_group_local_rank(group), len(self.members)
        self.layout = Layout(self.size, slots, nbytes)
        self._process, self._arrived, self._met = os.getpid(), 0, 0
        self._segments: list[Segment] = []
        self._held: dict[int, int] = {}
        limit = port().limit(group)
        share = partial(share_bytes, group=group)
        with contextlib.ExitStack() as stack:
            told = [json.loads(each) for each in agree(lambda: self._offer(limit, stack), self._refused, share, str)]
            self.limit = limit or 0.0
            self._compare(told)
            native = all(each["core"] == "native" for each in told)
            places = [Place.parse(each["place"]) for each in told]
            self._pids = [place.pid for place in places]
            agree(lambda: self._map(places, native), self._refused, share, str)
        loaded = library() if native else None
        self._counters: Counters = counters_by(loaded, self._segments, self._held)

    def _offer(self, limit: float | None, stack: contextlib.ExitStack) -> bytes:
        """Make this rank's memory, which lasts as long as the stack or its mappings; say where it is."""
        if limit is None:
            raise RuntimeError("it needs a group with gloo for tensors of the host, as 'cpu:gloo,cuda:nccl'")
        said: dict[str, object] = {"nbytes": self.layout.nbytes, "slots": self.layout.slots, "network": own_network()}
        if not all(map(is_number, (self.layout.nbytes, self.layout.slots))):
            return json.dumps(said, default=repr).encode()  # all refuse it, once they have heard
        core, total = core_name(), self.layout.total
        if core is None:
            raise RuntimeError(lacking())
        try:
            self._descriptor = allocate(total)
        except OSError as error:
            raise RuntimeError(f"{total} bytes of shared memory: {error}") from None
        stack.callback(os.close, self._descriptor)
        return json.dumps(said | {"core": core, "place": str(place_of(self._descriptor))}).encode()

    def _map(self, places: Sequence[Place], native: bool) -> bytes:
        if not native and (problem := lacking()):
            raise RuntimeError(problem)
        try:
            self._segments, self._held = map_all(self.rank, places, self.layout.total, self._descriptor)
        except OSError as error:
            raise RuntimeError(str(error)) from None
        return b""

    def _refused(self, texts: Mapping[int, str], own: Exception | None) -> Exception:
        release(self._pids[peer] for peer in self._held)
        return refusal(self.members, texts, own)

    def _compare(self, told: Sequence[dict[str, object]]) -> None:
        compare(self.members, told)
        hosts = hosts_of([str(each["network"]) for each in told])
        if len(hosts) > 1:
            named = ", ".join(str([self.members[rank] for rank in host]) for host in hosts)
            raise RuntimeError(
                f"SymmetricMemory over {self.ranks()}: they are on {len(hosts)} hosts: {named}. Make a group of the"
                " ranks of each host."
            )

    def ranks(self) -> str:
        """Write the group's ranks."""
        return f"ranks {list(self.members)}"

    def check(self) -> None:
        """Refuse a use of memory that is closed, or in a forked child."""
        if self._process != os.getpid():
            raise RuntimeError("this process was forked from a rank, and has no part in the rank's symmetric memory.")
        if not self.is_open():
            raise RuntimeError("the symmetric memory is closed.")

    def is_open(self) -> bool:
        """Tell whether this process has not let go of the memory."""
        return bool(self._segments) and self._process == os.getpid()

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Make a tensor of a rank's memory."""
        return port().view(self._segments[rank].memory, self.layout.data + offset, shape, dtype)

    def address(self, rank: int, offset: int = 0) -> int:
        """Get where a place in a rank's memory is mapped."""
        return self._segments[rank].address + self.layout.data + offset

    def add(self, slot: int, rank: int, n: int) -> None:
        """Count up a signal of this rank to another one."""
        self._counters.add(self._segments[rank].address + self.layout.counter(slot, self.rank), n)

    def count(self, slot: int, rank: int) -> int:
        """Get what a rank has added to a signal of this one."""
        return ctypes.c_uint64.from_address(self._counter(slot, rank)).value

    def wait(self, slot: int, rank: int, value: int, limit: float | None) -> None:
        """Wait for a signal from a rank."""
        segment, place = self._segments[self.rank], self.layout.counter(slot, rank)  # it stays mapped until the end
        try:
            self._await(slot, rank, value, self.limit if limit is None else limit)
        except WaitError as error:
            found = f"it has added {segment.words(place, 1)[0]} of {value}"
            raise self._failed(error, f"signal {slot} of rank {self.members[rank]}", found, limit) from None

    def meet(self, call: Call, place: int, what: str) -> list[tuple[Call, int]]:
        """Tell all ranks what this one calls, and hear what they call.

        Args:
            call: that all ranks make alike.
            place: a number beside it, in which ranks may differ.
            what: names the call in errors.

        Returns:
            Each rank's call, and its number.

        Raises:
            RuntimeError: ranks call differently, on all of them.
        """
        self._met += 1  # two headers: who writes one again has seen all ranks come to the next meeting
        at, count = HEADERS + (self._met & 1) * self.layout.header, words_of(self.size) + 1
        words = (*call.words(self.size), place)
        (ctypes.c_uint64 * count).from_address(self._segments[self.rank].address + at)[:] = words
        self.arrive(what)
        headers = [segment.words(at, count) for segment in self._segments]
        problem = disagreement([each[:-1] for each in headers])
        if problem is not None:
            raise RuntimeError(f"hp_onesided: {problem}; {self.ranks()} are the group of the symmetric memory")
        return [(Call.read(each[:-1]), each[-1]) for each in headers]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.meet(Call("barrier"), 0, "the barrier")

    def finish(self) -> None:
        """Wait until all ranks close the memory."""
        self.meet(Call("close"), 0, "the close")

    def arrive(self, what: str) -> None:
        """Wait until all ranks have come as far.

        Args:
            what: names it in errors.
        """
        self._arrived += 1
        slot, others = self.layout.slots, [(self.rank + ahead) % self.size for ahead in range(1, self.size)]
        for peer in others:
            self.add(slot, peer, 1)
        for peer in others:
            try:
                self._await(slot, peer, self._arrived, self.limit)
            except WaitError as error:
                raise self._failed(error, f"{what} of rank {self.members[peer]}", "", None) from None

    def reduce(self, target: int, parts: Sequence[int], nbytes: int, dtype: str, op: str) -> None:
        """Reduce in the order of the parts."""
        self._counters.reduce(target, parts, nbytes, dtype, op)

    def leave(self) -> None:
        """Let go of the memory, and tell those that wait for this rank."""
        if self.is_open():
            self._segments[self.rank].leave()
            self._segments = []
            del self._counters  # a thread that waits in it keeps the memory until then
            release(self._pids[peer] for peer in self._held)

    def _await(self, slot: int, peer: int, value: int, limit: float) -> None:
        """Wait for a peer's counter, in turns, between which it is seen that this rank has left the memory."""
        counters, address = self._counters, self._counter(slot, peer)
        deadline = time.monotonic() + limit
        while True:
            left = deadline - time.monotonic()
            try:
                counters.wait(address, value, peer, min(left, _TURN))
                return
            except WaitError as error:
                if not self.is_open():
                    raise WaitError(Failure.ABORTED, self.rank) from None
                if error.failure is not Failure.LATE or left <= _TURN:
                    raise

    def _counter(self, slot: int, sender: int) -> int:
        return self._segments[self.rank].address + self.layout.counter(slot, sender)

    def _failed(self, error: WaitError, what: str, found: str, limit: float | None) -> Exception:
        rank = self.members[error.peer]
        if error.failure is Failure.ABORTED:
            return RuntimeError(f"hp_onesided: the memory was closed here, while {what} was waited for")
        if error.failure is Failure.DIED:
            return LostRankError(f"rank {rank} was lost: its process has ended, while {what} was waited for", (rank,))
        if error.failure is Failure.LEFT:
            return RuntimeError(f"hp_onesided: rank {rank} has closed the memory, while {what} was waited for")
        state = "is stopped" if process_state(self._pids[error.peer]) == "T" else "lives"
        seconds = self.limit if limit is None else limit
        more = f"; {found}" if found else ""
        return TimeoutError(f"hp_onesided: {what} did not come within {seconds:g} s{more}; its process {state}")
