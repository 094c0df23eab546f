"""Collectives: what would hang or corrupt is refused before anything is sent, on every framework in the same words.

Note [Direct calls]: the functions of `torch.distributed` cost 4 to 20 us of Python a call (argument checks, logging,
torch function handling, an options object). A primitive calls the backend with what was prepared once, and what is
checked here costs about 1 us.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hp_platform import groups
from hp_platform.communication.carriers import Carrier, carrier_of
from hp_platform.communication.checks import (
    Observed,
    begin,
    check_complex,
    check_pair,
    check_peer,
    checked_splits,
    gather_mismatch,
    integer_average,
    not_contiguous,
    observers,
    scatter_mismatch,
    unknown_op,
)
from hp_platform.failures import flight
from hp_platform.port import Collectives, Group, Groups, Handle, Tensor, port

OPS = ("sum", "avg", "min", "max", "product")


@functools.cache
def _primitives() -> tuple[Collectives, Groups]:
    return port().collectives, port().groups


def renew() -> None:
    """Take the primitives from the port again, which has others now."""
    _primitives.cache_clear()


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
    average = _check_op(op, tensor)
    if (carrier := _taking("all_reduce", tensor, op, group)) is not None:
        return _carry(carrier, "all_reduce", tensor, tensor, group, async_op, op)
    divide = average and not backend.averages(tensor, group)
    averaged = tensor if divide else None
    return _issue(
        "all_reduce",
        tensor,
        group,
        async_op,
        averaged,
        backend.all_reduce,
        tensor,
        "sum" if divide else op,
        group,
        async_op,
    )


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
    if (carrier := _taking("all_gather", tensor, "sum", group)) is not None:
        return _carry(carrier, "all_gather", output, tensor, group, async_op)
    return _issue("all_gather", output, group, async_op, None, backend.all_gather, output, tensor, group, async_op)


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
    average = _check_op(op, tensor)
    if (carrier := _taking("reduce_scatter", tensor, op, group)) is not None:
        return _carry(carrier, "reduce_scatter", output, tensor, group, async_op, op)
    divide = average and not backend.averages(tensor, group)
    averaged = output if divide else None
    return _issue(
        "reduce_scatter",
        tensor,
        group,
        async_op,
        averaged,
        backend.reduce_scatter,
        output,
        tensor,
        "sum" if divide else op,
        group,
        async_op,
    )


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
        output_splits: rows of dim 0 from each rank; None is equal parts.
        input_splits: rows of dim 0 to each rank; None is equal parts.
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
    if (carrier := _taking("all_to_all", tensor, "sum", group)) is not None:
        return _carry(carrier, "all_to_all", output, tensor, group, async_op, "sum", received, sent)
    return _issue(
        "all_to_all", tensor, group, async_op, None, backend.all_to_all, output, tensor, received, sent, group, async_op
    )


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
    if (carrier := _taking("broadcast", tensor, "sum", group)) is not None:
        return _carry(carrier, "broadcast", tensor, tensor, group, async_op, "sum", (), (), group_src)
    return _issue("broadcast", tensor, group, async_op, None, backend.broadcast, tensor, group_src, group, async_op)


def send(tensor: Tensor, dst: int, *, group: Group, tag: int = 0, async_op: bool = False) -> Handle | None:
    """Send a tensor to one rank of a group.

    Args:
        tensor: contiguous; with ``async_op`` nobody writes to it until the handle has been waited for.
        dst: the receiver's rank inside the group.
        group: a group that holds both.
        tag: tells messages between the same two ranks apart; messages of one tag arrive in their order. gloo and mccl
            have tags: elsewhere all messages between two ranks of a group are in one order.
        async_op: return at once, with a handle.

    Returns:
        With ``async_op`` the handle to wait for, else None.

    Raises:
        ValueError: the tensor is not contiguous, or the group has no such other rank.
    """
    return _point_to_point("send", tensor, "dst", dst, group, tag, async_op)


def recv(tensor: Tensor, src: int, *, group: Group, tag: int = 0, async_op: bool = False) -> Handle | None:
    """Receive a tensor from one rank of a group, in place.

    Args:
        tensor: contiguous, the shape and dtype that were sent.
        src: the sender's rank inside the group.
        group: a group that holds both.
        tag: that of the message: see ``send``.
        async_op: return at once, with a handle; the tensor is filled when the handle has been waited for.

    Returns:
        With ``async_op`` the handle to wait for, else None.

    Raises:
        ValueError: the tensor is not contiguous, or the group has no such other rank.
    """
    return _point_to_point("recv", tensor, "src", src, group, tag, async_op)


def has_tags(group: Group, device: Any) -> bool:
    """Tell whether a group tells messages between the same two ranks apart by their tags: see ``send``.

    Args:
        group: a group.
        device: where the messages are.

    Raises:
        ValueError: the group does not communicate from this device.
    """
    return _primitives()[0].has_tags(group, device)


def receives_ahead(group: Group, device: Any) -> bool:
    """Tell whether a receive may be posted before its message is sent, and then holds up no other work.

    Args:
        group: a group.
        device: where the messages are.

    Raises:
        ValueError: the group does not communicate from this device.
    """
    return _primitives()[0].receives_ahead(group, device)


def _point_to_point(
    kind: str, tensor: Tensor, name: str, peer: int, group: Group, tag: int, async_op: bool
) -> Handle | None:
    if not tensor.is_contiguous():
        raise not_contiguous("tensor", tensor)
    backend, own = _primitives()
    check_peer(name, peer, own.size(group))
    if peer == own.rank(group):
        raise ValueError(f"{kind}: {name} must be another rank of the group, got this rank's own, {peer}.")
    if (carrier := _taking(kind, tensor, "sum", group)) is not None:
        return _issue(kind, tensor, group, async_op, None, carrier.message, tensor, peer, kind, tag, async_op)
    primitive = backend.send if kind == "send" else backend.recv
    return _issue(kind, tensor, group, async_op, None, primitive, tensor, peer, group, tag, async_op)


def barrier(group: Group | None = None) -> None:
    """Wait until each rank of a group is here.

    Args:
        group: None is the default group.

    Raises:
        RuntimeError: there is no default group yet.
    """
    target = groups.default_group() if group is None else group
    if (carrier := _taking("barrier", None, "sum", target)) is not None:
        _carry(carrier, "barrier", None, None, target, False)
        return
    _issue("barrier", None, target, False, None, _primitives()[0].barrier, target)


def _taking(kind: str, tensor: Tensor | None, op: str, group: Group) -> Carrier | None:
    """Get the group's carrier if it takes a tensor: see Note [Carriers] in `hp_platform.communication.carriers`."""
    carrier = carrier_of(group)
    return carrier if carrier is not None and carrier.takes(kind, tensor, op) else None


