"""Settings: what the setters of a sharded module change of its group, and of the group's part in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hp_fsdp.steps.order import ExecutionOrder, Span
from hp_fsdp.torch.groups.communication import Communication
from hp_fsdp.torch.steps.context import RootGroup


class Settings(Communication):
    """A group's communication, and its part in a step, as `hp_fsdp.module_api.ModuleAPI` sets them.

    Args:
        group: the group.
    """

    def __init__(self, group: RootGroup) -> None:
        super().__init__(group.axes)
        self.group = group
        self._reshard_after_forward: bool | None = None

    @staticmethod
    def of(group: RootGroup) -> Settings:
        """Return the settings of a group, which uses them in each step from now on."""
        settings = group.communication if isinstance(group.communication, Settings) else Settings(group)
        group.communicate_by(settings)
        return settings

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
