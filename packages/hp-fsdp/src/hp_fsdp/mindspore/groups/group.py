"""ParameterGroup: the group that `fully_shard` makes of a Cell, its gradients, and the context of a model's groups.

Note [One function a group]
    `mindspore.value_and_grad` gives the gradients that reach Parameter objects, one by one; there is no ``.grad`` to
    write to. Two ways lead there. (1) Parameters that hold the gathered values for a while, each with a hook that
    replaces its gradient: a hook returns at once, so it cannot wait for the group's other gradients, and each parameter
    needs a reduction of its own. (2) What is here: one autograd function from the sharded Parameters to the unsharded
    tensors. Its backward runs when all gradients of the group are there, reduces them as one, and returns the shards,
    which reach the Parameters however the gradient is taken. So the sharded Parameters never hold other data, and a
    parameter used twice, tied weights and unused parameters (zeros) are autograd's business.

Note [The oldest node]
    The engine runs the youngest node that is ready. The function's node is made before all others of the Cell's
    forward, so when it runs all of them have run: it is also where the gathered memory is freed. A group without
    trained parameters has no such node, and keeps its memory until the backward pass ends.

Note [No cycle]
    The node refers to the call, so the call refers to no tensor of the graph: a reference cycle through the graph is
    never freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mindspore import Tensor, _Function, _no_grad, nn
from mindspore.graph.api import _pynative_executor

from hp_dtensor.mindspore.extend import alias, local_mode, once_differentiable, own_dtypes
from hp_fsdp.axes import PostForwardRanks
from hp_fsdp.groups.group import Group
from hp_fsdp.mindspore.groups.bucket import Bucket
from hp_fsdp.mindspore.groups.parameter import ManagedParameter
from hp_fsdp.steps.context import Context
from hp_platform import get_platform
from hp_platform.extend import attribute_to


def in_backward() -> bool:
    """Tell whether a backward pass is running."""
    return _pynative_executor.get_current_autodiff_engine_id() != -1


class Call:
    """One forward of a Cell that is recorded for backward.

    Attributes:
        group: the Cell's group.
        done: its backward is over.
    """

    __slots__ = ("__weakref__", "done", "group")

    def __init__(self, group: ParameterGroup) -> None:
        self.group = group
        self.done = False


class _Unshard(_Function):
    """From the shards of a group's trained parameters to the unsharded ones; back, from gradients to their shards."""

    @staticmethod
    def forward(ctx: Any, call: Call, *shards: Tensor) -> Any:
        ctx.call = call
        with local_mode():
            ctx.shapes = [tuple(shard.shape) for shard in shards]
            return tuple(view for bucket in call.group.buckets if bucket.trains for view in bucket.views())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call, shapes, name = ctx.call, ctx.shapes, ctx.call.group.name

        def leave(*gradients: Tensor) -> Any:
            with _no_grad():
                shards = call.group.leave_backward(call, gradients)
                return tuple(shard.reshape(shape) for shard, shape in zip(shards, shapes, strict=True))

        with local_mode():
            shards = once_differentiable(leave, lambda: f"a parameter of {name}, sharded by fully_shard,", *gradients)
        return (None, *shards) if isinstance(shards, tuple) else (None, shards)


def unsharded_tensors(group: ParameterGroup, call: Call | None) -> list[Any]:
    """Return the unsharded parameters of a gathered group, in the order of its buckets.

    Args:
        group: the group.
        call: records the trained ones for backward; None: plain values.
    """
    with local_mode():
        if call is None or not group.trains:
            with _no_grad():
                tensors = [view for bucket in group.buckets for view in bucket.views()]
        else:
            # A function checks gradients against its inputs' shapes, and of a Parameter it knows the one that it was
            # made with. An alias has the shape of the data.
            shards = [alias(p.parameter) for bucket in group.buckets if bucket.trains for p in bucket.parameters]
            recorded = _Unshard.apply(call, *shards)
            rest = iter(recorded if isinstance(recorded, tuple) else (recorded,))
            tensors = []
            for bucket in group.buckets:
                if bucket.trains:
                    tensors += [next(rest) for _ in bucket.parameters]
                else:
                    with _no_grad():
                        tensors += bucket.views()
    return [parameter.dress(tensor) for parameter, tensor in zip(group.parameters, tensors)]


