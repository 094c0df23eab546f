"""An audit of streams: accesses to memory of the device that nothing orders, and memory that is freed too soon.

Note [What is ordered]
    torch's CUDA sanitizer and torch_npu's follow events, waits and synchronisations, and know what each stream has
    waited for. They compare tensors by the address they begin at and take a collective for work of the stream that
    issued it, so that views of one buffer are never compared, and a collective that is waited for from another stream
    looks like a race. Here accesses are compared by the bytes that they touch, and a collective runs on a stream of its
    own: it begins after what the issuing stream has done, and whoever calls ``wait()`` comes after it.

Note [What is freed too soon]
    The allocator gives freed memory to the next tensor of its stream at once. So whoever used it on another stream has
    told the allocator (``record_stream``), or the allocating stream has waited for that use.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable

_COMMUNICATION = -1  # the stream that collectives run on
_COLLECTIVES = (
    "allreduce", "_allgather_base", "allgather", "allgather_into_tensor_coalesced", "_reduce_scatter_base",
    "reduce_scatter", "reduce_scatter_tensor_coalesced", "alltoall_base", "alltoall", "broadcast", "reduce", "gather",
    "scatter", "send", "recv", "recv_anysource", "barrier",
)  # fmt: skip
_SHOWN = 6  # frames of an access


class Access(NamedTuple):
    """One use of memory by a kernel.

    Attributes:
        stream: it runs on.
        number: of the kernel.
        begin: the first address.
        end: the address after the last one.
        writes: it writes.
        what: the operator.
        where: files and lines of this repository that issued it, innermost first.
    """

    stream: int
    number: int
    begin: int
    end: int
    writes: bool
    what: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.what} on stream {self.stream:#x} {verb}, at " + " < ".join(self.where)


@dataclass
class _Block:
    """Memory that the allocator gave out: the stream it was allocated on, and the uses that may still matter."""

    stream: int
    accesses: list[Access]
    recorded: set[int]


class Audit:
    """The accesses so far, and what was wrong with them.

    Args:
        syncs: what each stream has waited for, kept by the sanitizer's callbacks.
        current_stream: gets the handle of the current stream.
    """

    def __init__(self, syncs: Any, current_stream: Callable[[], int]) -> None:
        self.syncs, self.current_stream = syncs, current_stream
        self.faults: dict[str, None] = {}
        self._blocks: dict[int, _Block] = {}
        self._numbers = itertools.count(1)
        syncs.create_stream(_COMMUNICATION)

    def allocated(self, address: int) -> None:
        """Take note of new memory."""
        self._blocks[address] = _Block(self.current_stream(), [], set())

    def recorded(self, address: int, stream: int) -> None:
        """Take note that the allocator knows of a stream that uses the memory."""
        if address in self._blocks:
            self._blocks[address].recorded.add(stream)

    def freed(self, address: int) -> None:
        """Check that all uses of memory on other streams are over before it is given to another tensor."""
        block = self._blocks.pop(address, None) or _Block(0, [], set())
        for access in block.accesses:
            known = access.stream in (block.stream, _COMMUNICATION) or access.stream in block.recorded
            if not known and not self._is_ordered(access, block.stream):
                text = f"memory is freed on stream {block.stream:#x}, which has not waited for its last use, nor was it"
                self.faults[f"{text} told to the allocator: {access}; freed at {' < '.join(_where())}"] = None

    def launched(self, what: str, uses: Iterable[tuple[torch.Tensor, bool]]) -> None:
        """Check a kernel's accesses against those before it."""
        stream, number, where = self.current_stream(), next(self._numbers), None
        if what.startswith("c10d::"):
            self.wait(self.state(stream), _COMMUNICATION)
            stream = _COMMUNICATION
        self.syncs.update_seq_num(stream, number)
        for tensor, writes in uses:
            begin = tensor.data_ptr()
            if not begin or not tensor.numel():
                continue
            base = tensor.untyped_storage().data_ptr()
            block = self._blocks.setdefault(base, _Block(self.current_stream(), [], set()))
            where = where or _where()
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
            access = Access(stream, number, begin, begin + (last + 1) * tensor.itemsize, writes, what, where)
            self._compare(block, access)

    def _compare(self, block: _Block, access: Access) -> None:
        left = []
        for old in block.accesses:
            apart = old.end <= access.begin or access.end <= old.begin
            ordered = old.stream == access.stream or self._is_ordered(old, access.stream)
            if not apart and not ordered and (old.writes or access.writes):
                self.faults[f"nothing orders two accesses: {old}; then {access}"] = None
            inside = access.begin <= old.begin and old.end <= access.end
            if not (inside and ordered and (access.writes or not old.writes and old.stream == access.stream)):
                left.append(old)
        block.accesses = [*left, access]

    def _is_ordered(self, old: Access, stream: int) -> bool:
        return self.state(stream).get(old.stream, -1) >= old.number

    def state(self, stream: int) -> dict[int, int]:
        """Get what a stream has waited for: the last kernel of each stream."""
        self.syncs._ensure_stream_exists(stream)
        return self.syncs.current_sync_states[stream]

    def wait(self, state: dict[int, int], stream: int) -> None:
        """Let a stream wait for all that a state has."""
        self.syncs._state_wait_for_other(self.state(stream), state)

    def take_faults(self) -> list[str]:
        """Return the faults since the last call."""
        found, self.faults = list(self.faults), {}
        return found


