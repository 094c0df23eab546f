"""``out=``: a result is computed as without it, and written into the DTensor that was given."""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor.layout.placements import Replicate
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.torch.dtensor import DTensor, wrap
from hp_dtensor.torch.ops.dispatching.calls import name_of, tensors_of
from hp_dtensor.torch.views.overlaps import refuse_overlaps_of_call

T = torch.Tensor
_FACTORIES = {torch.arange, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones, torch.zeros}
"""They make the same on every rank."""


def write_out(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` with ``out=``, a DTensor or a tuple of them.

    Raises:
        RuntimeError: the results require gradients, or have another shape or a dtype that ``out`` can't hold, or
            ``out`` shows some of the elements that are read, not each at its own place.
        ValueError: plain tensors on one side, DTensors on the other, or a Partial to be written.
    """
    named = {name: value for name, value in kwargs.items() if name != "out"}
    several = isinstance(kwargs["out"], (list, tuple))
    outs = list(kwargs["out"]) if several else [kwargs["out"]]
    operands: list[Any] = list(tensors_of(args, named))
    what = f"{name_of(func)} with out="
    if not all(isinstance(tensor, DTensor) for tensor in outs):
        plain = next(tensor for tensor in outs if not isinstance(tensor, DTensor))
        raise ValueError(
            f"{what} a plain tensor of shape {tuple(plain.shape)}, of DTensors: the result is distributed; use the"
            " returned tensor, or copy_ its full_tensor()"
        )
    if func not in _FACTORIES and not any(isinstance(tensor, DTensor) for tensor in operands):
        raise ValueError(
            f"{what} a DTensor of shape {tuple(outs[0].shape)}, of nothing distributed: distribute them first"
            " (distribute_tensor or DTensor.from_local), or copy_ the distributed result"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*outs, *operands)):
        raise RuntimeError(
            f"{what}: functions with out= don't support automatic differentiation, and an argument requires gradients;"
            " use the returned tensor, or torch.no_grad()"
        )
    for tensor in outs:
        if tensor.is_partial():
            raise ValueError(f"{what} a DTensor placed {tensor.placements}: reduce_partial() it first")
    refuse_overlaps_of_call(func, args, kwargs)
    result = func(*args, **named)
    if func in _FACTORIES:
        result = wrap(result, TensorSpec.of(outs[0]._spec.mesh, [Replicate()] * outs[0]._spec.mesh.ndim, result.shape))
    for tensor, value in zip(outs, result if several else [result], strict=True):
        _check(what, tensor, value)
    for tensor, value in zip(outs, result if several else [result], strict=True):
        tensor.copy_(value)
    return type(result)(outs) if several else outs[0]


def _check(what: str, out: Any, value: Any) -> None:
    if out.shape != value.shape:
        raise RuntimeError(
            f"{what} a DTensor of shape {tuple(out.shape)}: the result has shape {tuple(value.shape)}, and a"
            " distributed tensor can't be resized; use the returned tensor"
        )
    if not torch.can_cast(value.dtype, out.dtype):
        raise RuntimeError(f"{what}: result type {value.dtype} can't be cast to the desired output type {out.dtype}")