class ParameterGroup(Group["RootContext"]):
    """A group of one Cell.

    Attributes:
        standing: the tensors registered in the Cells for the parameters now.
        kept_unsharded: the parameters stay gathered for the next micro-batch.
        has_values: every parameter has values.
        active: the calls whose backward has begun and is not over.
    """

    managed = ManagedParameter
    bucket = Bucket
    buckets: list[Bucket]
    parameters: list[ManagedParameter]

    def __init__(self, *args: Any) -> None:
        self.standing: list[Any] = []
        self.kept_unsharded = self.has_values = False
        self.active: set[Call] = set()
        self.overlaps = get_platform().devices.capabilities.native_collectives
        super().__init__(*args)

    def registered_tensors(self) -> Iterator[tuple[Any, ManagedParameter]]:
        for parameter, standing in zip(self.parameters, self.standing):
            parameter.check_place(standing, self.class_name)
            yield parameter.parameter, parameter
            yield standing, parameter

    def add(self, parameters: Sequence[ManagedParameter]) -> None:
        super().add(parameters)
        self.standing = [parameter.parameter for parameter in self.parameters]
        self.has_values = False

    # ---- parameters ----
    def check_values(self) -> None:
        """Raise where parameters have no values yet."""
        if not self.has_values:
            for bucket in self.buckets:
                bucket.check()
            self.has_values = True

    def start_unshard(self) -> None:
        self.check_values()
        super().start_unshard()

    @contextmanager
    def while_gathering(self) -> Iterator[None]:
        with _no_grad(), local_mode():
            yield

    def show_unsharded(self, arrived: bool) -> None:
        if arrived:
            for bucket in self.buckets:
                bucket.source = None
        if self.user_unsharded:
            self.show(unsharded_tensors(self, None))

    def free(self, ranks: PostForwardRanks | None) -> None:
        self.kept_unsharded = False
        self.hide()
        for bucket in self.buckets:
            bucket.release(ranks)

    def stale(self) -> bool:
        # Parameters have no version that tells of an optimizer's step.
        return self.gathering is not None or not (self.user_unsharded or self.kept_unsharded)

    def show(self, tensors: Sequence[Any]) -> list[Any]:
        """Register ``tensors`` in the Cells; return the tensors registered before."""
        before, self.standing = self.standing, list(tensors)
        for parameter, tensor in zip(self.parameters, tensors):
            for cell, name in parameter.places:
                cell._params[name] = tensor
        return before

    def hide(self) -> None:
        """Register the sharded parameters in the Cells."""
        self.show([parameter.parameter for parameter in self.parameters])

    # ---- backward ----
    def show_again(self) -> None:
        """Register unsharded tensors for a forward inside backward (recomputation), which is recorded."""
        tensors = unsharded_tensors(self, None)
        for parameter, tensor in zip(self.parameters, tensors):
            if parameter.parameter.requires_grad:
                tensor.requires_grad_(True)
        self.show(tensors)

    def leave_backward(self, call: Call, gradients: Sequence[Tensor]) -> list[Any]:
        """End the backward of ``call``: free the parameters, reduce the gradients.

        Returns:
            The shards of the gradients of the trained buckets' parameters.
        """
        call.done = True
        self.active.discard(call)
        self.calls.discard(call)
        self.note("left")
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
        self.note("reduce")
        for bucket, flat in zip(trained, flats):
            bucket.divisor = self.total_divisor
            shards += attribute_to(
                self.modules, bucket.reduce, flat, self.reduce_op, over_replicas=self.reduces_over_replicas
            )
        self.note("reduced")
        return shards

    def _leave_in_order(self, trained: Sequence[Bucket], flats: Sequence[Tensor]) -> list[Any]:
        """Reduce in deterministic mode: the last call returns the sum, the others zeros.

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
        self.agree(number + 1)
        shards: list[Any] = []
        self.note("reduce")
        for bucket in trained:
            assert bucket.sums is not None
            bucket.sums.end_micro_batch(number)
            bucket.divisor = self.total_divisor
            shards += attribute_to(self.modules, bucket.reduce_in_order, number + 1, self.reduce_op)
        self.note("reduced")
        return shards

    def end_micro_batch(self) -> str | None:
        """End a micro-batch, in deterministic mode.

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
        """Free the parameters after the last call's backward, or keep them unsharded for the next micro-batch."""
        self.active.clear()
        if self.reduces or self.reshard_after_backward:
            self.reshard()
        elif self.unsharded:
            self.hide()
            self.kept_unsharded = True

    def abandon(self) -> None:
        self.active.clear()
        self.reshard()
        if self.deterministic:
            self.ended = False
            self.calls.clear()
            self.forget_gradients()

    def recover(self) -> None:
        """After a backward pass that raised, whose end the engine calls nobody at: reset all groups of the model."""
        if self.context is not None and self.context.backward and not in_backward():
            self.context.abandon()

    def forget_gradients(self) -> None:
        """Drop gradients that wait for a backward pass that reduces them."""
        self.micro_batches = 0
        for bucket in self.buckets:
            bucket.forget_gradients()


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
