"""Communication: the user's settings of a group's gathers and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hp_fsdp.ranks.axes import DataAxes, Separate
from hp_fsdp.steps.order import ExecutionOrder, Span
from hp_platform import collectives, get_platform

if TYPE_CHECKING:
    from hp_fsdp.torch.groups.group import ParameterGroup


class Communication:
    """Settings of a group's communication, by `hp_fsdp.module_api.ModuleAPI`; a group without any has none.

    Args:
        group: the group.

    Attributes:
        gather: torch's ``AllGather``, or None.
        scatter: torch's ``ReduceScatter``, or None.
        hook: called with reduced pieces, or None.
        stream: the stream for the hook; None for the current one.
        sums: reduce by sums only.
        separate_group: reduce-scatter in a separate process group.
    """

    def __init__(self, group: ParameterGroup) -> None:
        self.group = group
        self.axes = group.axes
        self.gather: Any = None
        self.scatter: Any = None
        self.hook: Callable[[torch.Tensor], None] | None = None
        self.stream: Any = None
        self.sums = False
        self.separate_group = False
        self._reshard_after_forward: bool | None = None

    @staticmethod
    def of(group: ParameterGroup) -> Communication:
        """Return the settings of a group, which uses them in each step from now on."""
        settings = group.communication = group.communication or Communication(group)
        for bucket in group.buckets:
            bucket.communication = settings
            if bucket.prepared:
                bucket.gradients.communication = settings
        return settings

    # ---- collectives ----
    def all_gather(self, full: torch.Tensor, piece: torch.Tensor, group: Any) -> Any:
        """Start a gather; returns its handle."""
        if self.gather is None:
            return collectives.all_gather(full, piece, group=group, async_op=True)
        target = self.gather.allocate((full.numel(),), dtype=full.dtype, device=full.device)
        place, size = group.rank(), piece.numel()
        own = target[place * size : (place + 1) * size]
        own.copy_(piece)
        work = self.gather(output_tensor=target, input_tensor=own, group=group, async_op=True)
        return _Landing(work, (target, own), lambda: full.copy_(target))

    def reduce_scatter(self, buffer: torch.Tensor, size: int, op: str, axes: DataAxes) -> tuple[torch.Tensor, Any]:
        """Start a reduction; returns the piece that is to be filled, and a handle."""
        group = Separate.of(axes).group if self.separate_group else axes.shard_group
        if self.scatter is None:
            piece = torch.empty(size, dtype=buffer.dtype, device=buffer.device)
            return piece, collectives.reduce_scatter(piece, buffer, op, group=group, async_op=True)
        assert op == "sum"
        source = self.scatter.allocate((buffer.numel(),), dtype=buffer.dtype, device=buffer.device)
        piece = self.scatter.allocate((size,), dtype=buffer.dtype, device=buffer.device)
        source.copy_(buffer)
        work = self.scatter(output_tensor=piece, input_tensor=source, group=group, op=dist.ReduceOp.SUM, async_op=True)
        return piece, _Landing(work, (source, piece), None)

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

    # ---- backward ----
    def set_unshard_in_backward(self, unshard: bool) -> None:
        """Set the group's part; see `hp_fsdp.module_api.ModuleAPI`."""
        self.group.unshard_in_backward = unshard
        if self.group.context is not None:
            self.group.context.backward_order = ExecutionOrder()  # the recorded order may gather it ahead
        several = len(self.group.members) > 1
        self.group.span = (
            Span(self.group.members if several else (), None if unshard else self._around)
            if several or not unshard
            else None
        )

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, self._check_saved):
                return forward(*args, **kwargs)

        return run

    def _check_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Raise if backward needs a parameter whose memory was freed after forward."""
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.nbytes() == 0:
            for bucket in self.group.buckets:
                for parameter, offset in zip(bucket.parameters, bucket.layout.offsets):
                    if bucket.full_storage._cdata == storage._cdata and offset == tensor.storage_offset():
                        raise RuntimeError(
                            f"set_unshard_in_backward(False): backward needs parameter {parameter.name!r} of"
                            f" {self.group.name}, which was freed after forward. Leave it True for this module"
                        )
        return tensor

    def reduce_at_end(self, enable: bool) -> None:
        """Set the group's part; see `ModuleAPI.set_reduce_scatter_unused_params`."""
        group = self.group
        if enable is group.reduces_at_end:
            return
        group.reduces_at_end = enable
        group.unshard_in_backward = not enable
        if enable:
            self._reshard_after_forward, group.reshard_after_forward = group.reshard_after_forward, False
        else:
            group.reshard_after_forward = self._reshard_after_forward

    # ---- the model ----
    def set_most_reductions(self, number: int) -> None:
        """Set the group's part; see `ModuleAPI.set_reduce_scatter_max_input_buffers`."""
        self.group.most_reductions = number
        if self.group.context is not None:
            self.group.context.count_reductions()

    def set_post_optim_event(self, event: Any) -> None:
        """Set the group's part; see `hp_fsdp.module_api.ModuleAPI`."""
        assert self.group.context is not None
        self.group.context.events.append(event)

    def reset_iter_state(self) -> None:
        """Set the group's part; see `hp_fsdp.module_api.ModuleAPI`."""
        context = self.group.context
        assert context is not None
        if context.root is not self.group:
            raise RuntimeError(
                f"reset_iter_state: {self.group.name} is inside of another sharded module. Call it on the outermost"
                f" one, {context.root.class_name}"
            )
        context.abandon()


class _Landing:
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
