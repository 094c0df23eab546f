"""Collectives on PyTorch, straight on the process group.

Note [Direct calls]: `torch.distributed`'s functions cost 4 to 20 us of Python a call (argument checks, logging, torch
function handling, an options object). These call the ProcessGroup with option objects that are made once, and check
what would otherwise hang or corrupt (sizes, dtypes, contiguity) before anything is sent: about 1 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hp_platform.checks import (
    check_complex,
    check_pair,
    check_peer,
    checked_splits,
    gather_mismatch,
    integer_average,
    no_default_group,
    not_contiguous,
    scatter_mismatch,
    unknown_op,
)
from hp_platform.observing import Done, Observed, begin, observers
from hp_platform.protocols import Handle
from hp_platform.torch import gathered
from hp_platform.torch.devices import devices
from hp_platform.torch.movable import MOVED_AS, movable, real
from hp_platform.torch.peers import Pending, raise_if_lost

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


class _Average:
    """A sum under way that becomes an average when it is waited for."""

    def __init__(self, work: Handle, tensor: torch.Tensor, size: int) -> None:
        self.work, self.tensor, self.size = work, tensor, size

    def wait(self) -> None:
        """Wait for the sum and divide it, once."""
        self.work.wait()
        if self.size:
            _divide(self.tensor, self.size)
            self.size = 0


def _divide(tensor: torch.Tensor, size: int) -> None:
    with torch.no_grad():
        tensor.div_(size)


def _averages(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Say whether the backend averages by itself; gloo and hccl don't."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise integer_average(tensor)
    return _backend_name(tensor, group) in ("nccl", "fake")


def _backend_name(tensor: torch.Tensor, group: ProcessGroup) -> str:
    return group._get_backend(tensor.device).name()


def all_reduce(tensor: torch.Tensor, op: str = "sum", *, group: ProcessGroup, async_op: bool = False) -> Handle | None:
    """Reduce a tensor in place over the ranks of a group.

    Args:
        tensor: contiguous, the same shape and dtype on every rank.
        op: sum, avg, min, max or product.
        group: the ranks that take part.
        async_op: return at once, with a handle.

    Returns:
        With `async_op` the handle to wait for, else None.

    Raises:
        ValueError: the tensor is not contiguous, or `op` is unknown.
        TypeError: avg of integers.
    """
    options = _REDUCE.get((op, async_op))
    if options is None:
        raise unknown_op(op, _OPS)
    if not tensor.is_contiguous():
        raise not_contiguous("tensor", tensor)
    parts = tensor
    if tensor.is_complex():
        check_complex(op)
        parts = real(tensor)
    done = _observe("all_reduce", tensor, group) if observers else None
    divide = op == "avg" and not _averages(tensor, group)
    if divide:
        op, options = "sum", _REDUCE["sum", async_op]
    try:
        if parts.dtype in gathered.NOT_ALL_REDUCED and _backend_name(tensor, group) == "hccl":
            work = gathered.all_reduce(parts, op, group)
        else:
            work = group.allreduce([parts], options)
        if async_op:
            pending = _under_way(work, "all_reduce", group, done)
            return _Average(pending, tensor, group.size()) if divide else pending
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise_if_lost(error, "all_reduce", group)
        raise
    if divide:
        _divide(tensor, group.size())
    return _end(done)


def all_gather(
    output: torch.Tensor, tensor: torch.Tensor, *, group: ProcessGroup, async_op: bool = False
) -> Handle | None:
    """Concatenate each rank's tensor on dim 0, in the order of the ranks.

    Args:
        output: contiguous, as many elements as all pieces together.
        tensor: this rank's piece, contiguous, the same size on every rank.
        group: the ranks that take part.
        async_op: return at once, with a handle.

    Returns:
        With `async_op` the handle to wait for, else None.

    Raises:
        ValueError: a tensor is not contiguous, or the sizes don't fit.
        TypeError: the dtypes differ.
    """
    check_pair("all_gather", output, tensor)
    if output.numel() != tensor.numel() * group.size():
        raise gather_mismatch(output, tensor, group.size())
    done = _observe("all_gather", output, group) if observers else None
    if tensor.dtype in MOVED_AS:
        output, tensor = movable(output), movable(tensor)
    if tensor.dim() != 1 or output.dim() != 1:  # gloo compares the shapes of the pieces
        output, tensor = output.view(-1), tensor.view(-1)
    try:
        work = group._allgather_base(output, tensor, _GATHER[async_op])
        if async_op:
            return _under_way(work, "all_gather", group, done)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise_if_lost(error, "all_gather", group)
        raise
    return _end(done)


def reduce_scatter(
    output: torch.Tensor, tensor: torch.Tensor, op: str = "sum", *, group: ProcessGroup, async_op: bool = False
) -> Handle | None:
    """Reduce a tensor over the ranks and keep this rank's piece of dim 0.

    Args:
        output: contiguous, this rank's piece.
        tensor: contiguous, as many elements as all pieces together; it is left as it is.
        op: sum, avg, min, max or product.
        group: the ranks that take part.
        async_op: return at once, with a handle.

    Returns:
        With `async_op` the handle to wait for, else None.

    Raises:
        ValueError: a tensor is not contiguous, the sizes don't fit, or `op` is unknown.
        TypeError: the dtypes differ, or avg of integers.
    """
    options = _SCATTER.get((op, async_op))
    if options is None:
        raise unknown_op(op, _OPS)
    check_pair("reduce_scatter", output, tensor)
    if tensor.is_complex():
        check_complex(op)
    if tensor.numel() != output.numel() * group.size():
        raise scatter_mismatch(output, tensor, group.size())
    done = _observe("reduce_scatter", tensor, group) if observers else None
    divide = op == "avg" and not _averages(tensor, group)
    if divide:
        op, options = "sum", _SCATTER["sum", async_op]
    into, parts = (real(output), real(tensor)) if output.is_complex() else (output, tensor)
    try:
        if parts.dtype in gathered.NOT_REDUCE_SCATTERED and _backend_name(tensor, group) == "hccl":
            work = gathered.reduce_scatter(into, parts, op, group)
        else:
            work = group._reduce_scatter_base(into, parts, options)
        if async_op:
            pending = _under_way(work, "reduce_scatter", group, done)
            return _Average(pending, output, group.size()) if divide else pending
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise_if_lost(error, "reduce_scatter", group)
        raise
    if divide:
        _divide(output, group.size())
    return _end(done)


def all_to_all(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    *,
    group: ProcessGroup,
    async_op: bool = False,
) -> Handle | None:
    """Send piece i of dim 0 to rank i and receive a piece from each rank, in the order of the ranks.

    Args:
        output: contiguous; what is received.
        tensor: contiguous; what is sent.
        output_splits: how much of dim 0 comes from each rank; None is equally much.
        input_splits: how much of dim 0 goes to each rank; None is equally much.
        group: the ranks that take part.
        async_op: return at once, with a handle.

    Returns:
        With `async_op` the handle to wait for, else None.

    Raises:
        ValueError: a tensor is not contiguous, or the splits don't fit.
        TypeError: the dtypes differ.
    """
    check_pair("all_to_all", output, tensor)
    received = checked_splits("output", output, output_splits, group.size())
    sent = checked_splits("input", tensor, input_splits, group.size())
    done = _observe("all_to_all", tensor, group) if observers else None
    if tensor.dtype in MOVED_AS:
        output, tensor = movable(output), movable(tensor)
    try:
        work = group.alltoall_base(output, tensor, received, sent, _EXCHANGE[async_op])
        if async_op:
            return _under_way(work, "all_to_all", group, done)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise_if_lost(error, "all_to_all", group)
        raise
    return _end(done)


def broadcast(tensor: torch.Tensor, group_src: int, *, group: ProcessGroup, async_op: bool = False) -> Handle | None:
    """Copy a tensor from one rank of a group to the others, in place.

    Args:
        tensor: contiguous, the same shape and dtype on every rank.
        group_src: the sender's rank inside the group.
        group: the ranks that take part.
        async_op: return at once, with a handle.

    Returns:
        With `async_op` the handle to wait for, else None.

    Raises:
        ValueError: the tensor is not contiguous, or the group has no such rank.
    """
    if not tensor.is_contiguous():
        raise not_contiguous("tensor", tensor)
    check_peer("group_src", group_src, group.size())
    options = _BROADCAST.get((group_src, async_op))
    if options is None:
        options = _options(c10d.BroadcastOptions, async_op, rootRank=group_src, rootTensor=0)
        _BROADCAST[group_src, async_op] = options
    done = _observe("broadcast", tensor, group) if observers else None
    try:
        work = group.broadcast([movable(tensor) if tensor.dtype in MOVED_AS else tensor], options)
        if async_op:
            return _under_way(work, "broadcast", group, done)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise_if_lost(error, "broadcast", group)
        raise
    return _end(done)


def send(tensor: torch.Tensor, dst: int, *, group: ProcessGroup) -> None:
    """Send a tensor to one rank of a group.

    Args:
        tensor: contiguous.
        dst: the receiver's rank inside the group.
        group: a group that holds both.

    Raises:
        ValueError: the tensor is not contiguous, or the group has no such rank.
    """
    _exchange("send", tensor, "dst", dst, group)


def recv(tensor: torch.Tensor, src: int, *, group: ProcessGroup) -> None:
    """Receive a tensor from one rank of a group, in place.

    Args:
        tensor: contiguous, the shape and dtype that were sent.
        src: the sender's rank inside the group.
        group: a group that holds both.

    Raises:
        ValueError: the tensor is not contiguous, or the group has no such rank.
    """
    _exchange("recv", tensor, "src", src, group)


def _exchange(kind: str, tensor: torch.Tensor, name: str, peer: int, group: ProcessGroup) -> None:
    if not tensor.is_contiguous():
        raise not_contiguous("tensor", tensor)
    check_peer(name, peer, group.size())
    done = _observe(kind, tensor, group) if observers else None
    moved = parts = movable(tensor) if tensor.dtype in MOVED_AS else tensor
    # gloo sends from the host's memory only
    staged = tensor.device.type != "cpu" and _backend_name(tensor, group) == "gloo"
    if staged:
        moved = parts.cpu()
    try:
        work = (group.send if kind == "send" else group.recv)([moved], peer, 0)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise_if_lost(error, kind, group)
        raise
    _end(done)
    if staged and kind == "recv":
        with torch.no_grad():
            parts.copy_(moved)


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait until each rank of a group is here.

    Args:
        group: None is the default group.
    """
    target = dist.group.WORLD if group is None else group
    if target is None:
        raise no_default_group()
    done = begin("barrier", 0, target) if observers else None
    options = c10d.BarrierOptions()
    cpu = torch.device("cpu")
    options.device = cpu if cpu in target._device_types else devices.current_device()
    try:
        work = target.barrier(options)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise_if_lost(error, "barrier", target)
        raise
    _end(done)


def _observe(kind: str, tensor: torch.Tensor, group: ProcessGroup) -> list[Done]:
    return begin(kind, tensor.numel() * tensor.element_size(), group)


def _under_way(work: Any, kind: str, group: ProcessGroup, done: list[Done] | None) -> Any:
    if work is not None:
        work = Pending(work, kind, group)
    return Observed(work, done) if done else work


def _end(done: list[Done] | None) -> None:
    if done:
        Observed(None, done).wait()
