"""Primitives of sharding Cells, for `hp_fsdp.fully_shard` and `hp_fsdp.hsdp`, and of the norm of their gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, _no_grad, mint, nn, ops
from mindspore._c_expression import typing
from mindspore.common import dtype as mstype

from hp_dtensor import DeviceMesh
from hp_dtensor.mindspore.extend import local_mode, local_view
from hp_fsdp.axes import DataAxes
from hp_fsdp.groups.managed_params import BLOCK
from hp_fsdp.mindspore.groups.group import ParameterGroup
from hp_fsdp.mindspore.groups.parameter import ManagedParameter, itemsize, on_host, to_device, to_host
from hp_fsdp.mindspore.module import HSDPModule, refuse_rewriting, shard_class
from hp_fsdp.mindspore.optimizers import watch_optimizers as watch_optimizers
from hp_fsdp.options import GroupOptions
from hp_fsdp.port import Anatomy

Pairs = Sequence[tuple[Any, Any]]


@contextmanager
def unrecorded() -> Iterator[None]:
    with _no_grad(), local_mode():
        yield


def pairs(parameters: Any, gradients: Any, where: str) -> list[tuple[Any, Any]]:
    if gradients is None:
        raise TypeError(
            f"{where}: MindSpore has no .grad, so pass gradients=gradients, the gradients that"
            " parallelize_value_and_grad returned, got None"
        )
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [gradients] if isinstance(gradients, Tensor) else list(gradients)
    if len(parameters) != len(gradients):
        raise ValueError(
            f"{where}: {len(parameters)} parameters and {len(gradients)} gradients; give the gradient of each parameter"
        )
    return list(zip(parameters, gradients))


def dtype_of(pairs: Pairs) -> Any:
    return mstype.float64 if any(gradient.dtype == mstype.float64 for _, gradient in pairs) else mstype.float32


def power_sum(
    gradients: Sequence[Tensor], norm_type: float, dtype: Any, pairs: Pairs, mesh: DeviceMesh | None
) -> Tensor:
    result: Any = ops.zeros((1,), dtype)
    for gradient in gradients:
        local = to_device(local_view(gradient))
        if local.numel():  # on CPU the sum of no elements is not zero, but undefined
            size = ops.abs(local.astype(dtype)).reshape(-1)
            if math.isinf(norm_type):
                result = ops.maximum(result, size.max().reshape(1))
            else:
                result = result + (size**norm_type).sum().reshape(1)
    return result


def nonzero(gradients: Sequence[Any], dtype: Any, pairs: Pairs, mesh: DeviceMesh | None) -> Tensor:
    locals_ = [None if each is None else local_view(each).asnumpy() for each in gradients]
    return Tensor(np.array([float(each is not None and (each != 0).any()) for each in locals_]), dtype)


def number(total: Tensor) -> float:
    return float(total.asnumpy().reshape(()))


def of_number(number: float, double: bool, pairs: Pairs) -> Tensor:
    return Tensor(np.array([number], np.float64 if double else np.float32))


def root(total: Any, norm_type: float, pairs: Pairs) -> Tensor:
    return (total if math.isinf(norm_type) else total ** (1.0 / norm_type)).reshape(())


def scale(gradients: Sequence[Tensor], norm: Tensor, max_norm: float, foreach: bool | None) -> None:
    with unrecorded():
        factor = ops.minimum(max_norm / (norm + 1e-6), Tensor(1.0, norm.dtype))
        for gradient in gradients:
            local = local_view(gradient)
            if local.numel():
                # Arithmetic in place (mul_) does nothing on CPU, and a view can't be written to.
                scaled = to_device(local) * factor.astype(gradient.dtype)
                gradient._update_data(to_host(scaled, local.is_pinned()) if on_host(local) else scaled)


# ---- Note [Norms by blocks] ----
def block_sums(
    gradients: Sequence[Tensor | None],
    counts: Sequence[int],
    firsts: Sequence[int],
    norm_type: float,
    dtype: Any,
    mesh: DeviceMesh,
) -> Tensor:
    parts: list[Tensor] = []
    for gradient, count, first in zip(gradients, counts, firsts):
        flat = None if gradient is None else to_device(local_view(gradient)).reshape(-1).astype(dtype)
        blocks = 0 if flat is None else ceil(flat.numel() / BLOCK)
        if flat is not None and blocks:
            flat = flat * flat if norm_type == 2 else ops.abs(flat)
            parts += _zeros(first, dtype) + [_halved(_padded(flat, blocks * BLOCK).reshape(blocks, BLOCK))]
        else:
            first = 0
        parts += _zeros(count - first - blocks, dtype)
    return ops.concat(parts) if len(parts) > 1 else parts[0].copy() if parts else ops.zeros((1,), dtype)


def total(sums: Tensor) -> Tensor:
    size = 1 << max(0, sums.numel() - 1).bit_length()
    return _halved(_padded(sums, size).reshape(1, size))


def _zeros(size: int, dtype: Any) -> list[Tensor]:
    return [ops.zeros((size,), dtype)] if size else []


def _padded(flat: Tensor, size: int) -> Tensor:
    rest = size - flat.numel()
    return ops.concat([flat, ops.zeros((rest,), flat.dtype)]) if rest else flat


def _halved(rows: Tensor) -> Tensor:
    """Return the sum of each row, of a power of two elements."""
    width = rows.shape[1]
    while width > 1:
        width //= 2
        rows = mint.narrow(rows, 1, 0, width) + mint.narrow(rows, 1, width, width)
    return rows.reshape(-1)


MODULE = nn.Cell
FORWARD = "construct"
MANAGED = ManagedParameter
DTYPE = typing.Type
ZERO_COPY = False
ANY_DIM = False
BACKWARD_RETURNS_GRADIENTS = True


def modules_of(module: Any) -> list[nn.Cell]:
    return [module]


def anatomy() -> Anatomy:
    return Anatomy(
        parameters="_params",
        children="_cells",
        sharded=HSDPModule,
        computes=_computes,
        nbytes=lambda parameter: math.prod(parameter.shape) * itemsize(parameter.dtype),
    )


def device_of(modules: Sequence[nn.Cell], parameters: Sequence[ManagedParameter], mesh: DeviceMesh) -> None:
    """Return None: there is no choice."""


def make_group(
    modules: Sequence[nn.Cell],
    parameters: Sequence[ManagedParameter],
    axes: DataAxes,
    device: None,
    options: GroupOptions,
    ignored: Sequence[Parameter],
) -> None:
    refuse_rewriting()
    (module,) = modules
    shard_class(module, ParameterGroup(modules, parameters, axes, device, options, ignored))


def check_contents(modules: Sequence[nn.Cell], ignored_params: Collection[Parameter]) -> None:
    """Refuse BatchNorm's running statistics, which are Parameters that forward would not write to, and recomputation.

    ``Cell.recompute`` of a Cell inside would compute with parameters that are sharded again by then.
    """
    ignored = {id(parameter) for parameter in ignored_params}
    for module in modules:
        _check_recomputed("", module, ignored)
    for name, cell in (pair for module in modules for pair in module.cells_and_names()):
        for key in ("moving_mean", "moving_variance", "running_mean", "running_var"):
            parameter = cell._params.get(key)
            if parameter is not None and id(parameter) not in ignored:
                raise NotImplementedError(
                    f"fully_shard: {name or 'the Cell'} is a {type(cell).__name__}, whose {key} is written in forward"
                    " and so can't be sharded: pass its running statistics in ignored_params, or take another norm"
                )


def _check_recomputed(name: str, cell: nn.Cell, ignored: Collection[int]) -> None:
    for key, child in cell.name_cells().items():
        if isinstance(child, HSDPModule):
            continue
        path = f"{name}.{key}" if name else key
        if child._recompute_cell is not None and any(id(each) not in ignored for each in child._params.values()):
            raise NotImplementedError(
                f"fully_shard: {path!r}, a {type(child).__name__}, is computed again by Cell.recompute, without its"
                " parameters: shard it as well, before the Cell around it, or wrap it in hp_offload.checkpoint_wrapper"
            )
        _check_recomputed(path, child, ignored)


def _computes(cell: nn.Cell) -> bool:
    """Tell whether a Cell has a construct of its own, which a plain ``CellList`` lacks."""
    inherited = (nn.CellList.construct, nn.CellDict.construct)
    return not (isinstance(cell, (nn.CellList, nn.CellDict)) and type(cell).construct in inherited)
