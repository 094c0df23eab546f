"""Collectives straight on PyTorch's process group, with option objects that are made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hp_platform import devices
from hp_platform.port import Handle
from hp_platform.torch.peers import Pending, raise_if_lost

real = torch.view_as_real  # backends know no complex numbers

# Dtypes that gloo cannot send, and the dtype to send instead; None is for complex numbers, sent as their real view.
SENT_AS = {
    getattr(torch, name): as_dtype
    for as_dtype, names in {
        torch.uint8: ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        torch.float16: ("int16", "uint16"),
        torch.int32: ("uint32",),
        torch.int64: ("uint64",),
        None: ("complex32", "complex64", "complex128"),
    }.items()
    for name in names
    if hasattr(torch, name)
}


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as the dtype that is sent.

    Args:
        tensor: contiguous, of a dtype in SENT_AS.
    """
    return real(tensor) if tensor.is_complex() else tensor.view(SENT_AS[tensor.dtype])


__all__ = ["raise_if_lost"]

ProcessGroup = dist.ProcessGroup

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def _options(kind: Any, async_op: bool, **fields: Any) -> Any:
    options = kind()
    options.asyncOp = async_op
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _reductions(kind: Any) -> dict[tuple[str, bool], Any]:
    return {(op, a): _options(kind, a, reduceOp=value) for op, value in _OPS.items() for a in _BOTH}


_BOTH = (False, True)
_REDUCE = _reductions(c10d.AllreduceOptions)
_SCATTER = _reductions(c10d.ReduceScatterOptions)
_GATHER = tuple(_options(c10d.AllgatherOptions, a) for a in _BOTH)
_EXCHANGE = tuple(_options(c10d.AllToAllOptions, a) for a in _BOTH)
_BROADCAST: dict[tuple[int, bool], Any] = {}


# Dtypes that ProcessGroupHCCL refuses to reduce but does send: gathered, and reduced in the order of the ranks.
_NOT_ALL_REDUCED = frozenset({torch.float64})
_NOT_REDUCE_SCATTERED = frozenset({torch.float64, torch.uint8, torch.bool})

_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def all_reduce(tensor: torch.Tensor, op: str, group: ProcessGroup, async_op: bool) -> Any:
    """Reduce in place."""
    if tensor.is_complex():
        tensor = real(tensor)
    if tensor.dtype in _NOT_ALL_REDUCED and _backend_name(tensor, group) == "hccl":
        return _all_reduce_on_arrival(tensor, op, group)
    return group.allreduce([tensor], _REDUCE[op, async_op])


def all_gather(output: torch.Tensor, tensor: torch.Tensor, group: ProcessGroup, async_op: bool) -> Any:
    """Concatenate each rank's tensor."""
    if tensor.dtype in SENT_AS:
        output, tensor = sendable(output), sendable(tensor)
    if tensor.dim() != 1 or output.dim() != 1:  # gloo compares the shapes of the pieces
        output, tensor = output.view(-1), tensor.view(-1)
    return group._allgather_base(output, tensor, _GATHER[async_op])


def reduce_scatter(output: torch.Tensor, tensor: torch.Tensor, op: str, group: ProcessGroup, async_op: bool) -> Any:
    """Reduce and keep this rank's piece."""
    if tensor.is_complex():
        output, tensor = real(output), real(tensor)
    if tensor.dtype in _NOT_REDUCE_SCATTERED and _backend_name(tensor, group) == "hccl":
        return _reduce_scatter_on_arrival(output, tensor, op, group)
    return group._reduce_scatter_base(output, tensor, _SCATTER[op, async_op])


def all_to_all(
    output: torch.Tensor,
    tensor: torch.Tensor,
    received: list[int],
    sent: list[int],
    group: ProcessGroup,
    async_op: bool,
) -> Any:
    """Exchange rows."""
    if tensor.dtype in SENT_AS:
        output, tensor = sendable(output), sendable(tensor)
    return group.alltoall_base(output, tensor, received, sent, _EXCHANGE[async_op])


def broadcast(tensor: torch.Tensor, group_src: int, group: ProcessGroup, async_op: bool) -> Any:
    """Copy from one rank."""
    options = _BROADCAST.get((group_src, async_op))
    if options is None:
        options = _options(c10d.BroadcastOptions, async_op, rootRank=group_src, rootTensor=0)
        _BROADCAST[group_src, async_op] = options
    return group.broadcast([sendable(tensor) if tensor.dtype in SENT_AS else tensor], options)


def send(tensor: torch.Tensor, dst: int, group: ProcessGroup, tag: int, async_op: bool) -> Any:
    """Send to one rank."""
    parts = sendable(tensor) if tensor.dtype in SENT_AS else tensor
    if not _staged(tensor, group):
        return group.send([parts], dst, tag)
    staged = parts.cpu()
    return _Staged(group.send([staged], dst, tag), staged, None)