class _Watch(TorchDispatchMode):
    """Tells an audit of each operator on the current device; torch orders copies between devices."""

    def __init__(self, audit: Audit, device: torch.device) -> None:
        super().__init__()
        self._audit, self._device = audit, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::record_stream":
            self._audit.recorded(args[0].untyped_storage().data_ptr(), _handle(args[1]))
        elif not _is_view(func._schema) and not name.startswith(("aten::empty", "aten::new_empty", "aten::set_")):
            self._audit.launched(name, list(self._uses(func._schema, args, kwargs or {}, outputs)))
        return outputs

    def _uses(self, schema: Any, args: Any, kwargs: Any, outputs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
        named = {argument.name: argument for argument in schema.arguments}
        given = [*zip(schema.arguments, args), *((named[name], value) for name, value in kwargs.items())]
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if schema.name.startswith("c10d::"):  # declared to write nothing
                writes = not argument.name.startswith("input") and schema.name != "c10d::send"
            yield from ((tensor, writes) for tensor in self._tensors(value))
        for returned, value in zip(schema.returns, outputs if isinstance(outputs, tuple) else (outputs,)):
            if returned.alias_info is None and not schema.name.startswith("c10d::"):
                yield from ((tensor, True) for tensor in self._tensors(value))

    def _tensors(self, value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            if value.device == self._device and value.layout is torch.strided and not is_traceable(value):
                yield value
        elif isinstance(value, (list, tuple)):
            for each in value:
                yield from self._tensors(each)


def _is_view(schema: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)


def _handle(stream: Any) -> int:
    return int(getattr(stream, "npu_stream", None) or getattr(stream, "cuda_stream", 0))


def _where() -> tuple[str, ...]:
    found: list[str] = []
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if "hp_" in file and "hp_testing" not in file or os.sep + "tests" + os.sep in file:
            found.append(f"{os.path.basename(file)}:{line}")
            if len(found) == _SHOWN:
                break
    return tuple(found)


def _order_collectives(audit: Audit) -> None:
    """Let ``Work.wait`` order what the waiting stream does after the collective."""
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    ends: dict[int, tuple[Any, dict[int, int]]] = {}

    def issuing(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def issue(*args: Any, **kwargs: Any) -> Any:
            work = method(*args, **kwargs)
            if work is None:  # a collective that is not asynchronous runs on the issuing stream
                audit.wait(audit.state(_COMMUNICATION), audit.current_stream())
            else:
                ends[id(work)] = work, dict(audit.state(_COMMUNICATION))  # the work stays, so its number is its own
            return work

        return issue

    wait = c10d.Work.wait

    @functools.wraps(wait)
    def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        _, state = ends.pop(id(work), (None, {}))
        audit.wait(state, audit.current_stream())
        return result

    for name in _COLLECTIVES:
        if hasattr(c10d.ProcessGroup, name):
            setattr(c10d.ProcessGroup, name, issuing(getattr(c10d.ProcessGroup, name)))
    c10d.Work.wait = waited


def start(kind: str) -> Audit:
    """Begin to audit this process on its current device; call it once, before it has made tensors or groups.

    Args:
        kind: "cuda" or "npu".
    """
    csan: Any = importlib.import_module("torch.cuda._sanitizer")
    handler = csan.EventHandler()
    module: Any = getattr(torch, kind)
    audit = Audit(handler.syncs, lambda: _handle(module.current_stream()))
    events = {
        "event_creation": handler._handle_event_creation,
        "event_deletion": handler._handle_event_deletion,
        "event_record": handler._handle_event_record,
        "event_wait": handler._handle_event_wait,
        "memory_allocation": audit.allocated,
        "memory_deallocation": audit.freed,
        "stream_creation": handler._handle_stream_creation,
        "device_synchronization": handler._handle_device_synchronization,
        "stream_synchronization": handler._handle_stream_synchronization,
        "event_synchronization": handler._handle_event_synchronization,
    }
    if kind == "npu":
        trace: Any = importlib.import_module("torch_npu.utils._npu_trace")
        for name, call in {**events, "record_stream": audit.recorded}.items():
            getattr(trace, f"register_callback_for_npu_{name}")(call, f"hp_testing {name}")
        importlib.import_module("torch_npu")._C._activate_npu_trace(0)
    else:
        for name, call in events.items():
            getattr(csan.gpu_trace, f"register_callback_for_{name}")(call)
        csan.torch._C._activate_gpu_trace()
    _order_collectives(audit)
    _Watch(audit, torch.device(kind, module.current_device())).__enter__()
    return audit
