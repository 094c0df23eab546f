"""Functions of users: values with gradients, custom autograd functions, and sharding rules that they register."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hp_dtensor.functions import apply_function
from hp_dtensor.layout.placements import Replicate
from hp_dtensor.rules.factors import Solution, check_results, choose
from hp_dtensor.rules.planning import Binding, Call
from hp_dtensor.torch.dtensor import DTensor, local_of
from hp_dtensor.torch.ops.dispatching import calls, dispatch
from hp_dtensor.torch.ops.dispatching.calls import name_of
from hp_dtensor.torch.ops.functions import BINDINGS
from hp_platform.extend import map_nested


def parallelize_value_and_grad(
    fn: Callable[..., Any],
    grad_position: int | Sequence[int] | None = 0,
    weights: Any = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes ``fn`` and its gradients, as ``mindspore.value_and_grad`` does.

    Args:
        fn: returns a scalar loss, a DTensor or a plain tensor; with ``has_aux`` a tuple of the loss and more.
        grad_position: indices of the inputs to differentiate by; None: none.
        weights: parameters to differentiate by, such as ``module.parameters()``; None: none.
        has_aux: differentiate only the first result.

    Returns:
        A function of the arguments of ``fn``. It returns the results of ``fn``, with the loss as a plain global value,
        detached, and the gradients: those of the inputs, those of the weights, or a pair of the two. One input (an int,
        not a tuple) or one weight (a tensor, not a list) has one gradient, several have a tuple. The gradient of a
        DTensor is a DTensor in its layout; that of an unused input is zero. ``.grad`` is not changed.

    Raises:
        ValueError: the loss is not a scalar.
    """
    chosen = [weights] if isinstance(weights, torch.Tensor) else None if weights is None else list(weights)
    positions = () if grad_position is None else (grad_position,) if isinstance(grad_position, int) else grad_position

    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = list(args)
        for position in positions:
            inputs[position] = args[position].detach().requires_grad_()
        with torch.enable_grad():
            out = fn(*inputs, **kwargs)
        loss, rest = (out[0], tuple(out[1:])) if has_aux else (out, ())
        if loss.numel() != 1:
            raise ValueError(f"parallelize_value_and_grad: the loss has shape {tuple(loss.shape)}, it must be a scalar")
        sources = [inputs[position] for position in positions] + (chosen or [])
        if isinstance(loss, DTensor):
            placements = [p if p.is_partial("sum") else Replicate() for p in loss.placements]
            loss = loss.redistribute(placements=placements)
        grads = torch.autograd.grad(loss, sources, allow_unused=True)
        grads = tuple(torch.zeros_like(s) if g is None else g.detach() for g, s in zip(grads, sources, strict=True))
        value = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
        by_input: Any = grads[: len(positions)]
        by_weight: Any = grads[len(positions) :]
        by_input = by_input[0] if isinstance(grad_position, int) else by_input
        by_weight = by_weight[0] if isinstance(weights, torch.Tensor) else by_weight
        gradients = by_weight if grad_position is None else by_input if weights is None else (by_input, by_weight)
        return ((value, *rest) if has_aux else value), gradients

    return run


