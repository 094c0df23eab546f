"""Functions of users: values with gradients, custom autograd functions, and sharding rules that they register."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hp_dtensor.functions import DistributedFunction, registered
from hp_dtensor.layout.placements import Replicate
from hp_dtensor.rules.factors import check_results
from hp_dtensor.rules.planning import Binding, Call
from hp_dtensor.torch.dtensor import DTensor, local_of
from hp_dtensor.torch.ops.dispatching import calls, dispatch
from hp_dtensor.torch.ops.dispatching.calls import name_of
from hp_dtensor.torch.ops.functions import BINDINGS
from hp_platform.extend import map_nested


def value_and_grad(
    fn: Callable[..., Any], grad_position: int | Sequence[int] | None, weights: Any, has_aux: bool
) -> Callable[..., Any]:
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


class DFunction(DistributedFunction, torch.autograd.Function):
    """A distributed autograd function on PyTorch: see `hp_dtensor.functions.DistributedFunction`."""


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
        solve = registered(rule, lambda call: name_of(call.func), lambda tensor: tensor.element_size())
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
