"""Collectives of a group on several hosts in two levels, memory on a host and the backend between: a Carrier.

Note [Two levels]
    The parts are those of `hp_onesided.planning.plans.two_level`, done one after the other in groups of their own: the
    ranks of this host, and the ranks of equal place on each host. Each of them has its carrier, or the backend.
    Collectives run one at a time, in the order of the calls: in the calling thread where nothing is under way, else in
    the carrier's thread, so that one with `async_op` completes whatever the other ranks wait for. That holds for calls
    of several threads, too; that their order is the same on all ranks is up to the program.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

from hp_onesided.carriers.carrier import PATIENCE
from hp_onesided.planning.plans import Kind, Part, two_level
from hp_onesided.port import Group, Tensor, port
from hp_platform import destroy_process_group
from hp_platform.extend import Hosts, Level, carrier_of, run_unobserved

_REDUCED = frozenset({"float32", "float64", "bfloat16", "float16", "int8", "uint8", "int32", "int64"})
"""What gloo reduces as well."""
_KINDS = ("all_reduce", "all_gather", "reduce_scatter")


class TwoLevels:
    """The collectives of one group; a `hp_platform.communication.carriers.Carrier`.

    All-reduce, all-gather and reduce-scatter; what else there is goes through the backend as it is.

    Args:
        hosts: the ranks of the group on each host, as many on each.
        groups: this rank's group on its host, and that of the ranks of its place.

    Attributes:
        issued: collectives that were begun.
    """

    def __init__(self, hosts: Hosts, groups: Mapping[Level, Group]) -> None:
        self._hosts, self._groups = hosts, groups
        self._sizes = {"host": len(hosts[0]), "between": len(hosts)}
        self.size = len(hosts) * len(hosts[0])
        # A group's ranks ascend, whatever the order of the hosts.
        order = tuple(rank for line in zip(*hosts) for rank in sorted(line))
        ranks = tuple(range(self.size))
        self._order = None if order == ranks else order
        self._places = None if order == ranks else tuple(sorted(ranks, key=order.__getitem__))
        self.issued = 0
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held by what runs
        self._thread: _Thread | None = None
        self._last: Future[None] | None = None

    def takes(self, kind: str, tensor: Tensor | None, op: str) -> bool:
        """Tell whether a collective of such a tensor goes in two levels."""
        if tensor is None or kind not in _KINDS:
            return False
        dtype = port().dtype(tensor)
        return dtype is not None and (kind == "all_gather" or dtype in _REDUCED) and tensor.numel() > 0

    def start(
        self,
        kind: str,
        output: Tensor | None,
        tensor: Tensor | None,
        op: str,
        received: Sequence[int],
        sent: Sequence[int],
        root: int,
        async_op: bool,
    ) -> _Pending | None:
        """Do a collective in its parts, or leave it to the thread."""
        assert output is not None and tensor is not None
        call = functools.partial(self._run, cast(Kind, kind), output, tensor, op)
        with self._lock:
            self.issued += 1
            idle = self._last is None or self._last.done()
            pending = None
            if async_op or not idle or not self._turn.acquire(blocking=False):
                if self._thread is None:
                    self._thread = _Thread(self._turn)
                pending = self._last = self._thread.submit(call)
        with port().seen(f"hp_onesided:{kind}") or contextlib.nullcontext():
            if pending is None:
                try:
                    call()
                finally:
                    self._turn.release()
                return None
            if async_op:
                return _Pending(pending)
            pending.result()
            return None

    def message(self, tensor: Tensor, peer: int, kind: str, tag: int, async_op: bool) -> None:
        """Messages go through the backend: `takes` takes none."""
        raise AssertionError(f"a {kind} to rank {peer} of the group was not taken")

    def is_broken(self) -> bool:
        """Tell whether a collective failed on this host, so that the group is of no use any more."""
        return any(carrier.is_broken() for carrier in self._carriers())

    def abort(self) -> None:
        """End what waits on this host; the backend's connections are broken by whoever calls this."""
        for carrier in self._carriers():
            carrier.abort()

    def close(self) -> None:
        """Finish what was issued, and let go of the groups."""
        if self._thread is not None and not self._thread.close(PATIENCE):
            self.abort()
        self._last = None
        for group in self._groups.values():
            with contextlib.suppress(ValueError, RuntimeError):  # the framework has destroyed it with its world
                destroy_process_group(group)

    def _carriers(self) -> list[Any]:
        return [carrier for group in self._groups.values() if (carrier := carrier_of(group)) is not None]

    def _run(self, kind: Kind, output: Tensor, tensor: Tensor, op: str) -> None:
        own, local = port(), self._sizes["host"]
        summed = "sum" if op == "avg" else op
        multiple = local if kind == "all_reduce" else 1
        count = -(-tensor.numel() // multiple) * multiple
        values = own.arranged(tensor, self._order if kind == "reduce_scatter" else None, count)
        places = self._places if kind == "all_gather" else None
        *first, last = _parts(kind, self._hosts)
        for part in (*first, last):
            number = self._sizes[part.level]
            size = values.numel() * number if part.kind == "all_gather" else values.numel() // number
            if part is last and places is None and size == output.numel():
                target = own.arranged(output, None, size)
            else:
                target = values if part.kind == "all_reduce" else own.empty(values, size)
            self._do(part, target, values, summed)
            values = target
        if op == "avg":
            own.divide(values, self.size)
        own.land(output, values, places)

    def _do(self, part: Part, output: Tensor, tensor: Tensor, op: str) -> None:
        """Do one part. Reduce-scatter between hosts is an exchange, reduced here: gloo's own sends twice as much."""
        group = self._groups[part.level]
        if part.level == "host" or part.kind != "reduce_scatter":
            run_unobserved(part.kind, output, tensor, op, group)
            return
        own, number = port(), self._sizes["between"]
        dtype = own.dtype(tensor)
        assert dtype is not None
        pieces = own.empty(tensor, tensor.numel())
        run_unobserved("all_to_all", pieces, tensor, op, group)
        parts = [own.address(pieces) + at * output.nbytes for at in range(number)]
        own.reduce(own.address(output), parts, output.nbytes, dtype, op)


class _Thread:
    """A thread that calls functions one after the other, and keeps nothing of those that it has called.

    Args:
        turn: held while a function is called.
    """

    def __init__(self, turn: threading.Lock) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._calls, turn), name="hp_onesided levels", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Let the thread call a function; get its end."""
        future: Future[None] = Future()
        self._calls.put((future, call))
        return future

    def close(self, patience: float) -> bool:
        """End the thread after what was submitted; tell whether it has ended in so many seconds."""
        self._calls.put(None)
        self._thread.join(patience)
        return not self._thread.is_alive()


def _work(calls: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None], turn: threading.Lock) -> None:
    while (item := calls.get()) is not None:
        future, call = item
        try:
            with turn:
                call()
        except BaseException as error:  # whoever waits raises it
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, future, call


@functools.cache
def _parts(kind: Kind, hosts: Hosts) -> tuple[Part, ...]:
    return two_level(kind, hosts)


class _Pending:
    """A collective under way.

    Args:
        future: its end.
    """

    __slots__ = ("_future",)

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: it can't be done.
        """
        self._future.result()
