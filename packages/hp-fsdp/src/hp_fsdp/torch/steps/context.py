"""RootContext: the shared state of the groups of one model: orders, gathers ahead of time, reductions under way.

Note [Gradients of gradients]
    The graph of a pass with ``create_graph=True``, as for a gradient penalty, holds the unsharded parameters, so they
    stay gathered until the backward pass through it. That pass may reach a parameter by the kept graph alone, past the
    hooks on the module's outputs. So each parameter has a hook for its gradient as well, until the group is freed. And
    it may continue with the kept graph of a group whose own nodes have run: nodes are ordered by numbers that each of
    autograd's threads assigns by itself, and there is one thread for each device. So groups are freed at the end of
    that pass.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from hp_dtensor.torch.extend import Mark, arriving_gradients, explaining, marks
from hp_fsdp.steps.context import Context
from hp_fsdp.torch.groups.bucket import FREED
from hp_fsdp.torch.groups.group import ParameterGroup, Started
from hp_platform.torch.internals import backward_id, without_torch_function

_engine = torch.autograd.Variable._execution_engine
_register_own = torch.Tensor.register_post_accumulate_grad_hook
"""Of a gathered parameter itself, whose methods are the sharded one's."""


class RootContext(Context[ParameterGroup["RootContext"]]):
    """A context in which at most one group's gradients are being reduced, behind the computation of the next one.

    Attributes:
        several: the groups of several modules.
        reductions: those under way.
        advancing: reductions are being moved on, so gradients handed out.
        last_backward: the next backward waits for the reductions at its end.
        spare: limit of reductions under way besides the one that starts.
        events: of the user's, to be waited for before the next forward gathers.
        differentiable: the backward pass under way keeps its graph.
        late: hooks on parameters that may get gradients through a kept graph: Note [Gradients of gradients].
        expected: the same for weights' gradients that are put off: Note [Gradients put off] in
        `hp_fsdp.torch.steps.hooks`.
    """

    def __init__(self, root: RootGroup) -> None:
        super().__init__(root)
        self.several: list[RootGroup] = []
        self.reductions: list[tuple[Started, RootGroup]] = []
        self.advancing = False
        self.last_backward = True
        self.spare = 0
        self.events: list[Any] = []
        self.differentiable = False
        self.late = LateGradients()
        self.expected = LateGradients()
        _contexts.add(self)

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
        """Recompute how many reductions may be under way besides the one that starts."""
        self.spare = max(group.most_reductions for group in self.groups) - 1

    # ---- forward ----
    def begin_forward(self, group: RootGroup) -> None:
        while self.events:
            self.events.pop().wait()
        for each in self.groups:
            if each.unfilled:
                each.check_filled()
        super().begin_forward(group)
        self.forget_scales()

    def end_forward(self) -> None:
        for group in self.several:
            if group.span is not None and group.span.open:  # some of its modules did not run
                group.span.close()
                if group.reshard_after_forward is not False:
                    group.reshard(before_backward=True)
        super().end_forward()
        self.forget_scales()

    def forget_scales(self) -> None:
        """Have the next gather outside of a backward pass compute scales anew: Note [Encoded parameters]."""
        for group in self.groups:
            for bucket in group.encoded:
                bucket.fresh = False

    def expect_owed(self, group: RootGroup) -> None:
        """Watch a ``group`` whose forward runs in a frame that puts gradients off: Note [Gradients put off].

        Raises:
            NotImplementedError: the group is deterministic.
        """
        if group.deterministic:
            raise NotImplementedError(
                f"fully_shard(deterministic=True): {group.name} runs in a frame that puts its weights' gradients off"
                " (hp_platform.frames), and they would count as a micro-batch of their own. Shard it without"
                " deterministic=True"
            )
        self.expected.watch_once(group, functools.partial(self.late_gradient, group))

    # ---- backward ----
    def begin_backward(self) -> None:
        if not self.backward:
            for group in self.groups:
                group.follow_requires_grad()
        super().begin_backward()

    def call_at_end(self) -> None:
        self.differentiable = torch.is_grad_enabled()  # in hooks: the pass is run with create_graph=True
        _engine.queue_callback(self.end_backward)

    def enter_backward(self, group: RootGroup, *_: Any) -> None:
        """Begin the backward of ``group``."""
        if not group.in_backward:
            if not self.backward:
                self.begin_backward()
            group.in_backward, group.mark, group.waiting = True, None, None
            if group.unshard_in_backward:
                self.unshard(group, self.backward_order, group.prefetch_in_backward)

    def leave_backward(self, group: RootGroup, *_: Any) -> None:
        """End the backward of ``group``: the gradient has left through one of its inputs."""
        if not group.in_backward:
            if not group.arrived():  # else it came past the outputs: Note [Gradients by other ways]
                return
            self.late_gradient(group)
        if not self.late.watching:  # else a kept graph may need its parameters yet
            self.finish_group(group)

    def late_gradient(self, group: RootGroup, *_: Any) -> None:
        """Begin a backward pass for a gradient that came through a kept graph: Note [Gradients of gradients]."""
        if not group.in_backward:
            self.begin_backward()
            group.in_backward = True

    def end_backward(self) -> None:
        """End the backward pass: finish groups whose inputs needed no gradient, and the last reductions."""
        for group in reversed(self.groups):
            if group.in_backward or group.awaited and group.arrived():
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
        for group in self.groups:
            group.hide()  # whose parameters stay gathered: module.weight.grad is the gradient that was handed out
        self.forget_scales()
        super().end_backward()

    def finish_group(self, group: RootGroup) -> None:
        """Take the gradients of ``group``, free its parameters, start the reduction."""
        group.in_backward = group.awaited = False
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

    def end_micro_batch(self, group: RootGroup) -> None:
        """End a micro-batch of ``group``, in deterministic mode: its gradients of this backward pass are complete."""
        self.started(group, group.end_micro_batch(self.last_backward))

    def started(self, group: RootGroup, reductions: list[Started]) -> None:
        """Record reductions that were started."""
        if reductions:
            self.trace.append(("reduce", group, perf_counter_ns()))
            self.reductions += [(reduction, group) for reduction in reductions]
            # In the order of backward passes, which all ranks share: advancing may start a collective.
            arriving_gradients[self] = self.finish_gradients

    def advance(self, spare: int = 0) -> None:
        """Advance each reduction under way by one step.

        Args:
            spare: skip those of this many groups, the last ones.
        """
        if not self.reductions:
            return
        self.advancing = True
        left = []
        last = set(list(dict.fromkeys(id(group) for _, group in self.reductions))[-spare:]) if spare else ()
        with torch.no_grad(), without_torch_function():
            for each in self.reductions:
                reduction, group = each
                if id(group) in last or not reduction.advance():
                    left.append(each)
                else:
                    self.trace.append(("reduced", group, perf_counter_ns()))
        self.reductions, self.advancing = left, False
        if not left:
            arriving_gradients.pop(self, None)

    def reduce_collected(self) -> None:
        """Start the reductions of what backward passes without one have left, of all groups."""
        if self.backward or self.outermost is not None:  # a pass that raised
            self.abandon()
        self.agreed.clear()
        for group in reversed(self.groups):
            self.advance(self.spare)
            self.started(group, group.reduce(on_all_ranks=True))

    def drain(self, *, put_off: bool = False) -> None:
        """Wait for the reductions under way.

        Args:
            put_off: skip groups that don't wait for them at the end of a backward pass.
        """
        while any(group.waits or not put_off for _, group in self.reductions):
            self.advance()

    def finish_gradients(self) -> None:
        """Wait for reductions before a gradient is read or set, except in a backward pass and its hooks."""
        if not self.backward and not self.advancing:
            self.drain()

    def lost(self) -> list[RootGroup]:
        """Return the groups that got gradients in a backward pass of which no hook saw anything."""
        return [group for group in self.groups if group.awaited and group.arrived()]

    def settle(self) -> None:
        """Show the sharded parameters to a reader from outside, and abandon a failed step."""
        if self.outermost is not None or backward_id() != -1:
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
        arriving_gradients.pop(self, None)
        super().abandon()