def _carry(
    carrier: Carrier,
    kind: str,
    output: Tensor | None,
    tensor: Tensor | None,
    group: Group,
    async_op: bool,
    op: str = "sum",
    received: Sequence[int] = (),
    sent: Sequence[int] = (),
    root: int = 0,
) -> Handle | None:
    """Issue a collective to a carrier, which averages by itself."""
    larger = output if kind == "all_gather" else tensor
    arguments = (kind, output, tensor, op, tuple(received), tuple(sent), root, async_op)
    return _issue(kind, larger, group, async_op, None, carrier.start, *arguments)


def _check_op(op: str, tensor: Tensor) -> bool:
    """Refuse a reduction that the numbers don't have; tell whether it is an average."""
    if op not in OPS:
        raise unknown_op(op, OPS)
    if tensor.is_complex():
        check_complex(op)
    elif op == "avg" and not tensor.is_floating_point():
        raise integer_average(tensor)
    return op == "avg"


def _issue(
    kind: str,
    counted: Tensor | None,
    group: Group,
    async_op: bool,
    averaged: Tensor | None,
    primitive: Callable[..., Handle | None],
    *args: Any,
) -> Handle | None:
    """Call a primitive that communicates, and wait for it or make the caller's handle.

    Args:
        kind: the collective, as observers and errors name it.
        counted: the tensor whose bytes observers are told; None is no bytes.
        group: the ranks that take part.
        async_op: return at once, with a handle.
        averaged: where a sum lands that is to become an average.
        primitive: called with ``args``.
        args: of the primitive.
    """
    backend, own = _primitives()
    recorder = flight.recorder
    done = noted = None
    if observers or recorder is not None:
        size = 0 if counted is None else counted.nbytes
        done = begin(kind, size, group) if observers else None
        if recorder is not None:  # see Note [Flight recorder]
            noted = recorder.begin(kind, size, group, args[1] if kind in ("send", "recv") else None)
    try:
        work = primitive(*args)
        if not async_op and work is not None:
            work.wait()
    except RuntimeError as error:
        backend.raise_if_lost(error, kind, group)
        raise
    if async_op:
        handle = _OVER if work is None else backend.pending(work, kind, group)
        if noted is not None and recorder is not None:
            handle = recorder.pending(handle, noted)
        if done:
            handle = Observed(handle, done)
        return handle if averaged is None else _Average(handle, averaged, own.size(group))
    if recorder is not None:
        recorder.end()
    if averaged is not None:
        backend.divide(averaged, own.size(group))
    if done:
        Observed(None, done).wait()
    return None
