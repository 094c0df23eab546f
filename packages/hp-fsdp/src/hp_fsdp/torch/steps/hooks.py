"""The work before and after a sharded module's forward and backward.

Note [Where backward begins and ends]
    The backward of a module begins when the node that made one of its outputs is about to run: a pre-hook on that node.
    It ends when the gradient leaves through one of its inputs: each input that needs a gradient is viewed once on the
    way in, and the view's node has a hook. The engine runs the youngest node that is ready, and the view is older than
    all nodes of the module; so when it runs, all of them have run, and the gradients of the parameters (leaves go
    first) are there. Groups whose inputs need no gradient end with the backward pass.

Note [Outputs written in place]
    A later write (``logits.div_(t)``) gives an output a new node. That node leads to the old one, and the pre-hook
    runs, unless the output is a view: then the new history is that of its base, and the view's old node is on no path
    any more. The base's node still is. So where the module made the base as well, the base's node has the hook too. An
    input that the module wrote in place is an output in the same way.

Note [Gradients by other ways]
    A loss may be made of a tensor that is no output: an activation that a hook kept, the logits of a router. Gathering
    follows use: right after a module's forward comes a mark, a root of each backward pass, which runs before all nodes
    that the forward made (Note [Marks] in `hp_dtensor.torch.backward.engine`). If the pass comes to a parameter of the
    group, the group is gathered there. Parameters are the same for all calls, so this holds for the last call, while no
    earlier one waits for its backward; else only the outputs count, and a pass that needs freed parameters is refused:
    their version is another one than that which was saved. So it is with ``torch.autograd.grad`` by inputs alone, of
    whose pass the engine does not say what it comes to.

    Gradients that arrive are reduced whatever way they came: when they leave through an input of the module, or at the
    end of the pass. If no module's backward began at all, the optimizer's step refuses them.

Note [Writes in forward]
    What forward writes to a gathered parameter would be lost when it is freed, and each rank, or replica, may have
    written something else. The buffer's version tells of it, but not of writes by ``parameter.data``. So the first
    forward in training, and the first one in evaluation, compare the contents before and after as well.

Note [Forward inside backward]
    Activation checkpointing runs forward again in backward. The hooks of the first run are on the graph already; the
    second run only needs the parameters, which stay until the group's backward ends.

Note [Gradients put off]
    In a frame that puts weights' gradients off, a backward pass leaves parameters without them; the frame runs autograd
    once more, on the parameters alone. A hook on each parameter makes that a backward pass of the group: its end takes
    the gradients and reduces them. With ``set_requires_gradient_sync(False)`` around the first pass there is
    one reduction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

from hp_dtensor.torch.extend import DTensor, wrap
from hp_fsdp.steps.tree import in_dtypes, tree_functions
from hp_fsdp.torch.groups.group import Call
from hp_fsdp.torch.steps.context import RootContext, RootGroup
from hp_platform.frames import current_frame
from hp_platform.torch.internals import (
    backward_id,
    get_base,
    get_grad_fn,
    get_requires_grad,
    next_node_number,
    without_torch_function,
)

map_tensors, tensors = tree_functions(torch.Tensor)


def run_forward(module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's forward with its parameters gathered, and arrange for its backward; return its result."""
    group: RootGroup = module._hsdp_group
    if group.straight and group.unsharded and not torch.is_grad_enabled():
        run = functools.partial(_run_straight, forward)
    else:
        run = functools.partial(_run, group.context or RootContext.of(group), group, module, forward)
    return in_dtypes(group.policy, _cast, map_tensors, run, args, kwargs)


def _run(
    context: RootContext, group: RootGroup, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    if backward_id() != -1:
        return _run_again(context, group, forward, args, kwargs)
    outermost = context.outermost is None
    if outermost:
        context.begin_forward(group)
    try:
        context.unshard(group, context.order, group.prefetch_in_forward)
        current = current_frame()
        if current is not None and current.weights is not None:
            context.expect_owed(group)
        watch = torch.is_grad_enabled()
        group.awaited = group.awaited or watch
        span = group.span
        begins = span is None or span.begins(module)
        if span is not None and span.around is not None and watch:
            forward = span.around(forward)
        given, first = (args, kwargs) if kwargs else args, next_node_number()
        if watch and begins:
            group.note_call()
            with without_torch_function():
                watch_input = functools.partial(_watch_input, group.leave_backward)
                args = map_tensors(watch_input, args)
                if kwargs:
                    kwargs = map_tensors(watch_input, kwargs)
        versions = group.versions()
        contents = None if module.training in group.compared_modes else group.contents()
        output = forward(*args, **kwargs)
        if group.versions() != versions or (contents is not None and group.contents() != contents):
            raise RuntimeError(group.written())
        if contents is not None:
            group.compared_modes.add(module.training)
        context.trace.append(("left", group, perf_counter_ns()))
        watched = watch and _watch_outputs(group, output, given, first)
        context.finished.append(group)
        reshard = group.reshard_after_forward
        ends = span is None or span.ends(module)
        if watch and ends:
            group.set_mark()
        if not ends:
            pass
        elif reshard or (reshard is None and not (watched and group is context.root)):
            group.reshard(before_backward=watched)
        else:
            group.keep()
        if outermost:
            context.end_forward()
    except BaseException:
        if outermost:
            context.abandon()
        elif group.span is None:
            group.reshard()
        raise
    return output


def _run_straight(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _run_again(context: RootContext, group: RootGroup, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    context.begin_backward()
    group.in_backward = True
    group.start_unshard()
    context.trace.append(("wait", group, perf_counter_ns()))
    group.finish_unshard()
    context.trace.append(("run", group, perf_counter_ns()))
    return forward(*args, **kwargs)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not dtype else tensor


def _watch_input(hook: Callable[..., None], tensor: torch.Tensor) -> torch.Tensor:
    if not get_requires_grad(tensor):
        return tensor
    view = tensor.view_as(tensor)
    get_grad_fn(view).register_hook(hook)
    return wrap(view, tensor._spec) if isinstance(tensor, DTensor) else view


def _watch_outputs(group: RootGroup, output: Any, given: Any, first: int) -> bool:
    """Call the group's hook before the backward of a module: Note [Outputs written in place].

    Args:
        group: the module's.
        output: the module's output, any nest.
        given: its inputs, which it may have written in place.
        first: the number of the first node that the module made.

    Returns:
        True if there may be a backward pass.
    """
    nodes: list[Any] = []
    watched = False
    enter: Callable[..., None] = group.enter_backward
    if group.deterministic:
        call = Call()
        group.calls.add(call)
        enter = functools.partial(_enter_call, group, call)
    with without_torch_function():
        for tensor in tensors(output):
            if not get_requires_grad(tensor):
                continue
            watched = True
            node = get_grad_fn(tensor)
            if node is None:
                tensor.register_hook(enter)
                continue
            nodes.append(node)
            base = get_base(tensor)
            if base is not None and (node := get_grad_fn(base)) is not None and node._sequence_nr() >= first:
                nodes.append(node)
        for tensor in tensors(given):
            if get_requires_grad(tensor) and (node := get_grad_fn(tensor)) is not None and node._sequence_nr() >= first:
                nodes.append(node)
                watched = True
        for node in nodes:
            group.waiting = node.register_prehook(enter)
    return watched


def _enter_call(group: RootGroup, call: Call, *_: Any) -> None:
    group.calls.discard(call)
    group.enter_backward()
