"""Reductions of dtypes that hccl does not reduce: gather all tensors and reduce them in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hp_platform.port import Handle

ProcessGroup = dist.ProcessGroup

# Dtypes that ProcessGroupHCCL refuses to reduce but does send.
NOT_ALL_REDUCED = frozenset({torch.float64})
NOT_REDUCE_SCATTERED = frozenset({torch.float64, torch.uint8, torch.bool})

_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
_GATHER = c10d.AllgatherOptions()
_EXCHANGE = c10d.AllToAllOptions()
_GATHER.asyncOp = _EXCHANGE.asyncOp = True


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


def all_reduce(tensor: torch.Tensor, op: str, group: ProcessGroup) -> Handle:
    """Gather every rank's tensor; its place takes their reduction when the handle is waited for.

    It takes the memory of all ranks' tensors.
    """
    flat = tensor.view(-1)
    parts = tensor.new_empty(group.size(), flat.numel())
    return _Parts(group._allgather_base(parts.view(-1), flat, _GATHER), parts, flat, op)


def reduce_scatter(output: torch.Tensor, tensor: torch.Tensor, op: str, group: ProcessGroup) -> Handle:
    """Exchange the pieces; the output takes their reduction when the handle is waited for."""
    flat = output.view(-1)
    parts = output.new_empty(group.size(), flat.numel())
    return _Parts(group.alltoall_base(parts.view(-1), tensor.view(-1), [], [], _EXCHANGE), parts, flat, op)
