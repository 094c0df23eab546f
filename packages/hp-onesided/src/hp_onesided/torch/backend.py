"""The backend "hp_shared" of torch.distributed, for programs that call it directly; importing this module registers it.

Note [A group of Python over gloo]
    A method that a group written in Python does not override runs in the base class, in C++ and with the interpreter's
    lock, and waits there for a lock of gloo's, whose holder may want the interpreter's to free a tensor. So every
    method that communicates is overridden, and calls the inner gloo group itself. That group is also registered as the
    backend of the host's tensors, where the base class keeps this group's name.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import Work

from hp_onesided.carriers.carrier import Pending, SharedMemory
from hp_onesided.opening import open_among
from hp_onesided.planning.headers import OPS, reduces

__all__: list[str] = []

_c10d: Any = importlib.import_module("torch._C._distributed_c10d")  # whose stubs lack names
_NAME = "hp_shared"
_CPU = torch.device("cpu")
_RECORD = 1024  # bytes in which a rank says something while memory is shared
_POLL = 0.001  # seconds between looks, of a wait that has a limit of its own
_TO_GLOO = (
    "gather scatter reduce send recv recv_anysource monitored_barrier set_timeout _set_sequence_number_for_group"
    " _get_sequence_number_for_group"
).split()
_REPLACED = {  # names that newer versions of PyTorch replace
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}

Tensors = Sequence[torch.Tensor]


class SharedGroup(dist.ProcessGroup):
    """A group whose collectives of plain tensors of the host go through shared memory, and all else through gloo.

    Args:
        inner: the gloo group of the same ranks.
        carrier: of the ranks; None where they can't share memory.
    """

    def __init__(self, inner: Any, carrier: SharedMemory | None) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg] - without a store
        self.inner, self._carrier, self._process = inner, carrier, os.getpid()
        self._register_backend(_CPU, dist.ProcessGroup.BackendType.CUSTOM, inner)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._waiters: list[ThreadPoolExecutor] = []
        self._end = weakref.finalize(self, _close, carrier, self._waiters, self._process)

    def name(self) -> str:
        return _NAME

    getBackendName = name

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts, tensor = opts or _c10d.AllreduceOptions(), _only(tensors)
        return self._do("all_reduce", tensor, tensor, opts, partial(self.inner.allreduce, [tensor], opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        one = _c10d.AllreduceOptions()
        if opts is not None:
            one.reduceOp, one.timeout, one.asyncOp = opts.reduceOp, opts.timeout, opts.asyncOp
        return _Pending(self, [self.allreduce([tensor], one) for tensor in tensors], tensors)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        opts, tensor = opts or _c10d.BroadcastOptions(), _only(tensors)
        instead = partial(self.inner.broadcast, [tensor], opts)
        return self._do("broadcast", tensor, tensor, opts, instead, root=opts.rootRank)

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or _c10d.BarrierOptions()
        return self._do("barrier", None, None, opts, partial(self.inner.barrier, opts))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        opts = opts or _c10d.AllgatherOptions()
        instead = partial(self.inner._allgather_base, output, tensor, opts)
        return self._do("all_gather", output, tensor, opts, instead)

    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        works = [self.all_gather_single(*pair, opts) for pair in zip(outputs, tensors, strict=True)]
        return _Pending(self, works, outputs)

    def allgather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        opts, parts, tensor = opts or _c10d.AllgatherOptions(), outputs[0], _only(tensors)
        instead = partial(self.inner.allgather, outputs, tensors, opts)
        if len(parts) != self.size() or any(each.shape != tensor.shape or each.dtype != tensor.dtype for each in parts):
            return instead()
        whole = tensor.new_empty((len(parts), *tensor.shape))
        after = partial(_copy, parts, whole)
        return self._do("all_gather", whole, tensor, opts, instead, results=parts, after=after)

    def allgather_coalesced(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        works = [self.allgather([parts], [tensor], opts) for parts, tensor in zip(outputs, tensors, strict=True)]
        return _Pending(self, works, [each for parts in outputs for each in parts])

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        opts = opts or _c10d.ReduceScatterOptions()
        instead = partial(self.inner._reduce_scatter_base, output, tensor, opts)
        return self._do("reduce_scatter", output, tensor, opts, instead)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, tensors, strict=True)]
        return _Pending(self, works, outputs)

    def reduce_scatter(self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any = None) -> Work:
        opts, parts, output = opts or _c10d.ReduceScatterOptions(), tensors[0], _only(outputs)
        instead = partial(self.inner.reduce_scatter, outputs, tensors, opts)
        if len(parts) != self.size() or any(each.shape != output.shape or each.dtype != output.dtype for each in parts):
            return instead()
        return self._do("reduce_scatter", output, torch.stack([each.detach() for each in parts]), opts, instead)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Work:
        opts = opts or _c10d.AllToAllOptions()
        instead = partial(self.inner.alltoall_base, output, tensor, received, sent, opts)
        if not (self._splits(output, received) and self._splits(tensor, sent)):
            return instead()
        return self._do("all_to_all", output, tensor, opts, instead, received=received, sent=sent)

    def alltoall(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or _c10d.AllToAllOptions()
        instead = partial(self.inner.alltoall, outputs, tensors, opts)
        if len({each.dtype for each in (*outputs, *tensors)}) != 1:
            return instead()
        received, sent = [each.numel() for each in outputs], [each.numel() for each in tensors]
        tensor = torch.cat([each.detach().reshape(-1) for each in tensors])
        whole = tensor.new_empty(sum(received))
        after = partial(_copy, outputs, whole, received)
        more: dict[str, Any] = {"received": received, "sent": sent, "results": outputs, "after": after}
        return self._do("all_to_all", whole, tensor, opts, instead, **more)

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin calls that end together; each is begun by itself."""

    def _end_coalescing(self, device: torch.device) -> Work:
        return _completed([])

    def abort(self) -> None:
        if self._carrier is not None:
            self._carrier.abort()
        self.inner.abort()

    def shutdown(self) -> None:
        self._end()
        self.inner.shutdown()

    def complete(self, work: _Pending) -> None:
        """Wait for a collective in the group's thread for that."""
        if not self._waiters:
            self._waiters.append(ThreadPoolExecutor(1, _NAME))
        self._waiters[0].submit(work.complete)

    def _do(
        self,
        kind: str,
        output: torch.Tensor | None,
        tensor: torch.Tensor | None,
        opts: Any,
        instead: Callable[[], Work],
        *,
        received: Sequence[int] = (),
        sent: Sequence[int] = (),
        root: int = 0,
        results: Tensors = (),
        after: Callable[[], None] | None = None,
    ) -> Work:
        """Do a collective, or begin it; `instead` is called where the carrier doesn't take it."""
        if self._process != os.getpid():
            raise RuntimeError(f"{_NAME}: this process was forked from a rank, and has no part in the rank's groups.")
        given = [each for each in (output, tensor) if each is not None]
        results = results or given[:1]
        for each in given:
            if each.device.type != "cpu":
                raise TypeError(f"{_NAME} communicates tensors of the host; {kind} got one on {each.device}.")
        if any(isinstance(each, FakeTensor) for each in given):
            return _completed(results)  # it has no values
        op = opts.reduceOp.op.name.lower() if "reduce" in kind else "sum"
        source = None if tensor is None else _plain(tensor)
        target = source if output is tensor else _plain(output)
        if not self._takes(kind, target, source, op):
            return instead()
        if source is not None and target is not None:
            rows, source = target, source.contiguous()
            target = source if output is tensor else target.contiguous()
            if target is not rows:
                after = partial(_fill, rows, target)
        assert self._carrier is not None
        handle = self._carrier.start(kind, target, source, op, received, sent, root, opts.asyncOp)
        if handle is not None:
            return _Pending(self, [handle], results, after)
        if after is not None:
            after()
        return _completed(results)

    def _takes(self, kind: str, output: torch.Tensor | None, tensor: torch.Tensor | None, op: str) -> bool:
        if self._carrier is None or op not in OPS:
            return False
        if output is None or tensor is None:
            return True
        if output.dtype != tensor.dtype or tensor.layout is not torch.strided or output.layout is not torch.strided:
            return False
        if "reduce" in kind and not reduces(str(tensor.dtype).removeprefix("torch."), op):
            return False
        gathered, scattered = kind == "all_gather", kind == "reduce_scatter"
        if (
            kind != "all_to_all"
            and output.numel() * self.size() ** scattered != tensor.numel() * self.size() ** gathered
        ):
            return False
        return self._carrier.takes(kind, tensor, op) and self._carrier.takes(kind, output, op)

    def _splits(self, tensor: torch.Tensor, rows: Sequence[int]) -> bool:
        if not tensor.ndim:
            return False
        return sum(rows) == len(tensor) if rows else len(tensor) % self.size() == 0