class DFunction(torch.autograd.Function):
    """Base of a distributed autograd function: ``forward`` and ``backward`` see local tensors.

    ``_op_name`` names the sharding rule, which determines the layouts of the operands and of the result. The result's
    shape follows from the rule's factors.

    Example:
        >>> class Scale(DFunction):
        ...     _op_name = "mul"
        ...
        ...     @staticmethod
        ...     def forward(ctx, x, y):
        ...         ctx.save_for_backward(x, y)
        ...         return x * y
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         x, y = ctx.saved_tensors
        ...         return grad * y, grad * x
    """

    _op_name: str = ""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run the function on Tensors or DTensors.

        Raises:
            ValueError: ``_op_name`` names no rule, or Tensors and DTensors are mixed.
        """
        return apply_function(cls, super().apply, args, torch.Tensor)


Rule = TypeVar("Rule", bound=Callable[..., Any])


def register_sharding(op: Any) -> Callable[[Rule], Rule]:
    """Register a function as the sharding rule of an operation, in place of any rule that the operation has.

    Example:
        >>> @torch.library.custom_op("mine::softcap", mutates_args=())
        ... def softcap(x: torch.Tensor, cap: float) -> torch.Tensor: ...
        >>> @register_sharding(softcap)
        ... def _(x, cap):
        ...     placements = [Replicate(), *(Shard(dim) for dim in range(len(x.shape)))]
        ...     return [([placement], [placement, None]) for placement in placements]

    The function is called once for each combination of layouts and arguments, with the operation's arguments, a
    ``TensorSpec`` (``shape``, ``placements``, ``mesh``) instead of a tensor, and the type ``float`` instead of a float,
    because the plan serves every float. It returns the placements that are right on one axis of the mesh, whatever the
    other axes do, as pairs: placements of the results, and placements of the arguments, None for one that is not a
    tensor. On each axis the operands are redistributed to the pair that moves the fewest bytes, the first of equal
    ones. The operation then runs on local tensors, so its own backward computes the gradients; the gradient of a
    replicated operand is summed if the results are sharded.

    Args:
        op: an operation of ``torch.library`` (the custom op, ``torch.ops.mine.softcap``, or an overload of it), a
            function of torch, or a list of these. A custom op needs its ``register_fake``, from which the results'
            shapes follow.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        TypeError: a plain Python function, which runs operation by operation and is not intercepted.
        NotImplementedError: an operation that writes to its arguments.

    When the operation is called:

    Raises:
        TypeError, ValueError: the function did not return such pairs, or none of them fits.
        RuntimeError: the operation's local result does not have the shape that the rule implies.
    """
    ops = [form for each in (op if isinstance(op, list) else [op]) for form in _forms(each)]

    def decorate(rule: Rule) -> Rule:
        def solve(call: Call, shapes: Sequence[tuple[int, ...]]) -> Solution:
            values = [_described(value) for value in call.args]
            named = {name: _described(value) for name, value in call.kwargs.items()}
            operands = [tensor for tensor in call.tensors if tensor is not None]
            sizes = [tensor.element_size() for tensor in operands]
            return choose(name_of(call.func), rule(*values, **named), call.specs, sizes, shapes)

        for form in ops:
            BINDINGS[form] = Binding("registered", solve=solve, local=_checked, hot=False)
            dispatch._SPECIAL.pop(form, None)
        dispatch._PLANS.clear()
        return rule

    return decorate


def _forms(op: Any) -> list[Any]:
    """Return the operation in the forms in which it may be intercepted."""
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if calls.writes(op):
        raise NotImplementedError(
            f"register_sharding: {op if isinstance(op, torch._ops.OpOverload) else name_of(op)} writes"
            " to its arguments, which a registered rule can't express; run it on local tensors with custom_shard"
        )
    if isinstance(op, torch._ops.OpOverload):
        return [op, op.overloadpacket] if op.overloadpacket.overloads() == [op._overloadname] else [op]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [op, *(form for name in op.overloads() for form in _forms(getattr(op, name)))]
    if isinstance(op, types.FunctionType) and not op.__module__.startswith("torch"):
        if "handle_torch_function" not in op.__code__.co_names and not hasattr(op, "__wrapped__"):
            raise TypeError(
                f"register_sharding: {op.__qualname__} is a plain Python function, of which only the operations inside"
                " are intercepted; make it one operation with torch.library.custom_op, or run it on local tensors with"
                " custom_shard"
            )
        op = getattr(op, "__wrapped__", op)  # torch.overrides.wrap_torch_function
    if not callable(op):
        raise TypeError(f"register_sharding: an operation is needed, got {type(op).__name__} {op!r}")
    return [op]


def _described(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value._spec
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    return float if type(value) is float else value


def _plain(value: Any) -> Any:
    return local_of(value) if isinstance(value, DTensor) else value


def _checked(call: Call) -> Any:
    """Return the operation on plain local tensors, with a check of the shapes that it returns."""
    func, layouts = call.func, call.results

    def run(*args: Any, **kwargs: Any) -> Any:
        # Plain, because an operation's backward gets the very objects that it saved.
        out = func(*map_nested(_plain, args), **{name: map_nested(_plain, value) for name, value in kwargs.items()})
        results = [
            value for value in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(value, torch.Tensor)
        ]
        check_results(name_of(func), "operation", [value.shape for value in results], layouts)
        return out

    return run
