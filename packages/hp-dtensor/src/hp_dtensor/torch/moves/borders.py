"""What a user says of a value's gradient where it enters or is redistributed: its layout, the dtypes it is sent in."""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor.layout.spec import TensorSpec, grad_spec
from hp_dtensor.torch.backward import autograd
from hp_dtensor.torch.dtensor import DTensor, redistribute, wrap
from hp_dtensor.torch.moves.redistribute import execute
from hp_dtensor.torch.views.kept import drop

_impl: Any = torch._C._disabled_torch_function_impl


class _InDtypes(torch.autograd.Function):
    """A move whose value and whose gradient are sent in dtypes of their own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, src: TensorSpec, dst: TensorSpec, forward: Any, backward: Any) -> Any:
        ctx.layouts, ctx.dtypes = (src, dst, None), (backward or x.dtype, x.dtype)
        return execute(x.to(forward or x.dtype), src, dst).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        drop(None)
        sent, own = ctx.dtypes
        return autograd.moved_back(grad.to(sent), *ctx.layouts).to(own), None, None, None, None


def gradient_as(local: torch.Tensor, spec: TensorSpec, gradient: TensorSpec) -> torch.Tensor:
    """Return a local tensor of layout ``spec`` whose gradient leaves in the layout ``gradient``."""
    return autograd.GradientMoved.apply(local, grad_spec(spec), gradient)


def redistribute_in(
    x: DTensor, spec: TensorSpec, forward_dtype: torch.dtype | None, backward_dtype: torch.dtype | None
) -> DTensor:
    """``x`` in another layout of its mesh, the value and its gradient sent in dtypes of their own.

    Args:
        x: a DTensor.
        spec: the layout.
        forward_dtype: dtype of the result; None: that of ``x``.
        backward_dtype: dtype in which the gradient is sent back; None: that of ``x``.
    """
    if spec is x._spec:  # nothing is sent
        cast: Any = x if forward_dtype is None else x.to(forward_dtype)
        return redistribute(cast, spec)
    with torch._C.DisableTorchFunctionSubclass():
        local = _impl(torch.Tensor.view_as, (), (x, x))
        return wrap(_InDtypes.apply(local, x._spec, spec, forward_dtype, backward_dtype), spec)
