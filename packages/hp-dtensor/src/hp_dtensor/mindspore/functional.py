"""MindSpore's functional style on DTensors: values with gradients, and autograd functions of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, _Function, ops
from mindspore.graph.api import _pynative_executor  # type: ignore[attr-defined]

from hp_dtensor.functional import apply_function
from hp_dtensor.gradients import grad_spec
from hp_dtensor.layout.placements import Replicate
from hp_dtensor.mindspore.backward import autograd
from hp_dtensor.mindspore.dtensor import DTensor, local_of, local_view, redistribute, wrap

__all__ = ["DFunction", "parallelize_value_and_grad"]


def parallelize_value_and_grad(
    fn: Callable[..., Any],
    grad_position: int | Sequence[int] | None = 0,
    weights: Any = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes ``fn`` and its gradients, as ``mindspore.value_and_grad`` does.

    Args:
        fn: returns a scalar loss, a DTensor or a plain tensor; with ``has_aux`` a tuple of the loss and more.
        grad_position: which inputs to differentiate by; None: none.
        weights: parameters to differentiate by, such as ``cell.trainable_params()``; None: none.
        has_aux: the gradient is that of the first result alone.

    Returns:
        A function of the arguments of ``fn``. It returns what ``fn`` does, a loss that was a DTensor as the whole plain
        value, and the gradients as ``mindspore.value_and_grad`` arranges them. The gradient of a DTensor is a DTensor
        of its layout.

    Raises:
        ValueError: the loss is not a scalar.
    """
    state: dict[str, Any] = {}

    def scalar(*args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        loss, rest = (out[0], tuple(out[1:])) if has_aux else (out, ())
        state["spec"] = None
        if isinstance(loss, DTensor):
            if loss.size != 1:  # told below: an error raised in here would leave MindSpore recording
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
            if outermost:  # MindSpore would take all later gradients for parts of this one, and go on recording
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

    def place(grad: Any, source: Any) -> Any:
        if isinstance(source, (tuple, list)):
            if not isinstance(grad, (tuple, list)):  # of a tuple of one position MindSpore returns no tuple
                return place(grad, source[0])
            return tuple(place(g, s) for g, s in zip(grad, source, strict=True))
        if not isinstance(source, DTensor) or isinstance(grad, DTensor):
            return grad
        spec = grad_spec(source._spec)
        if tuple(grad.shape) != spec.local_shape:
            # One that took no part gets zeros of the shape that it was made with, before it was distributed.
            if grad.asnumpy().any():
                raise RuntimeError(
                    f"MindSpore made a gradient of shape {tuple(grad.shape)} for a DTensor whose part is"
                    f" {spec.local_shape}: it took the Parameter for what it was before it was distributed; distribute"
                    " it before a kernel reads it"
                )
            grad = ops.zeros(spec.local_shape, grad.dtype)
        return wrap(grad, spec)

    return place(grads, sources)


class DFunction(_Function):
    """Base of a distributed autograd function: ``forward`` and ``backward`` see local tensors.

    ``_op_name`` names the sharding rule that says in what layouts the local function is right, and what layout its
    results have; they have the shape that the rule's factors give.

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
