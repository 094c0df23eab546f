"""Plain tensors among the operands of a call on DTensors, and results written into a tensor (``out=``)."""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor.functions.modes import replicates_plain
from hp_dtensor.layout.placements import Replicate, kind_of
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.torch.backward import autograd_functions
from hp_dtensor.torch.dtensor import DTensor, wrap
from hp_dtensor.torch.ops.dispatching.calls import name_of, tensors_of
from hp_dtensor.torch.views.overlaps import refuse_overlaps_of_call
from hp_dtensor.torch.views.part_of_view import PartOfView
from hp_platform.extend import map_nested

_impl: Any = torch._C._disabled_torch_function_impl
Tensor = torch.Tensor
_SIZED = ("view", "reshape", "expand", "repeat", "tile", "narrow", "unfold", "unflatten", "new_zeros", "new_ones")
_TAKE_NUMBERS = {getattr(owner, name) for owner in (Tensor, torch) for name in _SIZED if hasattr(owner, name)}
"""Functions whose arguments after the first are sizes: models compute them as tensors, too."""

_SHARED = (
    " Where two modules share it as their weight, give both a style. A module with a style's name takes and returns"
    " DTensors; one with its class, such as ColwiseParallel(), plain tensors."
)


def replicate_plain(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Plain tensors as replicated DTensors: scalars always, others where the user said so.

    Raises:
        ValueError: others (a TypeError would be taken for an operator that is not supported).
        RuntimeError: others, where the DTensor says of itself (``_meets_plain``) why it meets none.
    """
    some = next(tensor for tensor in tensors_of(args, kwargs) if type(tensor) is DTensor)
    mesh = some._spec.mesh

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or type(value) is DTensor:
            return value
        if func in _TAKE_NUMBERS and not value.dim() and not value.is_floating_point():
            return int(value)
        if autograd_functions.is_wrapped(value):
            autograd_functions.refuse("a transform of torch.func around an operation", some)
        if type(value) is not Tensor and not isinstance(value, (torch.nn.Parameter, PartOfView)):
            raise ValueError(f"{name_of(func)}: a {kind_of(value)} can't be mixed with DTensors of hp_dtensor")
        if value.dim() and not replicates_plain():
            if why := some.__dict__.get("_meets_plain"):
                raise RuntimeError(f"{name_of(func)}: {why}")
            shared = _SHARED if hasattr(some, "_is_param") else ""
            raise ValueError(
                f"{name_of(func)}: a plain tensor of shape {tuple(value.shape)} meets a DTensor of shape"
                f" {tuple(some.shape)} placed {some._spec.placements}. Distribute it (distribute_tensor or"
                " DTensor.from_local), or take plain tensors as replicated: `with hp_dtensor.implicit_replication():`"
                + shared
            )
        alias = _impl(Tensor.view_as, (), (value, value)) if value.requires_grad else _impl(Tensor.detach, (), (value,))
        return wrap(alias, TensorSpec.of(mesh, (Replicate(),) * mesh.ndim, value.shape))

    return map_nested(change, tuple(args)), {k: map_nested(change, v) for k, v in kwargs.items()}


def writes_plain(func: Any, first: Any) -> bool:
    """Tell whether a function writes into its first operand, and that is a plain tensor."""
    if type(first) is DTensor or not isinstance(first, Tensor):
        return False
    return name_of(func).rstrip(")").endswith("_") and not name_of(func).endswith("__")


def write_into_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that writes into its first operand, a plain tensor, with gathered values.

    The plain tensor goes on being one, taken as replicated, and its gradient reaches the DTensors. A number goes into
    any: ``torch.nn.utils.clip_grad_norm_`` scales all gradients by one, of plain parameters too.

    Raises:
        ValueError: plain tensors are not taken as replicated here.
    """
    some = next((tensor for tensor in tensors_of(args, kwargs) if type(tensor) is DTensor and tensor.dim()), None)
    if some is not None and not replicates_plain():
        raise ValueError(
            f"{name_of(func)}: writing a DTensor of shape {tuple(some.shape)} into a plain tensor of shape"
            f" {tuple(args[0].shape)}; gather it first: full_tensor()"
        )
    named = {name: map_nested(_whole, value) for name, value in kwargs.items()}
    return func(*map_nested(_whole, args), **named)


def _whole(value: Any) -> Any:
    return value.full_tensor() if type(value) is DTensor else value


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
