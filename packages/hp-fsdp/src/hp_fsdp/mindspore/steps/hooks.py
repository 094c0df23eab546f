"""The work before and after a sharded Cell's forward and backward.

Note [Where backward begins and ends]
    The backward of a Cell begins when a gradient has come to one of its outputs: a hook on that tensor. It ends with
    the node that unsharded its parameters: Note [The oldest node] in `hp_fsdp.mindspore.groups.group`.

Note [Forward inside backward]
    Recomputation runs forward again in backward. Inside a Cell whose backward has begun the parameters are gathered,
    and stay so. A Cell that is recomputed as a whole runs as in any forward.

Note [No second derivative]
    The tensors that a recorded backward computes with are freed when that backward ends, and the sum over the ranks is
    not recorded. So neither the gradients of the parameters nor those of the inputs of the outermost Cell can be
    differentiated again: no other path leads into the recorded graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspore import Tensor
from mindspore.common import dtype as mstype
from mindspore.graph.api import _pynative_executor

from hp_dtensor.mindspore.extend import DTensor, alias, grad_enabled, local_mode, once_differentiable, own_dtypes, wrap
from hp_fsdp.mindspore.groups.group import Call, ParameterGroup, RootContext, in_backward, unsharded_tensors
from hp_fsdp.steps.tree import tree_functions

map_tensors, tensors = tree_functions(Tensor)


def run_forward(
    group: ParameterGroup, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a Cell's forward with its parameters gathered, and arrange for its backward.

    Args:
        group: the Cell's group.
        forward: the function to call.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The result of ``forward``.
    """
    context = group.context or RootContext.of(group)
    policy = group.policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        cast = functools.partial(_cast, policy.param_dtype)
        args, kwargs = map_tensors(cast, args), map_tensors(cast, kwargs)
    if group.active:
        output = forward(*args, **kwargs)
    else:
        output = _run(context, group, forward, args, kwargs)
    if policy.output_dtype is not None:
        output = map_tensors(functools.partial(_cast, policy.output_dtype), output)
    return output


def _run(context: RootContext, group: ParameterGroup, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    again = in_backward()
    outermost = context.outermost is None
    if outermost:
        if again:
            context.outermost = group
        else:
            context.begin_forward(group)
    before = None
    try:
        with own_dtypes():  # buffers and collectives have those of the parameters
            context.unshard(group, context.order, group.prefetch_in_forward)
        call = Call(group) if _recording() else None
        if call is not None and group.deterministic:
            group.calls.add(call)
        with own_dtypes():
            before = group.show(unsharded_tensors(group, call))
        if call is not None and outermost:
            args, kwargs = map_tensors(_guard, args), map_tensors(_guard, kwargs)
        output = forward(*args, **kwargs)
        group.note("left")
        group.show(before)
        watched = call is not None and _watch(context, call, output)
        if call is not None and not watched:
            group.calls.discard(call)
        context.finished.append(group)
        reshard = group.reshard_after_forward
        if reshard or (reshard is None and not (watched and group is context.root)):
            group.reshard(before_backward=watched)
        if outermost:
            context.end_forward()
    except BaseException:
        if before is not None:
            group.show(before)
        if outermost and not again:
            context.abandon()
        else:
            group.reshard()
            if outermost:
                context.end_forward()
        raise
    return output


def _recording() -> bool:
    """Tell whether operations are recorded: a gradient is taken, and not inside ``_no_grad``, as recomputation does."""
    return grad_enabled() and _pynative_executor.enable_grad()


def _guard(tensor: Tensor) -> Tensor:
    """Return an alias of an input, whose gradient can't be differentiated: Note [No second derivative]."""
    if not tensor._requires_grad:
        return tensor
    with local_mode():
        inside = alias(tensor)
        Tensor.register_hook(inside, _guarded)
    return wrap(inside, tensor._spec) if isinstance(tensor, DTensor) else inside


def _guarded(gradient: Tensor) -> Tensor:
    with local_mode():
        return once_differentiable(lambda gradient: gradient, _an_input, gradient)


def _an_input() -> str:
    return "an input of a Cell that fully_shard shards"


def _cast(dtype: Any, tensor: Tensor) -> Tensor:
    return tensor.astype(dtype) if tensor.dtype in mstype.float_type and tensor.dtype != dtype else tensor


def _watch(context: RootContext, call: Call, output: Any) -> bool:
    watched = False
    with local_mode():
        for tensor in tensors(output):
            if tensor._requires_grad:
                watched = True
                Tensor.register_hook(tensor, lambda gradient: context.enter_backward(call))
    return watched


def hsdp_sync_stream() -> None:
    """Wait for the reductions of all sharded models that are still under way: on MindSpore none are.

    A backward pass returns its gradients, so it waits for each reduction that it starts.
    """
