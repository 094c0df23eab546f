"""Functions of users on MindSpore: values with gradients, custom autograd functions, rules that they register."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mindspore
from mindspore import Tensor, _Function, ops
from mindspore.graph.api import _pynative_executor
from mindspore.ops import Primitive

from hp_dtensor.functions import DistributedFunction, registered
from hp_dtensor.layout.placements import Replicate
from hp_dtensor.layout.spec import grad_spec
from hp_dtensor.mindspore.backward import autograd
from hp_dtensor.mindspore.backward.autograd import local_mode
from hp_dtensor.mindspore.dtensor import DTensor, local_of, local_view, redistribute, wrap
from hp_dtensor.mindspore.ops.dispatching import dispatch
from hp_dtensor.mindspore.ops.functions import BINDINGS
from hp_dtensor.rules.factors import check_results
from hp_dtensor.rules.planning import Binding, Call
from hp_platform.extend import map_nested


def value_and_grad(
    fn: Callable[..., Any], grad_position: int | Sequence[int] | None, weights: Any, has_aux: bool
) -> Callable[..., Any]:
    state: dict[str, Any] = {}

    def scalar(*args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        loss, rest = (out[0], tuple(out[1:])) if has_aux else (out, ())
        state["spec"] = None
        if isinstance(loss, DTensor):
            if loss.size != 1:  # raised below: an error raised here would leave MindSpore recording
                state["shape"] = loss.shape
                loss = loss.sum()
            keep = [p if p.is_partial("sum") else Replicate() for p in loss._spec.placements]
            spec = loss._spec.with_placements(keep)
            loss = loss if spec is loss._spec else redistribute(loss, spec)
            state["spec"] = spec
            loss = local_of(loss)
        return (loss, *rest) if has_aux else loss

    weights = list(weights) if weights is not None and not isinstance(weights, Tensor) else weights
    inner = mindspore.value_and_grad(scalar, grad_position, weights, has_aux)

    def run(*args: Any, **kwargs: Any) -> Any:
        autograd.forget()
        outermost = not autograd.grad_enabled() and _pynative_executor.get_current_autodiff_engine_id() == -1
        try:
            value, grads = inner(*args, **kwargs)
        except BaseException:
            if outermost:  # otherwise MindSpore treats all later gradients as part of this one, and keeps recording
                _pynative_executor.clear_res()
            raise
        finally:
            autograd.forget()
        if "shape" in state:
            raise ValueError(
                f"parallelize_value_and_grad: the loss has shape {state.pop('shape')}, it must be a scalar"
            )
        loss, rest = (value[0], tuple(value[1:])) if has_aux else (value, ())
        spec = state["spec"]
        if spec is not None:
            loss = wrap(local_view(loss), spec).full_tensor()
        return ((loss, *rest) if has_aux else loss), _placed(grads, args, grad_position, weights)

    return run


def _placed(grads: Any, args: Any, grad_position: Any, weights: Any) -> Any:
    """Wrap the gradients of DTensors as DTensors."""
    sources: Any = None
    if grad_position is not None:
        sources = args[grad_position] if isinstance(grad_position, int) else tuple(args[i] for i in grad_position)
    if weights is not None:
        by_weight = weights if isinstance(weights, Tensor) else tuple(weights)
        sources = by_weight if grad_position is None else (sources, by_weight)
    return _like(grads, sources)


def _like(grad: Any, source: Any) -> Any:
    if isinstance(source, (tuple, list)):
        if not isinstance(grad, (tuple, list)):  # for a tuple of one position MindSpore returns no tuple
            return _like(grad, source[0])
        return tuple(_like(g, s) for g, s in zip(grad, source, strict=True))
    if not isinstance(source, DTensor) or isinstance(grad, DTensor):
        return grad
    spec = grad_spec(source._spec)
    if tuple(grad.shape) != spec.local_shape:
        # An unused Parameter gets zeros of the shape that it had before it was distributed.
        if grad.asnumpy().any():
            raise RuntimeError(
                f"MindSpore computed a gradient of shape {tuple(grad.shape)} for a DTensor of local shape"
                f" {spec.local_shape}: it used the Parameter's shape from before it was distributed; distribute it"
                " before a kernel reads it"
            )
        grad = ops.zeros(spec.local_shape, grad.dtype)
    return wrap(grad, spec)


class DFunction(DistributedFunction, _Function):
    """A distributed autograd function on MindSpore: see `hp_dtensor.functions.DistributedFunction`."""


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
        solve = registered(rule, lambda call: call.name, lambda tensor: tensor.itemsize)
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
