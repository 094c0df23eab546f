"""Collectives of a backend that has them all: `mindspore.mint.distributed` on hccl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore.mint import distributed as dist

from hp_platform.mindspore import groups
from hp_platform.port import Handle

_NAMES = {"product": "prod"}


def all_reduce(tensor: Any, op: str, group: str, async_op: bool) -> Handle | None:
    """Reduce in place."""
    return dist.all_reduce(tensor, _NAMES.get(op, op), group, async_op)


def all_gather(output: Any, tensor: Any, group: str, async_op: bool) -> Handle | None:
    """Concatenate each rank's tensor."""
    return dist.all_gather_into_tensor(output.view(-1), tensor.view(-1), group, async_op)


def reduce_scatter(output: Any, tensor: Any, op: str, group: str, async_op: bool) -> Handle | None:
    """Reduce and keep this rank's piece."""
    return dist.reduce_scatter_tensor(output.view(-1), tensor.view(-1), _NAMES.get(op, op), group, async_op)


def all_to_all(
    output: Any, tensor: Any, received: Sequence[int], sent: Sequence[int], group: str, async_op: bool
) -> Handle | None:
    """Exchange pieces of dim 0; no sizes are equal ones."""
    return dist.all_to_all_single(output, tensor, list(received) or None, list(sent) or None, group, async_op)


def broadcast(tensor: Any, group_src: int, group: str, async_op: bool) -> Handle | None:
    """Copy from one rank, which MindSpore wants by its global rank."""
    return dist.broadcast(tensor, groups.members(group)[group_src], group, async_op)


def send(tensor: Any, dst: int, group: str, tag: int, async_op: bool) -> Handle | None:
    """Send to one rank, which MindSpore wants by its global rank; hccl has no tags."""
    if async_op:
        return dist.isend(tensor, groups.members(group)[dst], group)
    dist.send(tensor, groups.members(group)[dst], group)
    return None


def recv(tensor: Any, src: int, group: str, tag: int, async_op: bool) -> Handle | None:
    """Receive from one rank, which MindSpore wants by its global rank; hccl has no tags."""
    if async_op:
        return dist.irecv(tensor, groups.members(group)[src], group)
    dist.recv(tensor, groups.members(group)[src], group)
    return None


def barrier(group: str) -> None:
    """Wait for all ranks."""
    dist.barrier(group)
