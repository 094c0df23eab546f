"""Collectives: what would hang or corrupt is refused before anything is sent, on every framework in the same words.

Note [Direct calls]: the functions of `torch.distributed` cost 4 to 20 us of Python a call (argument checks, logging,
torch function handling, an options object). A primitive calls the backend with what was prepared once, and what is
checked here costs about 1 us.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hp_platform import groups
from hp_platform.checks import (
    check_complex,
    check_pair,
    check_peer,
    checked_splits,
    gather_mismatch,
    integer_average,
    not_contiguous,
    scatter_mismatch,
    unknown_op,
)
from hp_platform.observing import Done, Observed, begin, observers
from hp_platform.port import Collectives, Group, Groups, Handle, Tensor, port

OPS = ("sum", "avg", "min", "max", "product")


@functools.cache
def _primitives() -> tuple[Collectives, Groups]:
    return port().collectives, port().groups


class _Over:
    """The handle of an operation that is done."""

    def wait(self) -> None:
        """Do nothing."""


_OVER: Handle = _Over()


class _Average:
    """A sum under way that becomes an average when it is waited for."""

    def __init__(self, work: Handle, tensor: Tensor, size: int) -> None:
        self.work, self.tensor, self.size = work, tensor, size

    def wait(self) -> None:
        """Wait for the sum and divide it, once."""
        self.work.wait()
        if self.size:
            _primitives()[0].divide(self.tensor, self.size)
            self.size = 0


def all_reduce(tensor: Tensor, op: str = "sum", *, group: Group, async_op: bool = False) -> Handle | None:
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
        TypeError: avg of integers, or an order of complex numbers.
    """
    if not tensor.is_contiguous():
        raise not_contiguous("tensor", tensor)
    backend, own = _primitives()
    divide = _check_op(op, tensor) and not backend.averages(tensor, group)
    done = begin("all_reduce", tensor.nbytes, group) if observers else None
    try:
        work = backend.all_reduce(tensor, "sum" if divide else op, group, async_op)
        if async_op:
            return _handle(work, "all_reduce", group, done, (tensor, own.size(group)) if divide else None)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        backend.raise_if_lost(error, "all_reduce", group)
        raise
    if divide:
        backend.divide(tensor, own.size(group))
    return _end(done)


def all_gather(output: Tensor, tensor: Tensor, *, group: Group, async_op: bool = False) -> Handle | None:
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
    backend, own = _primitives()
    size = own.size(group)
    if output.numel() != tensor.numel() * size:
        raise gather_mismatch(output, tensor, size)
    done = begin("all_gather", output.nbytes, group) if observers else None
    try:
        work = backend.all_gather(output, tensor, group, async_op)
        if async_op:
            return _handle(work, "all_gather", group, done)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        backend.raise_if_lost(error, "all_gather", group)
        raise
    return _end(done)


def reduce_scatter(
    output: Tensor, tensor: Tensor, op: str = "sum", *, group: Group, async_op: bool = False
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
        TypeError: the dtypes differ, avg of integers, or an order of complex numbers.
    """
    check_pair("reduce_scatter", output, tensor)
    backend, own = _primitives()
    size = own.size(group)
    if tensor.numel() != output.numel() * size:
        raise scatter_mismatch(output, tensor, size)
    divide = _check_op(op, tensor) and not backend.averages(tensor, group)
    done = begin("reduce_scatter", tensor.nbytes, group) if observers else None
    try:
        work = backend.reduce_scatter(output, tensor, "sum" if divide else op, group, async_op)
        if async_op:
            return _handle(work, "reduce_scatter", group, done, (output, size) if divide else None)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        backend.raise_if_lost(error, "reduce_scatter", group)
        raise
    if divide:
        backend.divide(output, size)
    return _end(done)


def all_to_all(
    output: Tensor,
    tensor: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    *,
    group: Group,
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
    backend, own = _primitives()
    size = own.size(group)
    received = checked_splits("output", output, output_splits, size)
    sent = checked_splits("input", tensor, input_splits, size)
    done = begin("all_to_all", tensor.nbytes, group) if observers else None
    try:
        work = backend.all_to_all(output, tensor, received, sent, group, async_op)
        if async_op:
            return _handle(work, "all_to_all", group, done)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        backend.raise_if_lost(error, "all_to_all", group)
        raise
    return _end(done)


def broadcast(tensor: Tensor, group_src: int, *, group: Group, async_op: bool = False) -> Handle | None:
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
    backend, own = _primitives()
    check_peer("group_src", group_src, own.size(group))
    done = begin("broadcast", tensor.nbytes, group) if observers else None
    try:
        work = backend.broadcast(tensor, group_src, group, async_op)
        if async_op:
            return _handle(work, "broadcast", group, done)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        backend.raise_if_lost(error, "broadcast", group)
        raise
    return _end(done)


def send(tensor: Tensor, dst: int, *, group: Group) -> None:
    """Send a tensor to one rank of a group.

    Args:
        tensor: contiguous.
        dst: the receiver's rank inside the group.
        group: a group that holds both.

    Raises:
        ValueError: the tensor is not contiguous, or the group has no such rank.
    """
    _point_to_point("send", tensor, "dst", dst, group)


def recv(tensor: Tensor, src: int, *, group: Group) -> None:
    """Receive a tensor from one rank of a group, in place.

    Args:
        tensor: contiguous, the shape and dtype that were sent.
        src: the sender's rank inside the group.
        group: a group that holds both.

    Raises:
        ValueError: the tensor is not contiguous, or the group has no such rank.
    """
    _point_to_point("recv", tensor, "src", src, group)


def _point_to_point(kind: str, tensor: Tensor, name: str, peer: int, group: Group) -> None:
    if not tensor.is_contiguous():
        raise not_contiguous("tensor", tensor)
    backend, own = _primitives()
    check_peer(name, peer, own.size(group))
    done = begin(kind, tensor.nbytes, group) if observers else None
    try:
        (backend.send if kind == "send" else backend.recv)(tensor, peer, group)
    except RuntimeError as error:
        backend.raise_if_lost(error, kind, group)
        raise
    _end(done)


def barrier(group: Group | None = None) -> None:
    """Wait until each rank of a group is here.

    Args:
        group: None is the default group.

    Raises:
        RuntimeError: there is no default group yet.
    """
    target = groups.default_group() if group is None else group
    backend, _ = _primitives()
    done = begin("barrier", 0, target) if observers else None
    try:
        work = backend.barrier(target)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        backend.raise_if_lost(error, "barrier", target)
        raise
    _end(done)


def _check_op(op: str, tensor: Tensor) -> bool:
    """Refuse a reduction that the numbers don't have; tell whether it is an average."""
    if op not in OPS:
        raise unknown_op(op, OPS)
    if tensor.is_complex():
        check_complex(op)
    elif op == "avg" and not tensor.is_floating_point():
        raise integer_average(tensor)
    return op == "avg"


def _handle(
    work: Handle | None, kind: str, group: Group, done: list[Done] | None, average: tuple[Tensor, int] | None = None
) -> Any:
    """Make the caller's handle; with `average`, of a tensor over so many ranks, its wait divides the sum."""
    handle = _OVER if work is None else _primitives()[0].pending(work, kind, group)
    if done:
        handle = Observed(handle, done)
    return handle if average is None else _Average(handle, *average)


def _end(done: list[Done] | None) -> None:
    if done:
        Observed(None, done).wait()
