"""Communication of a group: the user's settings of its gathers and reductions, and copies to and from the host.

Note [Copy stream]
    Copies run on a stream of their own, which first waits for the work issued so far on the current stream, as
    collectives do. So gathers ahead of time are copied and gathered while the previous module computes, and gradients
    come back while the next ones are computed. On CPU the host is the device, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hp_dtensor import DeviceMesh
from hp_fsdp.axes import DataAxes, ReduceScatterGroup
from hp_platform import collectives, get_platform
from hp_platform.extend import CopyLink
from hp_platform.torch.devices import empty_on_host


class Communication:
    """How a group gathers and reduces where the user has set it; a group without settings has none.

    Args:
        axes: the group's.

    Attributes:
        gather: torch's ``AllGather``, or None.
        scatter: torch's ``ReduceScatter``, or None.
        replicas: reduces pieces over the replicate axis, as `collectives.all_reduce` does, or None.
        hook: called with reduced pieces, or None.
        stream: the stream for the hook; None for the current one.
        sums: reduce by sums only.
        separate_group: reduce-scatter in a separate process group.
    """

    def __init__(self, axes: DataAxes) -> None:
        self.axes = axes
        self.gather: Any = None
        self.scatter: Any = None
        self.replicas: Callable[..., Any] | None = None
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

    def all_reduce(self, piece: torch.Tensor, op: str, *, group: Any, async_op: bool) -> Any:
        """Start the reduction of a piece over the replicate axis; returns its handle."""
        return (self.replicas or collectives.all_reduce)(piece, op=op, group=group, async_op=async_op)

    def operation(self, op: str, divisor: float | None, axes: DataAxes) -> tuple[str, float | None]:
        """Return the operation to reduce with, and the divisor of its result."""
        if op == "avg" and (self.sums or self.scatter is not None):
            return "sum", axes.ranks * (1.0 if divisor is None else divisor)
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


_streams: dict[torch.device, Any] = {}


def transport(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this process communicates over ``mesh``."""
    devices = get_platform().devices
    return devices.host_device() if mesh.device_type == "cpu" else devices.current_device()


def on_copy_stream(
    device: torch.device, link: CopyLink | None = None, *, out: bool = False
) -> AbstractContextManager[Any]:
    """Issue work on the copy stream, after the work of the current stream: Note [Copy stream]. No effect on CPU.

    Args:
        device: of the copies.
        link: whose streams to use; None uses this package's own.
        out: the copies go to the host.
    """
    if device.type == "cpu":
        return nullcontext()
    devices = get_platform().devices
    module = devices.device_module()
    stream = _streams.get(device) if link is None else link.streams[0 if out else 1]
    if stream is None:
        stream = _streams[device] = devices.stream()
    stream.wait_stream(module.current_stream())
    return module.stream(stream)


class D2HCopy:
    """A copy from the device to the host under way.

    Args:
        tensor: the source; kept until the copy is over.
        pin: see `hp_platform.torch.devices.empty_on_host`.
        then: called with the copy when it is done.
        link: see `on_copy_stream`.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        pin: bool,
        then: Callable[[torch.Tensor], None],
        link: CopyLink | None = None,
    ) -> None:
        self._tensor = tensor
        self._then = then
        self._copy = empty_on_host(tensor.numel(), tensor.dtype, pin=pin)
        with on_copy_stream(tensor.device, link, out=True):
            self._copy.copy_(tensor, non_blocking=True)
            devices = get_platform().devices
            self._event = devices.device_module().Event()
            self._event.record()

    def wait(self) -> None:
        """Wait for the copy, and call ``then``."""
        self._event.synchronize()
        self._then(self._copy)
