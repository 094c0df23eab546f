"""ParameterGroup: what one call of `fully_shard` made of a module, or of several, and its state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hp_dtensor import DeviceMesh
from hp_fsdp.agreement import check_counts
from hp_fsdp.axes import DataAxes
from hp_fsdp.controls import divisor_of
from hp_fsdp.optimizers import ignore
from hp_fsdp.options import GroupOptions
from hp_fsdp.order import ExecutionOrder
from hp_fsdp.spans import Span
from hp_fsdp.torch.adoption import restore
from hp_fsdp.torch.agreement import largest
from hp_fsdp.torch.bucket import Bucket
from hp_fsdp.torch.communication import Communication
from hp_fsdp.torch.deterministic import Exchange, MicroBatchBuffer
from hp_fsdp.torch.gradients import Reduction
from hp_fsdp.torch.higher_order import check_differentiable
from hp_fsdp.torch.parameter import ManagedParameter, find_parameters
from hp_platform.extend import communicate_for

if TYPE_CHECKING:
    from hp_fsdp.torch.context import RootContext

__all__ = ["Call", "ParameterGroup", "Started"]

_Range = torch._C._profiler._RecordFunctionFast  # type: ignore[attr-defined]
_plain = torch._C.DisableTorchFunctionSubclass
Started = Reduction | Exchange
"""A reduction under way."""


class Call:
    """One call of a module in forward; it lives as long as the graph that the call made."""

    __slots__ = ("__weakref__",)


class ParameterGroup:
    """The parameters that are gathered, freed and reduced together, around the forward and backward of their modules.

    Args:
        members: the modules; they compute with the unsharded parameters.
        parameters: those that are this group's.
        axes: the axes of data parallelism.
        device: where the buffers live.
        options: what `fully_shard` was told.
        ignored: parameters that are to stay as they are.

    Attributes:
        name: the module's name from the root; its class's before the first forward.
        module: the first of the members, most often the only one.
        modules: the members and, from the first forward on, the root: what `communicate_for` tells observers.
        span: which calls begin and end the group's forward; None where each call does both.
        context: what the groups of one model share; None before the first forward.
        enter_backward: hook that the context sets, for before the first node of the module's backward.
        leave_backward: hook that the context sets, for after the last one.
        unsharded: the unsharded parameters are gathered.
        hidden: they are, but the sharded ones are registered, because somebody looked between forward and backward.
        pinned: the user asked for them.
        gathering: handles of the gather under way, None where there is none.
        in_backward: between the first gradient of an output and the last gradient of an input.
        calls: the module's calls in forward whose backward is still to come; deterministic mode counts on them.
        micro_batches: how many backward passes were kept since the last step, in deterministic mode.
        reduces_at_end: its gradients are reduced when the backward pass is over, used or not.
        unshard_in_backward: backward gathers the parameters, where they are not.
        most_reductions: how many groups' reductions may be under way at once.
        communication: what the user set about it; None where that is nothing.
        divisor: what the reduced gradients are divided by, None for 1.
        scale: what they are multiplied by.
        waits: the end of a backward pass waits for the reductions.
        agreed: how many micro-batches all ranks ran for the last step, in deterministic mode.
        ended: the gradients of the backward pass under way are complete, in deterministic mode.
    """

    def __init__(
        self,
        members: Sequence[nn.Module],
        parameters: Sequence[ManagedParameter],
        axes: DataAxes,
        device: torch.device,
        options: GroupOptions,
        ignored: Sequence[Any] = (),
    ) -> None:
        self.members = tuple(members)
        self.module = self.members[0]
        self.modules: tuple[nn.Module, ...] = self.members
        self.span: Span | None = Span(self.members) if len(members) > 1 else None
        self.axes = axes
        self.policy = options.policy
        self.deterministic = options.deterministic
        self.context: RootContext | None = None
        self.enter_backward: Any = None
        self.leave_backward: Any = None
        self.order: ExecutionOrder[ParameterGroup] = ExecutionOrder()
        # The root's parameters are used last in forward and first in backward: True stands for "all but the root".
        self.reshard_after_forward: bool | None = None if options.reshards else False
        self.reshard_after_backward = True
        self.reduces = True
        self.reduces_at_end = False
        self.unshard_in_backward = True
        self.most_reductions = 1
        self.communication: Communication | None = None
        self.reduces_over_replicas = True
        self.reduce_op = "avg"
        self.divisor: float | None = None
        self.scale = 1.0
        self.waits = True
        self.prefetch_in_forward: list[ParameterGroup] = []
        self.prefetch_in_backward: list[ParameterGroup] = []
        self.near = axes.near(options.reshard_after_forward)
        self.unsharded = self.hidden = self.pinned = False
        self.gathering: list[Any] | None = None
        self.in_backward = False
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self.micro_batches = 0
        self.agreed: int | None = None
        self.ended = False
        self.options = options
        self.device = device
        self.ignored: list[Any] = list(ignored)
        self.class_name = ", ".join(type(module).__name__ for module in members)
        self.buckets: list[Bucket] = []
        self.add(parameters)
        self.rename("")

    def add(self, parameters: Sequence[ManagedParameter]) -> None:
        """Shards parameters and makes them the group's."""
        options = self.options
        buckets = [
            Bucket(plan, self.axes if plan.sharded else self.axes.whole(), self.device, options, self.class_name)
            for plan in options.together(parameter.facts() for parameter in parameters)
        ]
        for bucket in buckets:
            bucket.shard_originals()
        self.buckets += buckets
        if self.communication is not None:
            Communication.of(self)

    def stand_ins(self) -> Iterator[tuple[Any, ManagedParameter]]:
        """All tensors that may stand in the modules for parameters of this group."""
        for parameter in self.parameters:
            yield parameter.sharded, parameter
            if parameter.unsharded is not None:
                yield parameter.unsharded, parameter

    def take_in(self, ignored: Sequence[Any], stop: Callable[[Any], bool], inner: DeviceMesh | None) -> bool:
        """Shards parameters that joined the module after it was sharded.

        Args:
            ignored: parameters to leave as they are.
            stop: says which modules inside have groups of their own.
            inner: where all parameters of the model are distributed on other axes (tensor parallel), their mesh: plain
                ones are replicated on it.

        Returns:
            True where there were some.

        Raises:
            RuntimeError: they are on the meta device, or copies of parameters that are sharded over other axes, too.
            ValueError, TypeError: see `fully_shard`.
        """
        counts = [len(parameter.places) for parameter in self.parameters]
        found = find_parameters(
            self.members, ignored, stop, {id(tensor): parameter for tensor, parameter in self.stand_ins()}
        )
        divided = [p for p in found if not p.copied and self.axes.divided(p.name, p.inner)]
        for parameter in divided:
            self.ignored.append(parameter.original)
            ignore(parameter.original)
        found = [parameter for parameter in found if parameter not in divided]
        moved = counts != [len(parameter.places) for parameter in self.parameters]
        if not (found or moved):
            return False
        self.reshard()
        for parameter in found:
            parameter.join(self.axes.mesh, inner, self.class_name)
            if self.device.type == "meta":  # the group's were there when it was made
                self.device = parameter.original.device  # type: ignore[union-attr]
        self.add(found)
        if moved:
            for bucket in self.buckets:
                bucket.note_places()
        return bool(found)

    def rename(self, name: str) -> None:
        """Sets the name that profiles and errors show."""
        self.name = name or self.class_name
        self._gather_range = _Range(f"hp.fsdp.all_gather({self.name})")
        self._wait_range = _Range(f"hp.fsdp.wait_all_gather({self.name})")
        self._reduce_range = _Range(f"hp.fsdp.reduce_scatter({self.name})")

    def __repr__(self) -> str:
        count = sum(len(bucket.parameters) for bucket in self.buckets)
        return f"ParameterGroup({self.name!r}, {count} parameters in {len(self.buckets)} buckets)"

    @property
    def parameters(self) -> list[ManagedParameter]:
        """All parameters of the group."""
        return [parameter for bucket in self.buckets for parameter in bucket.parameters]

    # ---- parameters ----
    def check(self) -> None:
        """Follows changes that were made to the sharded parameters from outside; see `Bucket.check`."""
        here = self.unsharded or self.gathering is not None
        for bucket in self.buckets:
            if here:
                bucket.follow_requires_grad()
            else:
                bucket.check()

    def restore(self) -> None:
        """`check`, where a method of the module replaced parameters: the former objects take their places again."""
        if not self.unsharded and self.gathering is None:
            for bucket in self.buckets:
                restore(bucket)
        self.check()

    def start_unshard(self) -> None:
        """Starts the all-gathers, unless the parameters are there or on their way."""
        if self.unsharded or self.gathering is not None:
            return
        self._note("gather")
        with self._gather_range:
            for bucket in self.buckets:
                if not bucket.prepared:
                    bucket.prepare()
            self.gathering = communicate_for(self.modules, self._gather)

    def _gather(self) -> list[Any]:
        return [bucket.gather() for bucket in self.buckets]

    def finish_unshard(self) -> None:
        """Waits for the all-gathers and registers the unsharded parameters."""
        if self.gathering is not None:
            with self._wait_range:
                for handle in self.gathering:
                    if handle is not None:
                        handle.wait()
            self.gathering = None
            self.unsharded = True
        elif not self.hidden:
            return
        self.hidden = False
        for bucket in self.buckets:
            bucket.show_unsharded()

    def reshard(self, *, before_backward: bool = False) -> None:
        """Registers the sharded parameters again and frees the gathered buffer.

        Args:
            before_backward: it will be gathered again for backward, from the smaller group's shards if there is one.
        """
        if self.gathering is not None:
            self.finish_unshard()
        near = self.near if before_backward else None
        if not self.unsharded:
            if near is None:
                self.drop_near()
            return
        self.unsharded = self.hidden = self.pinned = False
        for bucket in self.buckets:
            bucket.show_sharded()
            bucket.release(near)
        self._note("free")

    def _note(self, kind: str) -> None:
        context = self.context
        if context is not None and (context.outermost is not None or context.backward is not None):
            context.moments.append((kind, self, perf_counter_ns()))

    def drop_near(self) -> None:
        """Frees the smaller group's shards."""
        if self.near is not None:
            for bucket in self.buckets:
                bucket.drop_near()

    def hide(self) -> None:
        """Registers the sharded parameters, but leaves the unsharded ones gathered."""
        if self.unsharded and not self.hidden and not self.pinned:
            self.hidden = True
            for bucket in self.buckets:
                bucket.show_sharded()

    def keep(self) -> None:
        """Leaves the parameters gathered after forward."""
        for bucket in self.buckets:
            bucket.keep()

    def stale(self) -> bool:
        """Whether gathered parameters may be older than the sharded ones."""
        return any(bucket.stale() for bucket in self.buckets)

    # ---- gradients ----
    def collect(self, *, differentiable: bool = False) -> None:
        """Takes the gradients of the unsharded parameters; frees the parameters if that is wanted.

        Args:
            differentiable: a graph of this backward pass is kept, which needs the parameters.

        Raises:
            NotImplementedError: a parameter got a gradient that is to be differentiated itself.
        """
        if self.ended:
            raise RuntimeError(
                f"fully_shard(deterministic=True): {self.name} got gradients after those of this backward pass were"
                " complete. This happens where a graph that calls the module more than once is kept and run backward"
                " again: run forward again instead"
            )
        if differentiable:
            check_differentiable(self)
        with torch.no_grad(), _plain():
            for bucket in self.buckets:
                if bucket.prepared:
                    communicate_for(self.modules, bucket.gradients.collect)
        if differentiable:
            self.keep()
        elif self.reshard_after_backward:
            self.reshard()

    def end_micro_batch(self, last_backward: bool) -> list[Started]:
        """In deterministic mode, the group's gradients of this backward pass are complete.

        Args:
            last_backward: the gradients of all passes since the last step may be reduced now.

        Returns:
            The reductions that were started.
        """
        replicas = self.reduces_over_replicas or self.axes.replicate_group is None
        op = self.reduce_op if self.reduces and replicas and last_backward else None
        number, self.ended = self.micro_batches, True
        self.micro_batches = 0 if op else number + 1
        with self._reduce_range, torch.no_grad(), _plain():
            if op is not None and number + 1 != self.agreed:  # seldom, for it waits
                check_counts(self.axes, number + 1, largest)
                self.agreed = number + 1
            return communicate_for(self.modules, self._end_micro_batch, number, op)

    def _end_micro_batch(self, number: int, op: str | None) -> list[Started]:
        started = []
        kept = [bucket.gradients for bucket in self.buckets if bucket.prepared]
        for gradients in kept:
            assert isinstance(gradients, MicroBatchBuffer)
            gradients.end_micro_batch(number, keeps=op is None)
        if op is not None:
            used = any(gradients.used for gradients in kept)
            for gradients in kept:
                gradients.divisor = divisor_of(self)
                if used and gradients.trains:
                    started.append(Exchange(gradients, number + 1, op, self.modules))  # type: ignore[arg-type]
                else:
                    gradients.release()
        return started

    def reduce(self) -> list[Started]:
        """Starts the reductions of what was collected."""
        with self._reduce_range, torch.no_grad(), _plain():
            return communicate_for(self.modules, self._reduce)

    def _reduce(self) -> list[Started]:
        started = []
        buckets = [bucket for bucket in self.buckets if bucket.prepared]
        used = self.reduces_at_end or any(b.gradients.used or b.gradients.alone for b in buckets)
        for bucket in buckets:
            if used and (bucket.gradients.used or bucket.gradients.trains):
                op, divisor = self.reduce_op, divisor_of(self)
                if self.communication is not None:
                    op, divisor = self.communication.operation(op, divisor, bucket.axes)
                bucket.gradients.divisor = divisor
                reduction = bucket.gradients.reduce(op, over_replicas=self.reduces_over_replicas, modules=self.modules)
                if reduction is not None:
                    started.append(reduction)
        return started

    def abandon(self) -> None:
        """Back to the state between steps after an error, without the gradients of the step that failed."""
        self.in_backward = self.ended = False
        self.micro_batches = 0
        self.calls.clear()
        if self.span is not None:
            self.span.close()
        self.reshard()
        with torch.no_grad(), _plain():
            for bucket in self.buckets:
                if bucket.prepared:
                    bucket.gradients.release()
                    for parameter in bucket.parameters:
                        parameter.unsharded.grad = None
