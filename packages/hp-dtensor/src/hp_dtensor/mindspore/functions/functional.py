"""MindSpore's functional style on DTensors: values with gradients, and custom autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, _Function, ops
from mindspore.graph.api import _pynative_executor  # type: ignore[attr-defined]

from hp_dtensor.functions.local_map import apply_function
from hp_dtensor.layout.placements import Replicate
from hp_dtensor.layout.spec import grad_spec
from hp_dtensor.mindspore.backward import autograd
from hp_dtensor.mindspore.dtensor import DTensor, local_of, local_view, redistribute, wrap


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
