"""Communication: the user's settings of a group's gathers and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hp_fsdp.ranks.axes import DataAxes, ReduceScatterGroup
from hp_platform import collectives, get_platform


class Communication:
    """How a group gathers and reduces where the user has set it; a group without settings has none.

    Args:
        axes: the group's.

    Attributes:
        gather: torch's ``AllGather``, or None.
        scatter: torch's ``ReduceScatter``, or None.
        hook: called with reduced pieces, or None.
        stream: the stream for the hook; None for the current one.
        sums: reduce by sums only.
        separate_group: reduce-scatter in a separate process group.
    """

    def __init__(self, axes: DataAxes) -> None:
        self.axes = axes
        self.gather: Any = None
        self.scatter: Any = None
        self.hook: Callable[[torch.Tensor], None] | None = None
        self.stream: Any = None
        self.sums = False
        self.separate_group = False

    def all_gather(self, full: torch.Tensor, piece: torch.Tensor, group: Any) -> Any:
        """Start a gather; returns its handle."""
        if self.gather is None:
            return collectives.all_gather(full, piece, group=group, async_op=True)
        target = self.gather.allocate((full.numel(),), dtype=full.dtype, device=full.device)
        place, size = group.rank(), piece.numel()
        own = target[place * size : (place + 1) * size]
        own.copy_(piece)
        work = self.gather(output_tensor=target, input_tensor=own, group=group, async_op=True)
        return _CopyBack(work, (target, own), lambda: full.copy_(target))

    def reduce_scatter(self, buffer: torch.Tensor, size: int, op: str, axes: DataAxes) -> tuple[torch.Tensor, Any]:
        """Start a reduction; returns the piece that is to be filled, and a handle."""
        group = ReduceScatterGroup.of(axes).group if self.separate_group else axes.shard_group
        if self.scatter is None:
            piece = torch.empty(size, dtype=buffer.dtype, device=buffer.device)
            return piece, collectives.reduce_scatter(piece, buffer, op, group=group, async_op=True)
        assert op == "sum"
        source = self.scatter.allocate((buffer.numel(),), dtype=buffer.dtype, device=buffer.device)
        piece = self.scatter.allocate((size,), dtype=buffer.dtype, device=buffer.device)
        source.copy_(buffer)
        work = self.scatter(output_tensor=piece, input_tensor=source, group=group, op=dist.ReduceOp.SUM, async_op=True)
        return piece, _CopyBack(work, (source, piece), None)

    def operation(self, op: str, divisor: float | None, axes: DataAxes) -> tuple[str, float | None]:
        """Return the operation to reduce with, and the divisor of its result."""
        if op == "avg" and (self.sums or self.scatter is not None):
            return "sum", axes.shard_size * axes.replicate_size * (1.0 if divisor is None else divisor)
        return op, divisor

    def run_hook(self, piece: torch.Tensor) -> None:
        """Run the user's hook, which reduces a piece over further ranks."""
        if self.hook is None:
            return
        if self.stream is None:
            self.hook(piece)
            return
        devices = get_platform().devices
        module = devices.device_module()
        self.stream.wait_stream(module.current_stream())
        with module.stream(self.stream):
            self.hook(piece)
        module.current_stream().wait_stream(self.stream)


class _CopyBack:
    """A collective of the user's, and the work after it."""

    def __init__(self, work: Any, tensors: Sequence[torch.Tensor], land: Callable[[], Any] | None) -> None:
        self._work, self._tensors, self._land = work, tensors, land

    def wait(self) -> None:
        """Wait for the collective, and use its result."""
        if self._work is not None:
            self._work.wait()
        if self._land is not None:
            with torch.no_grad():
                self._land()
        self._land = None
