"""register_sharding: a user's own sharding rule for a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mindspore import Tensor, ops
from mindspore.ops import Primitive

from hp_dtensor.mindspore.backward.autograd import local_mode
from hp_dtensor.mindspore.dtensor import DTensor
from hp_dtensor.mindspore.ops.dispatching import dispatch
from hp_dtensor.mindspore.ops.dispatching.bindings import BINDINGS
from hp_dtensor.rules.factors import Solution, check_results, choose
from hp_dtensor.rules.planning import Binding, Call
from hp_platform.extend import map_nested

Rule = TypeVar("Rule", bound=Callable[..., Any])


def register_sharding(op: Any) -> Callable[[Rule], Rule]:
    """Register a function as the sharding rule of a kernel, in place of any rule that the kernel has.

    Example:
        >>> @register_sharding("Lgamma")
        ... def _(x):
        ...     placements = [Replicate(), *(Shard(dim) for dim in range(len(x.shape)))]
        ...     return [([placement], [placement]) for placement in placements]

    As on PyTorch, the function is called once for each combination of layouts and arguments, with the kernel's
    arguments, a ``TensorSpec`` instead of a tensor and ``float`` instead of a float. It returns the placements that are
    right on one axis of the mesh, as pairs: placements of the results, and placements of the arguments, None for one
    that is not a tensor. The results' shapes are found once, by running the kernel on zeros of the global shapes.

    Args:
        op: the kernel's name as in the error "no sharding rule", a primitive or its class, or a list of these.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        TypeError: a function, which MindSpore runs kernel by kernel.
        NotImplementedError: a kernel that writes to its arguments.
    """
    names = [_name(each) for each in (op if isinstance(op, list) else [op])]

    def decorate(rule: Rule) -> Rule:
        def solve(call: Call, shapes: Sequence[tuple[int, ...]]) -> Solution:
            values = [_described(value) for value in call.args]
            named = {name: _described(value) for name, value in call.kwargs.items()}
            sizes = [tensor.itemsize for tensor in call.tensors if tensor is not None]
            return choose(call.name, rule(*values, **named), call.specs, sizes, shapes)

        for name in names:
            BINDINGS[name] = Binding("registered", shapes=_asked, local=_checked, solve=solve)
        dispatch.forget_plans()
        return rule

    return decorate


def _name(op: Any) -> str:
    if isinstance(op, type) and issubclass(op, Primitive):
        op = op.__name__
    name = op.name if isinstance(op, Primitive) else op
    if not isinstance(name, str):
        raise TypeError(
            f"register_sharding: {getattr(op, '__name__', op)!r} is not a kernel: MindSpore intercepts the kernels"
            ' inside a function. Pass the name in the error "no sharding rule", or run it with custom_shard'
        )
    if name.startswith("Inplace") or name in ("Assign", "AssignAdd", "AssignSub"):
        raise NotImplementedError(
            f"register_sharding: {name} writes to its arguments, which a registered rule can't express; run it on local"
            " tensors with custom_shard"
        )
    return name


def _described(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value._spec
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    return float if type(value) is float else value


def _zeros(value: Any) -> Any:
    return ops.zeros(value._spec.shape, value.dtype) if isinstance(value, DTensor) else value


def _asked(call: Call) -> list[Any]:
    named = {name: map_nested(_zeros, value) for name, value in call.kwargs.items()}
    arguments = map_nested(_zeros, list(call.args)), named
    with local_mode():
        out = call.func(*arguments)
    return [tuple(v.shape) for v in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(v, Tensor)]


def _checked(call: Call) -> Any:
    """Return the kernel with a check of the shapes that it returns."""
    kernel, layouts = call.func, call.results

    def checked(args: Any, kwargs: Any) -> Any:
        out = kernel(args, kwargs)
        results = [v for v in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(v, Tensor)]
        check_results(call.name, "kernel", [value.shape for value in results], layouts)
        return out

    return checked
