"""Backward passes of which no gradient can be taken: asking for one is an error, not zeros.

Note [Refused when it is used]
MindSpore tells that operations are recorded, not what for. A gradient inside another one is recorded, too, where only
its values are wanted; so is every gradient after an error in a differentiated function. Therefore a backward pass that
is recorded is not refused: its results come from a function whose own backward raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, _Function
from mindspore.graph.api import _pynative_executor

__all__ = ["once_differentiable"]


def once_differentiable(function: Callable[..., Any], what: Callable[[], str], *gradients: Tensor) -> Any:
    """Call ``function`` on gradients so that its result can't be differentiated: trying to raises an error.

    Args:
        function: a function of the gradients that is not recorded; returns a tensor or a tuple of tensors.
        what: says of what they are gradients, the error's subject.
        gradients: plain tensors.
    """
    if _pynative_executor.requires_grad() and any(gradient._requires_grad for gradient in gradients):
        return _Once.apply(function, what, *gradients)
    return function(*gradients)


class _Once(_Function):
    """Calls a function, and has no gradient: Note [Refused when it is used]."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], what: Callable[[], str], *gradients: Tensor) -> Any:  # type: ignore[override]
        ctx.what = what
        results = function(*gradients)  # copied: what shares memory with an argument MindSpore takes for a constant
        return tuple(each.copy() for each in results) if isinstance(results, tuple) else results.copy()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{ctx.what()} was differentiated twice: on MindSpore its gradient is a number that has no gradient itself."
            " Where only the gradient's values are wanted, put them in ops.stop_gradient(); a penalty on gradients"
            " needs the plain model, or torch"
        )
