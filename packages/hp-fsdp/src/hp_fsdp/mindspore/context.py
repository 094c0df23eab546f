"""RootContext: what the groups of one model share: orders, gathers ahead of time, the backward pass under way."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from mindspore import _no_grad
from mindspore.graph.api import _pynative_executor

from hp_dtensor.mindspore.extend import own_dtypes
from hp_fsdp.agreement import check_alike
from hp_fsdp.joining import Roster, inner_mesh
from hp_fsdp.micro_batches import check_modes
from hp_fsdp.mindspore.agreement import largest
from hp_fsdp.mindspore.group import ParameterGroup
from hp_fsdp.mindspore.unsharding import Call
from hp_fsdp.order import ExecutionOrder

__all__ = ["RootContext", "hsdp_sync_stream", "in_backward"]

Moment = tuple[str, ParameterGroup | None, int]


def in_backward() -> bool:
    """Tell whether a backward pass is running."""
    return _pynative_executor.get_current_autodiff_engine_id() != -1


class RootContext:
    """Made by the first forward of the outermost sharded Cell, for that Cell and all groups inside it.

    Where gathers run beside the computation, the group that ran next in the last pass is gathered ahead of time, so
    that at most two are gathered at once (besides those that stay so).

    Args:
        root: the outermost group.
        group_of: gives a Cell's group, or None.

    Attributes:
        groups: all groups, the root too, outer before inner.
        roster: notices what joined the model since the last forward.
        compared: all ranks were seen to have sharded the same model.
        moments: what happened in the pass under way, see `hp_fsdp.timeline`: kind, group, nanoseconds of a clock.
        last_moments: the same of the last forward and backward that came to their end.
    """

    def __init__(self, root: ParameterGroup, group_of: Any) -> None:
        self.root = root
        self.group_of = group_of
        self.groups: list[ParameterGroup] = []
        self.compared = False
        self.order: ExecutionOrder[ParameterGroup] = ExecutionOrder()
        self.backward_order: ExecutionOrder[ParameterGroup] = ExecutionOrder()
        self.finished: list[ParameterGroup] = []
        self.outermost: ParameterGroup | None = None
        self.backward = False
        self.ahead: list[ParameterGroup] = []
        self.moments: list[Moment] = []
        self.last_moments: list[Moment] = []

    def note(self, kind: str, group: ParameterGroup | None = None) -> None:
        """Takes note of a moment."""
        self.moments.append((kind, group, perf_counter_ns()))

    @staticmethod
    def of(root: ParameterGroup, group_of: Any) -> RootContext:
        """The context of the model under ``root``; replaces those of parts of it that ran on their own before.

        Args:
            root: the outermost group.
            group_of: gives a Cell's group, or None.
        """
        context = RootContext(root, group_of)
        context.enrol()
        return context

    def enrol(self) -> None:
        """Finds the groups of the model, and shards parameters that no group has: Note [What joins later].

        Raises:
            ValueError, TypeError, RuntimeError: a parameter that can't be taken in.
        """
        cells = {id(cell): cell for _, cell in self.root.module.cells_and_names()}
        groups = [group for cell in cells.values() if (group := self.group_of(cell)) is not None]
        check_modes(groups)
        ignored = [parameter for group in groups for parameter in group.ignored]
        inner = inner_mesh(groups)
        with _no_grad(), own_dtypes():
            joined = [g.take_in(ignored, lambda cell: self.group_of(cell) is not None, inner) for g in groups]
        if any(joined) or groups != self.groups:
            self.compared = False
        self.groups = groups
        for name, cell in self.root.module.cells_and_names():
            # Done by a Cell's first call otherwise, which finds unsharded tensors where it expects Parameters.
            if not (cell._init_flag or cell._is_check_and_refresh):
                cell._self_check()
                cell._init_flag = True
            group = self.group_of(cell)
            if group is not None:
                group.name = name or group.class_name
                group.context = self
                group.modules = (group.module, self.root.module)
        known = [each for g in groups for each in (*g.standing, *(p.parameter for p in g.parameters))]
        self.roster = Roster(cells.values(), [*known, *ignored], ("_params", "_cells"))

    # ---- forward ----
    def begin_forward(self, group: ParameterGroup, again: bool) -> None:
        """The forward of ``group``, inside no other group's, begins.

        Args:
            group: the group.
            again: it runs inside a backward pass, which recomputes.
        """
        self.outermost = group
        if again:
            return
        if self.backward:  # a backward pass that raised never came to its end
            self.abandon()
        self.outermost = None
        if not self.roster.complete():
            self.enrol()
        if not self.compared:
            check_alike(self.groups, self.root.axes, largest)
            self.compared = True
        self.outermost = group
        for each in self.groups:
            each.drop_near()
            # Parameters have no version that tells of an optimizer's step, so what was kept is gathered anew.
            if each.gathering is not None or (each.unsharded and not (each.pinned or each.carried)):
                each.reshard()
        self.moments = []
        self.order.start()
        self.finished.clear()

    def end_forward(self) -> None:
        """The outermost forward is over."""
        self.outermost = None
        self.drop_ahead()

    def unshard(
        self, group: ParameterGroup, order: ExecutionOrder[ParameterGroup], chosen: list[ParameterGroup]
    ) -> None:
        """Makes the parameters of ``group`` ready, and starts to gather what comes after it.

        Args:
            group: what computes now.
            order: predicts what comes next.
            chosen: what the user says comes next, if they did.
        """
        coming = order.visit(group)
        group.start_unshard()
        self.note("wait", group)
        if group in self.ahead:
            self.ahead.remove(group)
        if group.overlaps:
            for each in chosen or (() if coming is None else (coming,)):
                if not each.unsharded and each.gathering is None:
                    each.start_unshard()
                    self.ahead.append(each)
        group.finish_unshard()
        self.note("run", group)

    def drop_ahead(self) -> None:
        """Frees what was gathered ahead of time and then not used."""
        while self.ahead:
            self.ahead.pop().reshard()

    # ---- backward ----
    def enter_backward(self, call: Call) -> None:
        """The backward of ``call`` is about to begin: a gradient has come to one of its outputs."""
        group = call.group
        if call.done or call in group.active:
            return
        if not self.backward:
            self.backward = True
            self.note("backward")
            _pynative_executor.queue_backward_final_callback(self.end_backward)
            if not self.backward_order.known:
                self.backward_order.start(list(reversed(self.finished)))
        first = not group.active
        group.active.add(call)
        self.unshard(group, self.backward_order, group.prefetch_in_backward)
        if first:
            group.show_again()

    def end_backward(self) -> None:
        """The backward pass is over, for the groups, too, whose gradients did not all come.

        Raises:
            RuntimeError: in deterministic mode, a sum that could not be returned; see `ParameterGroup.end_micro_batch`.
        """
        for group in self.groups:
            for call in group.active:
                call.done = True
            if group.active:
                group.end_backward()
        self.drop_ahead()
        self.backward = False
        self.backward_order.start()
        self.note("end")
        self.last_moments, self.moments = self.moments, []
        errors = [error for group in self.groups if group.deterministic and (error := group.end_micro_batch())]
        if errors:
            raise RuntimeError(errors[0])

    def abandon(self) -> None:
        """Back to the state between steps after an error."""
        self.outermost = None
        self.backward = False
        self.ahead.clear()
        for group in self.groups:
            group.abandon()
        self.backward_order.start()


def hsdp_sync_stream() -> None:
    """Waits for the reductions of all sharded models that are still under way: on MindSpore none are.

    A backward pass waits for its reductions where it starts them, for it returns their results.
    """
