"""Functions of users on MindSpore: values with gradients, custom autograd functions, rules that they register."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mindspore
from mindspore import Tensor, _Function, ops
from mindspore.graph.api import _pynative_executor
from mindspore.ops import Primitive

from hp_dtensor.functions import apply_function
from hp_dtensor.layout.placements import Replicate
from hp_dtensor.layout.spec import grad_spec
from hp_dtensor.mindspore.backward import autograd
from hp_dtensor.mindspore.backward.autograd import local_mode
from hp_dtensor.mindspore.dtensor import DTensor, local_of, local_view, redistribute, wrap
from hp_dtensor.mindspore.ops.dispatching import dispatch
from hp_dtensor.mindspore.ops.functions import BINDINGS
from hp_dtensor.rules.factors import Solution, check_results, choose
from hp_dtensor.rules.planning import Binding, Call
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
        weights: parameters to differentiate by, such as ``cell.trainable_params()``; None: none.
        has_aux: differentiate only the first result.

    Returns:
        A function of the arguments of ``fn``. It returns the results of ``fn``, with the loss as a plain global value,
        and the gradients as ``mindspore.value_and_grad`` arranges them. The gradient of a DTensor is a DTensor in its
        layout.

    Raises:
        ValueError: the loss is not a scalar.
    """
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


class DFunction(_Function):
    """Base of a distributed autograd function: ``forward`` and ``backward`` see local tensors.

    ``_op_name`` names the sharding rule, which determines the layouts of the operands and of the results. The results'
    shapes follow from the rule's factors.

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
        return apply_function(cls, super().apply, args, Tensor)


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
