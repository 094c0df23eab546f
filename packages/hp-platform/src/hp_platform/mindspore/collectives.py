"""Collectives on MindSpore: native ones on hccl, those of mccl completed by emulation on the CPU.

What doesn't fit is refused before anything is sent, in the words of every platform.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

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
from hp_platform.mindspore import emulation, groups, native
from hp_platform.mindspore.devices import devices
from hp_platform.observing import Done, Observed, begin, observers
from hp_platform.protocols import Handle

OPS = ("sum", "avg", "min", "max", "product")

# How many collectives this process has issued in each group; send and recv, which two ranks issue, are none.
issued: Counter[str] = Counter()


class _Done:
    """The handle of an operation that is over."""

    def wait(self) -> None:
        """Do nothing."""


_DONE = _Done()


def _backend() -> ModuleType:
    return native if devices.capabilities.native_collectives else emulation


def _check_op(op: str, tensor: Any) -> None:
    if op not in OPS:
        raise unknown_op(op, OPS)
    if tensor.is_complex():
        check_complex(op)
    elif op == "avg" and not tensor.is_floating_point():
        raise integer_average(tensor)


def _begin(kind: str, tensor: Any, group: str) -> list[Done] | None:
    issued[group] += 1
    return begin(kind, tensor.nbytes, group) if observers else None


def _handle(work: Handle | None, async_op: bool, done: list[Done] | None) -> Handle | None:
    if not async_op:
        _end(done)
        return None
    return Observed(work, done) if done else work or _DONE


def _end(done: list[Done] | None) -> None:
    if done:
        Observed(None, done).wait()


def all_reduce(tensor: Any, op: str = "sum", *, group: str, async_op: bool = False) -> Handle | None:
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
    if op not in OPS:
        raise unknown_op(op, OPS)
    if not tensor.is_contiguous():
        raise not_contiguous("tensor", tensor)
    _check_op(op, tensor)
    done = _begin("all_reduce", tensor, group)
    return _handle(_backend().all_reduce(tensor, op, group, async_op), async_op, done)


def all_gather(output: Any, tensor: Any, *, group: str, async_op: bool = False) -> Handle | None:
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
    size = groups.size(group)
    if output.numel() != tensor.numel() * size:
        raise gather_mismatch(output, tensor, size)
    done = _begin("all_gather", output, group)
    return _handle(_backend().all_gather(output, tensor, group, async_op), async_op, done)


def reduce_scatter(output: Any, tensor: Any, op: str = "sum", *, group: str, async_op: bool = False) -> Handle | None:
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
    _check_op(op, tensor)
    check_pair("reduce_scatter", output, tensor)
    size = groups.size(group)
    if tensor.numel() != output.numel() * size:
        raise scatter_mismatch(output, tensor, size)
    done = _begin("reduce_scatter", tensor, group)
    return _handle(_backend().reduce_scatter(output, tensor, op, group, async_op), async_op, done)


def all_to_all(
    output: Any,
    tensor: Any,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    *,
    group: str,
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
    size = groups.size(group)
    received = checked_splits("output", output, output_splits, size)
    sent = checked_splits("input", tensor, input_splits, size)
    done = _begin("all_to_all", tensor, group)
    return _handle(_backend().all_to_all(output, tensor, received, sent, group, async_op), async_op, done)


def broadcast(tensor: Any, group_src: int, *, group: str, async_op: bool = False) -> Handle | None:
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
    check_peer("group_src", group_src, groups.size(group))
    done = _begin("broadcast", tensor, group)
    return _handle(_backend().broadcast(tensor, group_src, group, async_op), async_op, done)


def send(tensor: Any, dst: int, *, group: str) -> None:
    """Send a tensor to one rank of a group.

    Args:
        tensor: contiguous.
        dst: the receiver's rank inside the group.
        group: a group that holds both.

    Raises:
        ValueError: the tensor is not contiguous, or the group has no such rank.
    """
    done = _check_exchange("send", tensor, "dst", dst, group)
    _backend().send(tensor, dst, group)
    _end(done)


def recv(tensor: Any, src: int, *, group: str) -> None:
    """Receive a tensor from one rank of a group, in place.

    Args:
        tensor: contiguous, the shape and dtype that were sent.
        src: the sender's rank inside the group.
        group: a group that holds both.

    Raises:
        ValueError: the tensor is not contiguous, or the group has no such rank.
    """
    done = _check_exchange("recv", tensor, "src", src, group)
    _backend().recv(tensor, src, group)
    _end(done)


def _check_exchange(kind: str, tensor: Any, name: str, peer: int, group: str) -> list[Done] | None:
    if not tensor.is_contiguous():
        raise not_contiguous("tensor", tensor)
    check_peer(name, peer, groups.size(group))
    return begin(kind, tensor.nbytes, group) if observers else None


def barrier(group: str | None = None) -> None:
    """Wait until each rank of a group is here.

    Args:
        group: None is the default group.
    """
    target = groups.default() if group is None else group
    issued[target] += 1
    done = begin("barrier", 0, target) if observers else None
    _backend().barrier(target)
    _end(done)
