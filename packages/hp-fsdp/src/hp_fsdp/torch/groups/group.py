"""ParameterGroup: the group that one call of `fully_shard` makes of one module or several, and its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from hp_dtensor.torch.extend import Mark, will_run
from hp_fsdp.axes import PostForwardRanks
from hp_fsdp.groups.group import C, Group
from hp_fsdp.options import BucketPlan
from hp_fsdp.steps.order import Span
from hp_fsdp.torch.groups.bucket import Bucket
from hp_fsdp.torch.groups.communication import Communication
from hp_fsdp.torch.groups.deterministic import Exchange, MicroBatchBuffer
from hp_fsdp.torch.groups.encoded import EncodedBucket, reduce_amax
from hp_fsdp.torch.groups.gradients import Reduction
from hp_fsdp.torch.groups.parameter import ManagedParameter, lost_write, restore
from hp_platform.extend import attribute_to
from hp_platform.torch.internals import Range, get_grad, get_version, without_torch_function

Started = Reduction | Exchange
"""A reduction under way."""


class Call:
    """One call of a module in forward; it lives as long as the graph that the call made."""

    __slots__ = ("__weakref__",)


class ParameterGroup(Group[C]):
    """A group of one module or of several.

    Attributes:
        span: the calls that begin and end the group's forward; None if each call does both.
        enter_backward: hook that the context sets, for before the first node of the module's backward.
        leave_backward: hook that the context sets, for after the last one.
        hidden: the parameters are gathered, but the sharded ones are registered, because they were read from outside
            between forward and backward.
        compared_modes: of modules (in training or not), those in which a forward's contents were compared: Note [Writes
            in forward] in `hp_fsdp.torch.steps.hooks`.
        straight: forwards without gradients only compute; see `hp_fsdp.torch.extend.all_gathered`.
        mark: of the last call in forward, until a backward comes to it: Note [Gradients by other ways] in
            `hp_fsdp.torch.steps.hooks`.
        waiting: handle of a hook on an output of the last call, until a backward comes to it.
        alone: when the last call began, no earlier one waited for its backward.
        in_backward: between the first gradient of an output and the last gradient of an input.
        reduces_at_end: its gradients are reduced at the end of the backward pass, used or not.
        most_reductions: limit of the groups whose reductions are under way at once.
        communication: the user's settings, if any.
        encoded: the buckets of encoded parameters.
        unfilled: buffers of no state with memory and perhaps no values: module, key, buffer, address, version.
    """

    managed = ManagedParameter
    bucket = Bucket
    buckets: list[Bucket]
    parameters: list[ManagedParameter]

    def __init__(self, members: Sequence[nn.Module], *rest: Any) -> None:
        self.span: Span | None = Span(members) if len(members) > 1 else None
        self.enter_backward: Any = None
        self.leave_backward: Any = None
        self.reduces_at_end = False
        self.most_reductions = 1
        self.communication: Communication | None = None
        self.hidden = self.in_backward = self.awaited = self.straight = False
        self.compared_modes: set[bool] = set()
        self.mark: Mark | None = None
        self.waiting: Any = None
        self.alone = True
        self._leaves: tuple[list[object], list[Any]] = ([], [])
        self.unfilled: list[tuple[nn.Module, str, torch.Tensor, int, int]] = []
        super().__init__(members, *rest)

    def bucket_of(self, plan: BucketPlan) -> type[Bucket]:
        return EncodedBucket if plan.encoded else Bucket

    def _gather(self) -> list[Any]:
        if any(bucket.wants_amax for bucket in self.encoded):
            context: Any = self.context
            groups = [self] if context is None else context.groups
            backward = context is not None and context.backward
            reduce_amax([bucket for group in groups for bucket in group.encoded if not group.unsharded], backward)
        return super()._gather()

    def registered_tensors(self) -> Iterator[tuple[Any, ManagedParameter]]:
        for parameter in self.parameters:
            yield parameter.sharded, parameter
            if parameter.unsharded is not None:
                yield parameter.unsharded, parameter

    def add(self, parameters: Sequence[ManagedParameter]) -> None:
        if parameters and self.device.type == "meta":  # parameters that join later have memory
            self.device = parameters[0].original.device  # type: ignore[union-attr]
        for bucket in self.buckets:  # of which parameters may stand in new places
            bucket.note_registrations()
        super().add(parameters)
        self.encoded = [bucket for bucket in self.buckets if isinstance(bucket, EncodedBucket)]
        if self.communication is not None:
            self.communicate_by(self.communication)

    def communicate_by(self, communication: Communication) -> None:
        """Gather and reduce by these settings in each step from now on."""
        self.communication = communication
        for bucket in self.buckets:
            bucket.communication = communication
            if bucket.prepared:
                bucket.gradients.communication = communication

    def rename(self, name: str) -> None:
        super().rename(name)
        self._gather_range = Range(f"hp.fsdp.all_gather({self.name})")
        self._wait_range = Range(f"hp.fsdp.wait_all_gather({self.name})")
        self._reduce_range = Range(f"hp.fsdp.reduce_scatter({self.name})")

    # ---- parameters ----
    def check(self) -> None:
        if self.unsharded or self.gathering is not None:
            self.follow_requires_grad()
            return
        for bucket in self.buckets:
            bucket.check()

    def follow_requires_grad(self) -> None:
        """Freeze and unfreeze parameters as they are now: a forward after that of this backward had perhaps others."""
        for bucket in self.buckets:
            bucket.follow_requires_grad()

    def check_filled(self) -> None:
        """Raise if buffers of no state have memory from ``to_empty``, and no values.

        Raises:
            RuntimeError: with their names.
        """
        names = {id(module): prefix for prefix, module in self.module.named_modules()}
        empty = [
            f"{names[id(module)]}.{key}".removeprefix(".")
            for module, key, buffer, address, version in self.unfilled
            if module._buffers.get(key) is buffer and (buffer.data_ptr(), buffer._version) == (address, version)
        ]
        if empty:
            raise RuntimeError(
                f"fully_shard: to_empty gave {len(empty)} buffers of {self.class_name} memory and no values, and no"
                f" state dict has them: {', '.join(empty[:3])}{', ...' if len(empty) > 3 else ''}. Compute them before"
                " the first forward (on transformers models: hp_dtensor.init_parameters(model) instead of to_empty, and"
                " then load), or copy them from a model that was built on a device"
            )
        self.unfilled.clear()

    def restore(self) -> None:
        """Call `check` after a method of the module replaced parameters: the former objects take their places again."""
        if not self.unsharded and self.gathering is None:
            for bucket in self.buckets:
                restore(bucket.parameters)
        self.check()

    def while_gathering(self) -> Any:
        return self._gather_range

    def while_waiting(self) -> Any:
        return self._wait_range

    def show_unsharded(self, arrived: bool) -> None:
        if arrived or self.hidden:
            self.hidden = False
            for bucket in self.buckets:
                bucket.show_unsharded()

    def free(self, ranks: PostForwardRanks | None) -> None:
        self.hidden = False
        for bucket in self.buckets:
            bucket.show_sharded()
            bucket.release(ranks)

    def hide(self) -> None:
        """Register the sharded parameters, but leave the unsharded ones gathered."""
        if self.unsharded and not self.hidden and not self.user_unsharded:
            self.hidden = True
            for bucket in self.buckets:
                bucket.show_sharded()

    def keep(self) -> None:
        for bucket in self.buckets:
            bucket.keep()

    def stale(self) -> bool:
        return any(bucket.stale(self.user_unsharded) for bucket in self.buckets)

    def versions(self) -> list[int]:
        """List the versions of the buffers of which a write is lost, or of this rank alone."""
        return [get_version(bucket.full) for bucket in self.buckets if not bucket.keeps_writes]

    def contents(self) -> list[Any]:
        """Sum up the bits of the buffers of `versions`, and list where parameters lie."""
        with torch.no_grad(), without_torch_function():
            buckets = [bucket for bucket in self.buckets if not bucket.keeps_writes]
            sums = [_sum_of_words(bucket.full_alias) for bucket in buckets]
            places = [address for bucket in self.buckets for address in bucket.addresses()]
            return [*(each.item() for each in sums), *places]

    def written(self) -> str:
        """Describe a write in forward: Note [Writes in forward] in `hp_fsdp.torch.steps.hooks`."""
        names = [each.name for each in self.parameters if not each.trains] or [each.name for each in self.parameters]
        return lost_write(
            self.name, names, replicated=any(bucket.aliased and not bucket.keeps_writes for bucket in self.buckets)
        )

    # ---- gradients ----
    def note_call(self) -> None:
        """Note that a call in forward begins, whose backward is awaited."""
        self.alone = self.waiting is None or self.waiting.hooks_dict_ref() is None
        self.waiting = None

    def set_mark(self) -> None:
        """Note where a backward pass comes to the call that has ended."""
        self.mark = Mark(self.buckets[0].full.device, self.come_to_mark) if self.alone and self.trains else None

    def come_to_mark(self, *_: Any) -> None:
        """Begin the backward of the last call if the pass under way comes to a parameter."""
        if self.mark is not None and not self.in_backward:
            self.follow_requires_grad()
            leaves = [bucket.leaves for bucket in self.buckets]
            if self._leaves[0] != leaves:
                with without_torch_function():
                    own = [each.unsharded for each in self.parameters if each.trains]
                    self._leaves = leaves, [get_gradient_edge(each).node for each in own if each is not None]
            if any(map(will_run, self._leaves[1])):
                self.enter_backward()

    def arrived(self) -> bool:
        """Tell whether autograd has left a gradient on an unsharded parameter."""
        with without_torch_function():
            return any(p.unsharded is not None and get_grad(p.unsharded) is not None for p in self.parameters)

    def collect(self, *, differentiable: bool = False) -> None:
        """Take the gradients of the unsharded parameters, and free the parameters unless they stay gathered.

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
        with torch.no_grad(), without_torch_function():
            for bucket in self.buckets:
                if bucket.prepared:
                    attribute_to(self.modules, bucket.gradients.collect)
        if differentiable:
            self.keep()
        elif self.reshard_after_backward:
            self.reshard()

    def end_micro_batch(self, last_backward: bool) -> list[Started]:
        """End a micro-batch, in deterministic mode: the group's gradients of this backward pass are complete.

        Args:
            last_backward: the gradients of all passes since the last step may be reduced now.

        Returns:
            The reductions that were started.
        """
        op = self.reduce_op if self.sums_now and last_backward else None
        number, self.ended = self.micro_batches, True
        self.micro_batches = 0 if op else number + 1
        with self._reduce_range, torch.no_grad(), without_torch_function():
            if op is not None:
                self.agree(number + 1)
            return attribute_to(self.modules, self._end_micro_batch, number, op)

    def _end_micro_batch(self, number: int, op: str | None) -> list[Started]:
        for gradients in self._micro_batch_buffers():
            gradients.end_micro_batch(number, keeps=op is None)
        return [] if op is None else self._exchange(number + 1, op)

    def _micro_batch_buffers(self) -> list[MicroBatchBuffer]:
        return [bucket.gradients for bucket in self.buckets if bucket.prepared]  # type: ignore[misc]

    def _exchange(self, count: int, op: str) -> list[Started]:
        started: list[Started] = []
        buffers = self._micro_batch_buffers()
        used = any(gradients.used for gradients in buffers)
        for gradients in buffers:
            gradients.divisor = self.total_divisor
            if used and gradients.trains:
                started.append(Exchange(gradients, count, op, self.modules))
            else:
                gradients.release()
        return started

    def reduce(self, *, on_all_ranks: bool = False) -> list[Started]:
        """Start the reductions of the collected gradients.

        Args:
            on_all_ranks: outside of a backward pass; this rank takes part whether it has gradients or not.
        """
        with self._reduce_range, torch.no_grad(), without_torch_function():
            if on_all_ranks and self.deterministic:
                count, self.micro_batches = self.micro_batches, 0
                self.agree(count)
                return attribute_to(self.modules, self._exchange, count, self.reduce_op) if count else []
            return attribute_to(self.modules, self._reduce, on_all_ranks)

    def _reduce(self, on_all_ranks: bool) -> list[Started]:
        started = []
        buckets = [bucket for bucket in self.buckets if bucket.prepared]
        used = on_all_ranks or self.reduces_at_end or any(b.gradients.used or b.gradients.alone for b in buckets)
        for bucket in buckets:
            if used and (bucket.gradients.used or bucket.gradients.trains):
                op, divisor = self.reduce_op, self.total_divisor
                if self.communication is not None:
                    op, divisor = self.communication.operation(op, divisor, bucket.axes)
                bucket.gradients.divisor = divisor
                reduction = bucket.gradients.reduce(op, over_replicas=self.reduces_over_replicas, modules=self.modules)
                if reduction is not None:
                    started.append(reduction)
        return started

    def abandon(self) -> None:
        self.in_backward = self.awaited = self.ended = False
        self.micro_batches = 0
        self.calls.clear()
        self.mark = self.waiting = None
        if self.span is not None:
            self.span.close()
        self.reshard()
        with torch.no_grad(), without_torch_function():
            for bucket in self.buckets:
                if bucket.prepared:
                    bucket.gradients.release()
                    for parameter in bucket.parameters:
                        parameter.unsharded.grad = None