def recv(tensor: torch.Tensor, src: int, group: ProcessGroup, tag: int, async_op: bool) -> Any:
    """Receive from one rank."""
    parts = sendable(tensor) if tensor.dtype in SENT_AS else tensor
    if not _staged(tensor, group):
        return group.recv([parts], src, tag)
    received = torch.empty_like(parts, device="cpu")
    return _Staged(group.recv([received], src, tag), received, parts)


class _Staged:
    """A message through the host's memory, and what it is copied to in the end."""

    def __init__(self, work: Any, staged: torch.Tensor, target: torch.Tensor | None) -> None:
        self.work, self.staged, self.target = work, staged, target

    def wait(self) -> None:
        """Wait for the message and copy it, once."""
        _wait(self.work)
        if self.target is not None:
            with torch.no_grad():
                self.target.copy_(self.staged)
            self.target = None


def _staged(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Tell whether to go through the host's memory, which is all that gloo sends from."""
    return not tensor.is_cpu and _backend_name(tensor, group) == "gloo"


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def has_tags(group: ProcessGroup, device: Any) -> bool:
    """Tell whether messages have tags."""
    return _backend_on(device, group) in ("gloo", "fake", "mpi", "ucc")


def receives_ahead(group: ProcessGroup, device: Any) -> bool:
    """Tell whether receives may be posted ahead; on hccl one may hold the host until its message comes."""
    return _backend_on(device, group) != "hccl"


def barrier(group: ProcessGroup) -> Any:
    """Wait for all ranks."""
    options = c10d.BarrierOptions()
    options.device = _device_of(group)
    return group.barrier(options)


def from_bytes(data: bytes, group: ProcessGroup) -> torch.Tensor:
    """Make a tensor of bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_device_of(group))


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return its bytes."""
    return tensor.cpu().numpy().tobytes()


def from_numbers(numbers: Sequence[int | float], group: ProcessGroup) -> torch.Tensor:
    """Make a tensor of numbers."""
    dtype = torch.float64 if any(isinstance(each, float) for each in numbers) else torch.int64
    return torch.tensor(numbers, dtype=dtype, device=_device_of(group))


def to_numbers(tensor: torch.Tensor) -> list[Any]:
    """Return its numbers."""
    return tensor.tolist()


def _device_of(group: ProcessGroup) -> torch.device:
    cpu = torch.device("cpu")
    return cpu if cpu in group._device_types else devices.devices.current_device()


def averages(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Tell whether the backend averages by itself; gloo and hccl don't."""
    return _backend_name(tensor, group) in ("nccl", "fake")


def divide(tensor: torch.Tensor, size: int) -> None:
    """Divide in place."""
    with torch.no_grad():
        tensor.div_(size)


def pending(work: Any, kind: str, group: ProcessGroup) -> Handle:
    """Make a handle whose failure says which rank was lost."""
    return Pending(work, kind, group)


def _backend_name(tensor: torch.Tensor, group: ProcessGroup) -> str:
    return group._get_backend(tensor.device).name()


def _backend_on(device: Any, group: ProcessGroup) -> str:
    try:
        return group._get_backend(torch.device(device)).name()
    except RuntimeError as error:
        raise ValueError(
            f"a process group of backend {dist.get_backend(group)} does not communicate from {device}: use a device of"
            " that backend, or a group with a backend for this one."
        ) from error


class _Parts:
    """A gather under way, whose parts are reduced when it is waited for."""

    def __init__(self, work: Handle, parts: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self.work, self.parts, self.output, self.op = work, parts, output, op
        self.done = False

    def wait(self) -> None:
        """Wait for the parts and reduce them, once."""
        if self.done:
            return
        self.done = True
        self.work.wait()
        with torch.no_grad():
            total, *others = self.parts.unbind()
            for part in others:
                total = _COMBINE[self.op](total, part)
            self.output.copy_(total)


def _all_reduce_on_arrival(tensor: torch.Tensor, op: str, group: ProcessGroup) -> Handle:
    """Gather every rank's tensor; its place takes their reduction when the handle is waited for.

    It takes the memory of all ranks' tensors.
    """
    flat = tensor.view(-1)
    parts = tensor.new_empty(group.size(), flat.numel())
    return _Parts(group._allgather_base(parts.view(-1), flat, _GATHER[True]), parts, flat, op)


def _reduce_scatter_on_arrival(output: torch.Tensor, tensor: torch.Tensor, op: str, group: ProcessGroup) -> Handle:
    """Exchange the pieces; the output takes their reduction when the handle is waited for."""
    flat = output.view(-1)
    parts = output.new_empty(group.size(), flat.numel())
    return _Parts(group.alltoall_base(parts.view(-1), tensor.view(-1), [], [], _EXCHANGE[True]), parts, flat, op)
