"""From sharded to unsharded parameters, as one differentiable function.

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

from typing import TYPE_CHECKING, Any

from mindspore import Tensor, _Function, _no_grad

from hp_dtensor.mindspore.extend import alias, local_mode, once_differentiable

if TYPE_CHECKING:
    from hp_fsdp.mindspore.groups.group import ParameterGroup


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
    def forward(ctx: Any, call: Call, *shards: Tensor) -> Any:  # type: ignore[override]
        ctx.call = call
        with local_mode():
            ctx.shapes = [tuple(shard.shape) for shard in shards]
            return tuple(view for bucket in call.group.buckets if bucket.trains for view in bucket.views())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
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
