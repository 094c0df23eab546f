"""RootContext: the shared state of the groups of one model: orders, gathers ahead of time, the backward pass."""

from __future__ import annotations

from collections.abc import Iterable

from mindspore import _no_grad, nn
from mindspore.graph.api import _pynative_executor

from hp_dtensor.mindspore.extend import own_dtypes
from hp_fsdp.mindspore.groups.gradients import Call
from hp_fsdp.mindspore.groups.group import ParameterGroup
from hp_fsdp.steps.context import Context


def in_backward() -> bool:
    """Tell whether a backward pass is running."""
    return _pynative_executor.get_current_autodiff_engine_id() != -1


class RootContext(Context[ParameterGroup]):
    """A context in which each backward pass returns its gradients, so that no reductions are under way after it."""

    def named_modules(self) -> Iterable[tuple[str, nn.Cell]]:
        return self.root.module.cells_and_names()

    def enrol(self) -> None:
        with _no_grad(), own_dtypes():
            super().enrol()
        for _, cell in self.named_modules():
            # Done by a Cell's first call otherwise, which finds unsharded tensors where it expects Parameters.
            if not (cell._init_flag or cell._is_check_and_refresh):
                cell._self_check()
                cell._init_flag = True

    def call_at_end(self) -> None:
        _pynative_executor.queue_backward_final_callback(self.end_backward)

    def enter_backward(self, call: Call) -> None:
        """Begin the backward of ``call``: a gradient has arrived at one of its outputs."""
        group = call.group
        if call.done or call in group.active:
            return
        self.begin_backward()
        first = not group.active
        group.active.add(call)
        self.unshard(group, self.backward_order, group.prefetch_in_backward)
        if first:
            group.show_again()

    def end_backward(self) -> None:
        """End the backward pass, including groups that are missing some gradients.

        Raises:
            RuntimeError: in deterministic mode, a sum that could not be returned; see `ParameterGroup.end_micro_batch`.
        """
        for group in self.groups:
            for call in group.active:
                call.done = True
            if group.active:
                group.end_backward()
        super().end_backward()
        errors = [error for group in self.groups if group.deterministic and (error := group.end_micro_batch())]
        if errors:
            raise RuntimeError(errors[0])


def hsdp_sync_stream() -> None:
    """Wait for the reductions of all sharded models that are still under way: on MindSpore none are.

    A backward pass returns its gradients, so it waits for each reduction that it starts.
    """
