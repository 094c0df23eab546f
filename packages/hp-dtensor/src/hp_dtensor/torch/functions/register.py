"""register_sharding: a user's own sharding rule for an operation."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hp_dtensor.rules.factors import Solution, check_results, choose
from hp_dtensor.rules.planning import Binding, Call
from hp_dtensor.torch.dtensor import DTensor, local_of
from hp_dtensor.torch.ops.dispatching import dispatch, missing
from hp_dtensor.torch.ops.dispatching.calls import name_of
from hp_dtensor.torch.ops.functions import BINDINGS
from hp_platform.extend import map_nested

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
    if missing.writes(op):
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