def _sum_of_words(flat: torch.Tensor) -> torch.Tensor:
    """Sum a buffer's bits as integers that overflow: a sum in a wider type would copy the buffer to it first."""
    width = next(width for width in (torch.int32, torch.int16, torch.int8) if not flat.nbytes % width.itemsize)
    return flat.view(width).sum(dtype=width)


def check_differentiable(group: ParameterGroup[Any]) -> None:
    """Raise if a backward pass with ``create_graph=True`` gave parameters gradients.

    Raises:
        NotImplementedError: they would lose their graph when they are reduced; or the group is deterministic.
    """
    if group.deterministic:
        raise NotImplementedError(
            f"fully_shard(deterministic=True): {group.name} ran backward with create_graph=True, whose second pass"
            " would count as a micro-batch of its own. Shard it without deterministic=True"
        )
    for parameter in group.parameters:
        gradient = None if parameter.unsharded is None else get_grad(parameter.unsharded)
        if gradient is not None and gradient.requires_grad:
            raise NotImplementedError(
                f"fully_shard: {parameter.name!r} of {group.name} got a gradient by backward(create_graph=True), but"
                " reduced gradients have no graph. Take gradients with respect to activations or inputs instead:"
                " torch.autograd.grad(outputs, inputs, create_graph=True)"
            )