RootGroup = ParameterGroup[RootContext]
"""A group of a model on PyTorch, whose context is of this class."""
_contexts: weakref.WeakSet[RootContext] = weakref.WeakSet()
_FREED = f"is at version {FREED}"
"""Part of the text of torch's error for a saved tensor that was written to (torch 2.13), which carries no fields:
test_a_freed_parameter_is_refused_where_two_calls_wait in tests/test_inplace_outputs.py provokes it."""


def _marks() -> list[Mark]:
    """List the marks of calls whose backward has not begun: Note [Gradients by other ways] in `hooks`."""
    return [group.mark for context in list(_contexts) for group in context.groups if group.mark is not None]


def _explain(error: RuntimeError) -> RuntimeError | None:
    if _FREED not in str(error):
        return None
    return RuntimeError(
        "fully_shard: backward needs parameters that are freed. It came to a sharded module by a tensor that is none of"
        " its outputs, as an activation that a hook kept. backward() can do so for the last call of a module, one of"
        " whose parameters is trained, while no earlier call waits for its backward; torch.autograd.grad only with"
        " respect to such a parameter. Return the tensor from forward, or shard the module with"
        " reshard_after_forward=False"
    )


marks.append(_marks)
explaining.append(_explain)


def refuse_lost_gradients(parameters: Iterable[Any]) -> None:
    """Raise if some of the sharded parameters wait for gradients that nobody has reduced: see `RootContext.lost`.

    Raises:
        RuntimeError: with the modules' names.
    """
    lost = [group for context in list(_contexts) for group in context.lost()]
    if lost:
        own = set(map(id, parameters))
        names = [each.name for each in lost if any(id(parameter.sharded) in own for parameter in each.parameters)]
        if names:
            raise RuntimeError(
                f"fully_shard: parameters of {', '.join(names)} got gradients in a backward pass that came by none of"
                " the modules' outputs, as of a loss that forward made of parameters and kept. They are of this rank"
                " alone. Return such a loss from forward"
            )