class _Pending(Work):
    """Collectives under way.

    Args:
        group: whose.
        handles: of them.
        results: what they fill.
        after: called once they are done.
    """

    def __init__(
        self,
        group: SharedGroup,
        handles: Sequence[Pending | Work],
        results: Tensors,
        after: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._group, self._handles, self._results, self._after = group, handles, results, after
        self._lock, self._future, self._error = threading.Lock(), None, None

    def wait(self, timeout: timedelta | None = None) -> bool:
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        while deadline is not None and not self._ended():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{_NAME}: the collective is not done within {timeout}.")
            time.sleep(_POLL)
        with self._lock:
            if self._error is not None:
                raise RuntimeError(str(self._error))
            handles, self._handles = self._handles, ()
            try:
                for handle in handles:
                    handle.wait()
            except RuntimeError as error:
                self._error = error
                raise
            after, self._after = self._after, None
            if after is not None:
                after()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended()

    def is_success(self) -> bool:
        return self._ended() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return list(self._results)

    def get_future(self) -> Any:
        """Get what is set when all is done, though nobody waits: `DistributedDataParallel` reads it."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._group.complete(self)
        return self._future

    def complete(self) -> None:
        """Wait, and set the future."""
        assert self._future is not None
        try:
            self.wait()
        except RuntimeError as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(_some(self._results))

    def _ended(self) -> bool:
        return all(each.is_done() if isinstance(each, Pending) else each.is_completed() for each in self._handles)


def _completed(results: Tensors) -> Work:
    future: Any = torch.futures.Future()
    future.set_result(_some(results))
    return _c10d._create_work_from_future(future)


def _some(results: Tensors) -> list[torch.Tensor]:
    """Make a list that isn't empty, as which PyTorch reads every result."""
    return list(results) or [torch.empty(0)]


def _only(tensors: Tensors) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    (tensor,) = tensors
    return tensor


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    return None if tensor is None else tensor.detach()


def _fill(rows: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        rows.copy_(values)


def _copy(parts: Tensors, whole: torch.Tensor, counts: Sequence[int] | None = None) -> None:
    for part, values in zip(parts, whole.unbind() if counts is None else whole.split(list(counts)), strict=True):
        _fill(part, values.view(part.shape))


def _close(carrier: SharedMemory | None, waiters: list[ThreadPoolExecutor], process: int) -> None:
    if process != os.getpid():
        return  # a forked child has no such threads
    for waiter in waiters:
        waiter.shutdown()
    if carrier is not None:
        carrier.close()


def _create(options: Any, _: Any) -> SharedGroup:
    """Make a group; all its ranks do."""
    rank, size = options.group_rank, options.group_size
    inner = dist.ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
    members = list(options.global_ranks_in_group) or list(range(size))
    carrier = None
    if size > 1:
        limit = options.timeout.total_seconds()
        carrier = open_among(members, rank, limit, partial(_share, inner), lambda hosts: None)
    return SharedGroup(inner, carrier)


def _share(inner: Any, payload: bytes) -> list[bytes]:
    """Return what each rank says."""
    record = torch.frombuffer(
        bytearray(len(payload).to_bytes(2, "little") + payload.ljust(_RECORD, b"\0")), dtype=torch.uint8
    )
    records = [torch.empty_like(record) for _ in range(inner.size())]
    inner.allgather([records], [record]).wait()
    told = [bytes(each.tolist()) for each in records]
    return [each[2 : 2 + int.from_bytes(each[:2], "little")] for each in told]


def _by_gloo(name: str) -> Callable[..., Any]:
    def method(self: SharedGroup, *args: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*args, **named)

    return method


for _name in _TO_GLOO:
    setattr(SharedGroup, _name, _by_gloo(_name))
for _old, _new in _REPLACED.items():
    setattr(SharedGroup, _old, getattr(SharedGroup, _new))
if _NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])
