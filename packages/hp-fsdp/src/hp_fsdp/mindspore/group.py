"""ParameterGroup: what one call of `fully_shard` made of a Cell, and its state."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mindspore import Tensor, _no_grad, nn

from hp_dtensor import DeviceMesh
from hp_dtensor.mindspore.extend import local_mode
from hp_fsdp.agreement import check_counts
from hp_fsdp.axes import DataAxes
from hp_fsdp.controls import divisor_of
from hp_fsdp.mindspore.agreement import largest
from hp_fsdp.mindspore.bucket import Bucket, itemsize
from hp_fsdp.mindspore.parameter import ManagedParameter, find_parameters
from hp_fsdp.mindspore.unsharding import Call, unsharded_tensors
from hp_fsdp.optimizers import ignore
from hp_fsdp.options import GroupOptions, ParameterFacts
from hp_platform import get_platform
from hp_platform.extend import communicate_for

if TYPE_CHECKING:
    from hp_fsdp.mindspore.context import RootContext

__all__ = ["ParameterGroup"]


class ParameterGroup:
    """The parameters that are gathered, freed and reduced together, around one Cell's forward and backward.

    Args:
        module: the Cell; it computes with the unsharded parameters.
        parameters: those that are this group's.
        axes: the axes of data parallelism.
        options: what `fully_shard` was told.
        ignored: the Cell's parameters that stay as they are.

    Attributes:
        standing: what is registered in the Cells for the parameters now.
        modules: the Cell and, from the first forward on, the root: what `communicate_for` tells observers.
        context: what the groups of one model share; None before the first forward.
        unsharded: the parameters are gathered.
        pinned: the user asked for them.
        carried: they stay gathered for the next micro-batch.
        has_values: each parameter was seen to have some.
        gathering: handles of the gather under way, None where there is none.
        active: the calls whose backward has begun and is not over.
        overlaps: gathers run beside the computation, so that it pays to start them ahead of time.
        calls: those whose backward is still to come, in deterministic mode.
        micro_batches: how many backward passes were kept since the last step, in deterministic mode.
        agreed: how many micro-batches all ranks ran for the last step, in deterministic mode.
        ended: the gradients of the backward pass under way are complete, in deterministic mode.
    """

    def __init__(
        self,
        module: nn.Cell,
        parameters: Sequence[ManagedParameter],
        axes: DataAxes,
        options: GroupOptions,
        ignored: Sequence[Any] = (),
    ) -> None:
        self.module = module
        self.options = options
        self.ignored: list[Any] = list(ignored)
        self.modules: tuple[nn.Cell, ...] = (module,)
        self.axes = axes
        self.policy = options.policy
        self.deterministic = options.deterministic
        self.context: RootContext | None = None
        # The root's parameters are used last in forward and first in backward: True stands for "all but the root".
        self.reshard_after_forward: bool | None = None if options.reshards else False
        self.reshard_after_backward = True
        self.reduces = True
        self.reduces_over_replicas = True
        self.reduce_op = "avg"
        self.divisor: float | None = None
        self.scale = 1.0
        self.waits = True  # as each backward pass on MindSpore does
        self.prefetch_in_forward: list[ParameterGroup] = []
        self.prefetch_in_backward: list[ParameterGroup] = []
        self.near = axes.near(options.reshard_after_forward)
        self.unsharded = False
        self.pinned = False
        self.carried = False
        self.has_values = False
        self.gathering: list[Any] | None = None
        self.active: set[Call] = set()
        self.overlaps = get_platform().devices.capabilities.native_collectives
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self.micro_batches = 0
        self.agreed: int | None = None
        self.ended = False
        self.name = self.class_name = type(module).__name__
        self.buckets: list[Bucket] = []
        self.parameters: list[ManagedParameter] = []
        self.standing: list[Any] = []
        self.add(parameters)

    def add(self, parameters: Sequence[ManagedParameter]) -> None:
        """Shards parameters and makes them the group's."""
        facts = []
        for each in parameters:
            parameter = each.parameter
            nbytes = math.prod(each.global_shape) * itemsize(parameter.dtype)
            facts.append(
                ParameterFacts(each, each.name, parameter, parameter.dtype, parameter.requires_grad, each.shape, nbytes)
            )
        self.buckets += [
            Bucket(plan, self.axes if plan.sharded else self.axes.whole(), self.options, self.class_name)
            for plan in self.options.together(facts)
        ]
        self.parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        self.standing = [parameter.parameter for parameter in self.parameters]

    def take_in(self, ignored: Sequence[Any], stop: Callable[[Any], bool], inner: DeviceMesh | None) -> bool:
        """Shards parameters that joined the Cell after it was sharded.

        Args:
            ignored: parameters to leave as they are.
            stop: says which Cells inside have groups of their own.
            inner: where all parameters of the model are distributed on other axes (tensor parallel), their mesh: plain
                ones are replicated on it.

        Returns:
            True where there were some.

        Raises:
            RuntimeError: a parameter was replaced or removed, has no values, or is a copy of one that is sharded over
                other axes, too.
            ValueError: see `fully_shard`.
        """
        for parameter, standing in zip(self.parameters, self.standing):
            parameter.check_place(standing, self.class_name)
        own = {id(each): p for p, standing in zip(self.parameters, self.standing) for each in (p.parameter, standing)}
        found = find_parameters(self.module, ignored, stop, own)
        divided = [parameter for parameter in found if self.axes.divided(parameter.name, parameter.inner)]
        for parameter in divided:
            self.ignored.append(parameter.parameter)
            ignore(parameter.parameter)
        found = [parameter for parameter in found if parameter not in divided]
        if not found:
            return False
        self.reshard()
        for parameter in found:
            parameter.join(self.axes.mesh, inner, self.class_name)
        self.add(found)
        self.has_values = False
        return True

    def __repr__(self) -> str:
        return f"ParameterGroup({self.name!r}, {len(self.parameters)} parameters in {len(self.buckets)} buckets)"

    @property
    def trains(self) -> bool:
        """Whether any parameter requires gradients."""
        return any(bucket.trains for bucket in self.buckets)

    # ---- parameters ----
    def check(self) -> None:
        """Raises where parameters have no values yet."""
        if not self.has_values:
            for bucket in self.buckets:
                bucket.check()
            self.has_values = True

    def start_unshard(self) -> None:
        """Starts the all-gathers, unless the parameters are there or on their way."""
        if self.unsharded or self.gathering is not None:
            return
        self.check()
        self._note("gather")
        with _no_grad(), local_mode():
            self.gathering = communicate_for(self.modules, self._gather)

    def _gather(self) -> list[Any]:
        return [bucket.gather(async_op=True) for bucket in self.buckets]

    def finish_unshard(self) -> None:
        """Waits for the all-gathers."""
        if self.gathering is not None:
            for handle in self.gathering:
                if handle is not None:
                    handle.wait()
            for bucket in self.buckets:
                bucket.source = None
            self.gathering = None
            self.unsharded = True
        if self.pinned:
            self.show(unsharded_tensors(self, None))

    def keep(self) -> None:
        """Leaves the parameters gathered until the next forward of the model begins."""

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
        self.unsharded = self.pinned = self.carried = False
        self.hide()
        for bucket in self.buckets:
            bucket.release(near)
        self._note("free")

    def _note(self, kind: str) -> None:
        if self.context is not None:
            self.context.note(kind, self)

    def drop_near(self) -> None:
        """Frees the smaller group's shards."""
        for bucket in self.buckets:
            bucket.drop_near()

    def show(self, tensors: Sequence[Any]) -> list[Any]:
        """Registers ``tensors`` in the Cells; returns what was registered before."""
        before, self.standing = self.standing, list(tensors)
        for parameter, tensor in zip(self.parameters, tensors):
            for cell, name in parameter.places:
                cell._params[name] = tensor
        return before

    def hide(self) -> None:
        """Registers the sharded parameters in the Cells."""
        self.show([parameter.parameter for parameter in self.parameters])

    # ---- backward ----
    def show_again(self) -> None:
        """Registers unsharded tensors for a forward inside backward (recomputation), which records what it saves."""
        tensors = unsharded_tensors(self, None)
        for parameter, tensor in zip(self.parameters, tensors):
            if parameter.parameter.requires_grad:
                tensor.requires_grad_(True)
        self.show(tensors)

    def leave_backward(self, call: Call, gradients: Sequence[Tensor]) -> list[Any]:
        """The backward of ``call`` is over: frees the parameters, reduces the gradients.

        Returns:
            The shards of the gradients of the trained buckets' parameters.
        """
        call.done = True
        self.active.discard(call)
        self.calls.discard(call)
        self._note("left")
        rest = iter(gradients)
        trained = [bucket for bucket in self.buckets if bucket.trains]
        flats = [bucket.collect([next(rest) for _ in bucket.parameters]) for bucket in trained]
        if not self.active:
            self.end_backward()
        if self.deterministic:
            return self._leave_in_order(trained, flats)
        shards: list[Any] = []
        if not self.reduces:
            for bucket, flat in zip(trained, flats):
                bucket.accumulated = flat
                shards += bucket.zeros()
            return shards
        self._note("reduce")
        for bucket, flat in zip(trained, flats):
            bucket.divisor = divisor_of(self)
            shards += communicate_for(
                self.modules, bucket.reduce, flat, self.reduce_op, over_replicas=self.reduces_over_replicas
            )
        self._note("reduced")
        return shards

    @property
    def sums_now(self) -> bool:
        """Whether a backward pass ends with the sum over all since the last step, in deterministic mode."""
        return self.reduces and (self.reduces_over_replicas or self.axes.replicate_group is None)

    def _leave_in_order(self, trained: Sequence[Bucket], flats: Sequence[Tensor]) -> list[Any]:
        """What `leave_backward` does in deterministic mode: the last call returns the sum, the others zeros.

        Raises:
            RuntimeError: a call that was made after the last one had returned the sum.
        """
        if self.ended:
            raise RuntimeError(
                f"fully_shard(deterministic=True): {self.name} got gradients after those of this backward pass were"
                " complete. This happens where a Cell that is called more than once is recomputed by"
                " mindspore.recompute with use_reentrant=True: use use_reentrant=False"
            )
        for bucket, flat in zip(trained, flats):
            assert bucket.sums is not None
            bucket.sums.add(flat)
        if not self.sums_now or self.calls:
            return [zeros for bucket in trained for zeros in bucket.zeros()]
        number, self.micro_batches, self.ended = self.micro_batches, 0, True
        if number + 1 != self.agreed:  # seldom, for it waits
            communicate_for(self.modules, check_counts, self.axes, number + 1, largest)
            self.agreed = number + 1
        shards: list[Any] = []
        self._note("reduce")
        for bucket in trained:
            assert bucket.sums is not None
            bucket.sums.end_micro_batch(number)
            bucket.divisor = divisor_of(self)
            shards += communicate_for(self.modules, bucket.reduce_in_order, number + 1, self.reduce_op)
        self._note("reduced")
        return shards

    def end_micro_batch(self) -> str | None:
        """A backward pass of the model is over, in deterministic mode.

        Returns:
            What to raise where it was to return the sum, but the call that was to return it got no gradient.
        """
        ended, self.ended = self.ended, False
        sums = [bucket.sums for bucket in self.buckets if bucket.sums is not None and bucket.trains]
        if not self.sums_now:
            for each in sums:
                each.end_micro_batch(self.micro_batches)
            self.micro_batches += 1
            return None
        if ended:
            return None
        self.micro_batches = 0
        waiting = len(self.calls) if any(each.current is not None for each in sums) else 0
        used = any(each.used for each in sums)
        self.calls.clear()
        if used:
            self.forget_gradients()
        if waiting:
            return (
                f"fully_shard(deterministic=True): {waiting} calls of {self.name} in forward got no gradient, so the"
                " backward pass is over before its sum was complete. Leave out calls whose outputs are not part of the"
                " loss, or make them outside of the differentiated function"
            )
        if used:
            return (
                f"fully_shard(deterministic=True): {self.name} had gradients in earlier micro-batches of this step and"
                " none in the last one, with which their sum would be returned. Put a micro-batch that uses it last on"
                " each rank"
            )
        return None

    def end_backward(self) -> None:
        """No call's backward is under way: frees the parameters, or carries them to the next micro-batch."""
        self.active.clear()
        if self.reduces or self.reshard_after_backward:
            self.reshard()
        elif self.unsharded:
            self.hide()
            self.carried = True

    def abandon(self) -> None:
        """Back to the state between steps after an error."""
        self.active.clear()
        self.reshard()
        if self.deterministic:
            self.ended = False
            self.calls.clear()
            self.forget_gradients()

    def forget_gradients(self) -> None:
        """Drops gradients that wait for a backward pass that reduces them."""
        self.micro_batches = 0
        for bucket in self.buckets:
            bucket.forget_gradients()
