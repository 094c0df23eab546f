"""Tensors made on another one's mesh: laid out as it is where they have its shape, else replicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_dtensor.layout.placements import Replicate
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.torch.dtensor import wrap

_impl: Any = torch._C._disabled_torch_function_impl
T = torch.Tensor


def new(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.new_zeros(size)`` on x's mesh: laid out as x where it has x's shape, else replicated."""
    x, spec = args[0], args[0]._spec
    size_argument = args[1] if len(args) > 1 else kwargs.get("size", ())
    size = tuple(size_argument) if isinstance(size_argument, (tuple, list)) else args[1:]
    if func is T.new_tensor or size != spec.shape:
        out = _impl(func, (), args, kwargs)
        return wrap(out, TensorSpec.of(spec.mesh, [Replicate()] * spec.mesh.ndim, out.shape))
    spec = spec.with_placements([Replicate() if p.is_partial() else p for p in spec.placements])
    rest = args[2:] if isinstance(size_argument, (tuple, list)) else ()
    return wrap(_impl(func, (), (x, spec.local_shape, *rest), {n: v for n, v in kwargs.items() if n != "size"}), spec)


def new_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.new_empty_strided(size, stride)``: as above, where the strides are those of dims in another order."""
    x, spec, size, stride = args[0], args[0]._spec, tuple(args[1]), tuple(args[2])
    order = sorted(range(len(size)), key=lambda dim: (stride[dim], -dim))
    if size != spec.shape or stride != _dense(size, order):
        out = _impl(func, (), args, kwargs)
        return wrap(out, TensorSpec.of(spec.mesh, [Replicate()] * spec.mesh.ndim, out.shape))
    spec = spec.with_placements([Replicate() if p.is_partial() else p for p in spec.placements])
    order = order if len(order) == len(spec.local_shape) else range(len(spec.local_shape))[::-1]
    return wrap(_impl(func, (), (x, spec.local_shape, _dense(spec.local_shape, order)), kwargs), spec)


def _dense(size: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, ``order`` from the innermost dim to the outermost."""
    strides, step = [1] * len(size), 1
    for dim in order:
        strides[dim] = step
        step *= max(size[dim], 1)
    return tuple(strides)
