"""Primitives of sharding Cells, for `hp_fsdp.fully_shard` and `hp_fsdp.hsdp`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from mindspore import Parameter, nn
from mindspore._c_expression import typing

from hp_dtensor import DeviceMesh
from hp_fsdp.mindspore.groups.group import ParameterGroup
from hp_fsdp.mindspore.groups.parameter import ManagedParameter, itemsize
from hp_fsdp.mindspore.module import HSDPModule, refuse_rewriting, shard_class
from hp_fsdp.mindspore.optimizers import watch_optimizers
from hp_fsdp.options import GroupOptions
from hp_fsdp.port import Anatomy
from hp_fsdp.ranks.axes import DataAxes

__all__ = [
    "ANY_DIM",
    "BACKWARD_RETURNS_GRADIENTS",
    "DTYPE",
    "FORWARD",
    "MANAGED",
    "MODULE",
    "ZERO_COPY",
    "anatomy",
    "check_contents",
    "device_of",
    "make_group",
    "modules_of",
    "watch_optimizers",
]

MODULE = nn.Cell
FORWARD = "construct"
MANAGED = ManagedParameter
DTYPE = typing.Type
ZERO_COPY = False
ANY_DIM = False
BACKWARD_RETURNS_GRADIENTS = True


def modules_of(module: Any) -> list[nn.Cell]:
    """List the Cells of a group, which is one."""
    return [module]


def anatomy() -> Anatomy:
    """Return the structure of Cells."""
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
    """Shard the parameters as one group, and give the Cell a sharded class."""
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
