"""RootContext: what the groups of one model share: orders, gathers ahead of time, reductions under way.

Note [Gradients of gradients]
    The graph of such a pass holds the unsharded parameters, so they stay gathered until the backward pass through it.
    That one may reach a parameter by the kept graph alone, past the hooks on the module's outputs. So each parameter
    gets a hook for its gradient, too, until the group is freed. And it may go on with the kept graph of a group whose
    own nodes have run: nodes are ordered by numbers that each of autograd's threads gives out by itself, and there is
    one for each device. So groups are freed at the end of that pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from hp_dtensor.torch.extend import arriving
from hp_fsdp.context import Context
from hp_fsdp.torch.group import ParameterGroup, Started

__all__ = [
    "LateGradients",
    "RootContext",
    "hsdp_sync_stream",
]

_engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]

_backward_id = torch._C._current_graph_task_id  # type: ignore[attr-defined]

_plain = torch._C.DisableTorchFunctionSubclass


class RootContext(Context[ParameterGroup]):
    """A context in which at most one group's gradients are being reduced, behind the computation of the next one.

    Attributes:
        several: the groups of several modules.
        reductions: those under way.
        advancing: reductions are being moved on, so gradients handed out.
        last_backward: the next backward waits for the reductions at its end.
        spare: how many reductions may be under way besides the one that starts.
        events: of the user's, to be waited for before the next forward gathers.
        differentiable: the backward pass under way keeps its graph.
        late: hooks on parameters that may get gradients through a graph that was kept: Note [Gradients of gradients].
        owed: the same where weights' gradients are put off: Note [Gradients put off].
    """

    def __init__(self, root: ParameterGroup) -> None:
        super().__init__(root)
        self.several: list[ParameterGroup] = []
        self.reductions: list[tuple[Started, ParameterGroup]] = []
        self.advancing = False
        self.last_backward = True
        self.spare = 0
        self.events: list[Any] = []
        self.differentiable = False
        self.late = LateGradients()
        self.owed = LateGradients()

    def named_modules(self) -> Iterable[tuple[str, nn.Module]]:
        return self.root.module.named_modules()

    def enrol(self) -> None:
        super().enrol()
        self.several = [group for group in self.groups if len(group.members) > 1]
        for group in self.groups:
            group.enter_backward = functools.partial(self.enter_backward, group)
            group.leave_backward = functools.partial(self.leave_backward, group)
        self.count_reductions()

    def count_reductions(self) -> None:
        """Follows how many reductions may be under way besides the one that starts."""
        self.spare = max(group.most_reductions for group in self.groups) - 1

    # ---- forward ----
    def begin_forward(self, group: ParameterGroup) -> None:
        while self.events:
            self.events.pop().wait()
        super().begin_forward(group)

    def end_forward(self) -> None:
        for group in self.several:
            if group.span is not None and group.span.open:  # some of its modules did not run
                group.span.close()
                if group.reshard_after_forward is not False:
                    group.reshard(before_backward=True)
        super().end_forward()

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

    # ---- backward ----
    def call_at_end(self) -> None:
        self.differentiable = torch.is_grad_enabled()  # in hooks: the pass is run with create_graph=True
        _engine.queue_callback(self.end_backward)

    def enter_backward(self, group: ParameterGroup, *_: Any) -> None:
        """The backward of ``group`` is about to begin."""
        if not group.in_backward:
            if not self.backward:
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
        self.backward = False
        if not self.differentiable:
            self.late.forget()
        if self.last_backward:
            self.drain(put_off=True)
        super().end_backward()

    def finish_group(self, group: ParameterGroup) -> None:
        """The gradients of ``group`` are there: takes them, frees its parameters, starts the reduction."""
        group.in_backward = False
        self.trace.append(("left", group, perf_counter_ns()))
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
            self.trace.append(("reduce", group, perf_counter_ns()))
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
                    self.trace.append(("reduced", group, perf_counter_ns()))
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
        if not self.backward and not self.advancing:
            self.drain()

    def settle(self) -> None:
        """Somebody looks at the parameters from outside: they find the sharded ones, and no half of a failed step."""
        if self.outermost is not None or _backward_id() != -1:
            return
        if self.backward:
            self.abandon()
        for group in self.groups:
            group.hide()

    def abandon(self) -> None:
        self.late.forget()
        for reduction, _ in self.reductions:
            reduction.abandon()
        self.reductions.clear()
        self.advancing = False
        arriving.pop(self, None)
        super().abandon()


def hsdp_sync_stream() -> None:
    """Waits for the reductions of all sharded models that are still under way, and hands out their gradients.

    They are where the last backward passes ran with ``set_is_last_backward(False)`` or ``hsdp(comm_async=True)``. An
    optimizer's step calls it, and to read or set ``.grad`` of a parameter waits, too: all ranks must do it, or call
    this, for with replicas a second reduction follows the first. On a device the host does not wait: the current stream
    does.
    """
    for context in list(arriving):
        context.drain()


class LateGradients:
    """Hooks on the unsharded parameters of groups whose backward pass kept its graph."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._watched: dict[ParameterGroup, list[Any]] = {}

    @property
    def watching(self) -> bool:
        """True from a pass that kept its graph until one that doesn't is over."""
        return bool(self._handles)

    def watch(self, group: ParameterGroup, arrived: Callable[..., None]) -> None:
        """Calls ``arrived`` when one of the group's parameters gets a gradient."""
        with _plain():
            for parameter in group.parameters:
                if parameter.trains and parameter.unsharded is not None:
                    self._handles.append(parameter.unsharded.register_post_accumulate_grad_hook(arrived))

    def watch_once(self, group: ParameterGroup, arrived: Callable[..., None]) -> None:
        """`watch`, unless the parameters that the group has now are watched already."""
        parameters = [parameter.unsharded for parameter in group.parameters]
        watched = self._watched.get(group, ())
        if len(watched) != len(parameters) or any(a is not b for a, b in zip(watched, parameters, strict=True)):
            self._watched[group] = parameters
            self.watch(group, arrived)

    def forget(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()
