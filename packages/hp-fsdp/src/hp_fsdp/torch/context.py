"""RootContext: what the groups of one model share: orders, gathers ahead of time, reductions under way."""

from __future__ import annotations

import functools
from time import perf_counter_ns
from typing import Any

import torch

from hp_dtensor.torch.extend import arriving
from hp_fsdp.agreement import check_alike
from hp_fsdp.joining import Roster, inner_mesh
from hp_fsdp.micro_batches import check_modes
from hp_fsdp.order import ExecutionOrder
from hp_fsdp.several import check_inside, several_outermost
from hp_fsdp.torch.agreement import largest
from hp_fsdp.torch.group import ParameterGroup, Started
from hp_fsdp.torch.higher_order import LateGradients

__all__ = ["RootContext", "hsdp_sync_stream"]

_engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
_backward_id = torch._C._current_graph_task_id  # type: ignore[attr-defined]
_plain = torch._C.DisableTorchFunctionSubclass
Moment = tuple[str, ParameterGroup | None, int]


class RootContext:
    """Made by the first forward of the outermost sharded module, for that module and all groups inside it.

    At most two groups are gathered at a time (besides those that stay so): the one that computes, and the one that
    the last pass ran after it. At most one group's gradients are being reduced, behind the computation of the next one.

    Args:
        root: the outermost group.
        group_of: gives a module's group, or None.

    Attributes:
        groups: all groups, the root too, outer before inner.
        several: those of several modules.
        roster: notices what joined the model since the last forward.
        advancing: reductions are being moved on, so gradients handed out.
        spare: how many reductions may be under way besides the one that starts.
        events: of the user's, to be waited for before the next forward gathers.
        moments: what happened in the pass under way, see `hp_fsdp.timeline`: kind, group, nanoseconds of a clock.
        last_moments: the same of the last forward and backward that came to their end.
    """

    def __init__(self, root: ParameterGroup, group_of: Any) -> None:
        self.root = root
        self.group_of = group_of
        self.groups: list[ParameterGroup] = []
        self.several: list[ParameterGroup] = []
        self.order: ExecutionOrder[ParameterGroup] = ExecutionOrder()
        self.backward_order: ExecutionOrder[ParameterGroup] = ExecutionOrder()
        self.finished: list[ParameterGroup] = []
        self.outermost: ParameterGroup | None = None
        self.backward: int | None = None
        self.ahead: list[ParameterGroup] = []
        self.reductions: list[tuple[Started, ParameterGroup]] = []
        self.advancing = False
        self.last_backward = True
        self.spare = 0
        self.events: list[Any] = []
        self.differentiable = False
        self.late = LateGradients()
        self.owed = LateGradients()
        self.compared = False
        self.moments: list[Moment] = []
        self.last_moments: list[Moment] = []

    @staticmethod
    def of(root: ParameterGroup, group_of: Any) -> RootContext:
        """The context of the model under ``root``; replaces those of parts of it that ran on their own before.

        Args:
            root: the outermost group.
            group_of: gives a module's group, or None.
        """
        context = RootContext(root, group_of)
        context.enrol()
        return context

    def enrol(self) -> None:
        """Finds the groups of the model, and shards parameters that no group has: Note [What joins later].

        Raises:
            ValueError, TypeError, RuntimeError: a parameter that can't be taken in.
        """
        if len(self.root.members) > 1:
            raise RuntimeError(several_outermost([type(module).__name__ for module in self.root.members]))
        names = {id(module): name for name, module in self.root.module.named_modules()}
        modules = list(self.root.module.modules())
        groups = list(dict.fromkeys(group for each in modules if (group := self.group_of(each)) is not None))
        for group in groups:
            check_inside(group.members, names, type(self.root.module).__name__)
            group.rename(", ".join(names[id(module)] for module in group.members))
        check_modes(groups)
        for group in groups:
            group.check()
        ignored = [parameter for group in groups for parameter in group.ignored]
        inner = inner_mesh(groups)
        joined = [g.take_in(ignored, lambda module: self.group_of(module) is not None, inner) for g in groups]
        if any(joined) or groups != self.groups:
            self.compared = False
        self.groups = groups
        self.several = [group for group in groups if len(group.members) > 1]
        for group in groups:
            group.context = self
            group.modules = (*group.members, self.root.module)
            group.enter_backward = functools.partial(self.enter_backward, group)
            group.leave_backward = functools.partial(self.leave_backward, group)
        tensors = [tensor for group in groups for tensor, _ in group.stand_ins()]
        self.roster = Roster(modules, [*tensors, *ignored], ("_parameters", "_modules"))
        self.count_reductions()

    def count_reductions(self) -> None:
        """Follows how many reductions may be under way besides the one that starts."""
        self.spare = max(group.most_reductions for group in self.groups) - 1

    # ---- forward ----
    def begin_forward(self, group: ParameterGroup) -> None:
        """The forward of ``group``, inside no other group's, begins."""
        if self.backward is not None:  # a backward pass that raised never came to its end
            self.abandon()
        if not self.roster.complete():
            self.enrol()
        if not self.compared:
            check_alike(self.groups, self.root.axes, largest)
            self.compared = True
        for each in self.groups:
            each.drop_near()
            each.check()
            if (each.unsharded or each.gathering is not None) and each.stale():
                each.reshard()
        while self.events:
            self.events.pop().wait()
        self.outermost = group
        self.moments = []
        self.order = group.order
        self.order.start()
        self.finished.clear()

    def end_forward(self) -> None:
        """The outermost forward is over."""
        self.outermost = None
        for group in self.several:
            if group.span is not None and group.span.open:  # some of its modules did not run
                group.span.close()
                if group.reshard_after_forward is not False:
                    group.reshard(before_backward=True)
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
        self.moments.append(("wait", group, perf_counter_ns()))
        if self.ahead and group in self.ahead:
            self.ahead.remove(group)
        for each in chosen or (() if coming is None else (coming,)):
            if not each.unsharded and each.gathering is None:
                each.start_unshard()
                self.ahead.append(each)
        group.finish_unshard()
        self.moments.append(("run", group, perf_counter_ns()))

    def expect_owed(self, group: ParameterGroup) -> None:
        """The forward of ``group`` runs in a frame that puts the weights' gradients off: Note [Gradients put off].

        Raises:
            NotImplementedError: the group is deterministic.
        """
        if group.deterministic:
            raise NotImplementedError(
                f"fully_shard(deterministic=True): {group.name} runs in a frame that puts its weights' gradients off"
                " (hp_platform.frames), and they would count as a micro-batch of their own. Shard it without"
                " deterministic=True"
            )
        self.owed.watch_once(group, functools.partial(self.late_gradient, group))

    def drop_ahead(self) -> None:
        """Frees what was gathered ahead of time and then not used."""
        while self.ahead:
            self.ahead.pop().reshard()

    # ---- backward ----
    def begin_backward(self) -> None:
        """The first hook of a backward pass: arranges for the last."""
        if self.backward is not None:
            return
        self.backward = _backward_id()
        self.differentiable = torch.is_grad_enabled()  # in hooks: the pass is run with create_graph=True
        self.moments.append(("backward", None, perf_counter_ns()))
        _engine.queue_callback(self.end_backward)
        if not self.backward_order.known:
            self.backward_order.start([group for group in reversed(self.finished) if group.unshard_in_backward])

    def enter_backward(self, group: ParameterGroup, *_: Any) -> None:
        """The backward of ``group`` is about to begin."""
        if not group.in_backward:
            self.begin_backward()
            group.in_backward = True
            if group.unshard_in_backward:
                self.unshard(group, self.backward_order, group.prefetch_in_backward)

    def leave_backward(self, group: ParameterGroup, *_: Any) -> None:
        """The gradient has left ``group`` through one of its inputs."""
        if group.in_backward and not self.late.watching:  # else a kept graph may need its parameters yet
            self.finish_group(group)

    def late_gradient(self, group: ParameterGroup, *_: Any) -> None:
        """A parameter got a gradient through the graph of a pass before: Note [Gradients of gradients]."""
        if not group.in_backward:
            self.begin_backward()
            group.in_backward = True

    def end_backward(self) -> None:
        """The backward pass is over: the groups whose inputs needed no gradient, and the last reductions."""
        for group in reversed(self.groups):
            if group.in_backward:
                self.finish_group(group)
        for group in reversed(self.groups):
            if group.deterministic and not group.ended:
                self.advance()
                self.end_micro_batch(group)
            group.ended = False
        for group in reversed(self.groups):
            if group.reduces_at_end:
                if group.reshard_after_backward:
                    group.reshard()
                if group.reduces:
                    self.started(group, group.reduce())
        self.drop_ahead()
        self.backward = None
        if not self.differentiable:
            self.late.forget()
        self.backward_order.start()
        if self.last_backward:
            self.drain(put_off=True)
        self.moments.append(("end", None, perf_counter_ns()))
        self.last_moments, self.moments = self.moments, []

    def finish_group(self, group: ParameterGroup) -> None:
        """The gradients of ``group`` are there: takes them, frees its parameters, starts the reduction."""
        group.in_backward = False
        self.moments.append(("left", group, perf_counter_ns()))
        if not group.reduces_at_end:  # not on all ranks at this moment
            self.advance(self.spare)
        group.collect(differentiable=self.differentiable)
        if self.differentiable:
            self.late.watch(group, functools.partial(self.late_gradient, group))
        if group.deterministic:
            if not group.calls:
                self.end_micro_batch(group)
        elif group.reduces and not group.reduces_at_end:
            self.started(group, group.reduce())

    def end_micro_batch(self, group: ParameterGroup) -> None:
        """In deterministic mode, the gradients of this backward pass for ``group`` are complete."""
        self.started(group, group.end_micro_batch(self.last_backward))

    def started(self, group: ParameterGroup, reductions: list[Started]) -> None:
        """Takes note of reductions that were started."""
        if reductions:
            self.moments.append(("reduce", group, perf_counter_ns()))
            self.reductions += [(reduction, group) for reduction in reductions]
            # In the order of backward passes, which all ranks share: what is advanced may start a collective.
            arriving[self] = self.bring_gradients

    def advance(self, spare: int = 0) -> None:
        """Moves each reduction under way one step on.

        Args:
            spare: leave those of that many groups, the last ones, alone.
        """
        if not self.reductions:
            return
        self.advancing = True
        left = []
        last = set(list(dict.fromkeys(id(group) for _, group in self.reductions))[-spare:]) if spare else ()
        with torch.no_grad(), _plain():
            for each in self.reductions:
                reduction, group = each
                if id(group) in last or not reduction.advance():
                    left.append(each)
                else:
                    self.moments.append(("reduced", group, perf_counter_ns()))
        self.reductions, self.advancing = left, False
        if not left:
            arriving.pop(self, None)

    def drain(self, *, put_off: bool = False) -> None:
        """Waits for the reductions under way.

        Args:
            put_off: leave those of groups that don't wait for them at the end of a backward pass.
        """
        while any(group.waits or not put_off for _, group in self.reductions):
            self.advance()

    def bring_gradients(self) -> None:
        """Somebody reads or sets a gradient; in a backward pass, and in hooks, it is what it is."""
        if self.backward is None and not self.advancing:
            self.drain()

    def settle(self) -> None:
        """Somebody looks at the parameters from outside: they find the sharded ones, and no half of a failed step."""
        if self.outermost is not None or _backward_id() != -1:
            return
        if self.backward is not None:
            self.abandon()
        for group in self.groups:
            group.hide()

    def abandon(self) -> None:
        """Back to the state between steps after an error."""
        self.outermost = None
        self.backward = None
        self.late.forget()
        for reduction, _ in self.reductions:
            reduction.abandon()
        self.reductions.clear()
        self.advancing = False
        arriving.pop(self, None)
        self.ahead.clear()
        for group in self.groups:
            group.abandon()
        self.backward_order.start()


def hsdp_sync_stream() -> None:
    """Waits for the reductions of all sharded models that are still under way, and hands out their gradients.

    They are where the last backward passes ran with ``set_is_last_backward(False)`` or ``hsdp(comm_async=True)``. An
    optimizer's step calls it, and to read or set ``.grad`` of a parameter waits, too: all ranks must do it, or call
    this, for with replicas a second reduction follows the first. On a device the host does not wait: the current stream
    does.
    """
    for context in list(arriving):
        context.drain()
