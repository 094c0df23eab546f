"""Values with gradients in the functional style, and custom autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hp_dtensor.functions.local_map import apply_function
from hp_dtensor.layout.placements import Replicate
from hp_dtensor.torch.dtensor import DTensor


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
    def apply(cls, *args: Any) -> Any:  # type: ignore[override]
        """Run the function on Tensors or DTensors.

        Raises:
            ValueError: ``_op_name`` names no rule, or Tensors and DTensors are mixed.
        """
        return apply_function(cls, super().apply, args, torch.Tensor)