def hsdp_sync_stream() -> None:
    """Wait for the reductions of all sharded models that are still under way, and assign their gradients.

    Reductions are under way after backward passes with ``set_is_last_backward(False)`` or ``hsdp(comm_async=True)``. An
    optimizer's step calls this function, and reading or setting ``.grad`` of a parameter waits as well: all ranks must
    do so, because with replicas a second reduction follows the first. On a device the current stream waits, not the
    host.
    """
    for context in list(arriving_gradients):
        context.drain()


def drop_reductions() -> None:
    """Drop the reductions under way of all models, which nobody uses any more: a rank was lost, and none will end."""
    for context in list(arriving_gradients):
        context.reductions, context.advancing = [], False
    arriving_gradients.clear()


class LateGradients:
    """Hooks on the unsharded parameters of groups, for gradients that come past the hooks on outputs."""

    def __init__(self) -> None:
        self._handles: dict[RootGroup, list[Any]] = {}
        self._watched: dict[RootGroup, list[object]] = {}

    @property
    def watching(self) -> bool:
        """True if there are hooks; with `watch`, from a pass that kept its graph until the end of one that doesn't."""
        return bool(self._handles)

    def watch(self, group: RootGroup, arrived: Callable[..., None]) -> None:
        """Call ``arrived`` when one of the group's parameters gets a gradient."""
        handles = self._handles.setdefault(group, [])
        with without_torch_function():
            for parameter in group.parameters:
                if parameter.trains and parameter.unsharded is not None:
                    handles.append(_register_own(parameter.unsharded, arrived))

    def watch_once(self, group: RootGroup, arrived: Callable[..., None]) -> None:
        """Call `watch`, unless the current parameters of the group are watched already."""
        leaves = [bucket.leaves for bucket in group.buckets]
        if self._watched.get(group) != leaves:
            self._forget(group)
            self._watched[group] = leaves
            self.watch(group, arrived)

    def forget(self) -> None:
        """Remove the hooks."""
        for group in list(self._handles):
            self._forget(group)
        self._watched.clear()

    def _forget(self, group: RootGroup) -> None:
        for handle in self._handles.pop(group, ()):
            handle.remove()
