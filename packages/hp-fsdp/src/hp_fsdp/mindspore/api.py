"""Sharding Cells, for `hp_fsdp.fully_shard` and `hp_fsdp.hsdp`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from mindspore import Parameter, nn
from mindspore._c_expression import typing

from hp_dtensor import DeviceMesh
from hp_fsdp.anatomy import Anatomy
from hp_fsdp.axes import DataAxes
from hp_fsdp.finding import find_parameters
from hp_fsdp.mesh_dims import all_ranks
from hp_fsdp.mindspore.group import ParameterGroup
from hp_fsdp.mindspore.module import HSDPModule, shard_class
from hp_fsdp.mindspore.optimizers import watch_optimizers
from hp_fsdp.mindspore.parameter import ManagedParameter, itemsize
from hp_fsdp.mindspore.rewriting import refuse_rewriting
from hp_fsdp.optimizers import ignore
from hp_fsdp.options import GroupOptions
from hp_fsdp.sharded_class import group_of

__all__ = [
    "ANY_DIM",
    "BACKWARD_RETURNS_GRADIENTS",
    "DTYPE",
    "ZERO_COPY",
    "anatomy",
    "check_module",
    "modules_of",
    "shard",
]

DTYPE = typing.Type
ZERO_COPY = False
ANY_DIM = False
BACKWARD_RETURNS_GRADIENTS = True


def modules_of(module: Any) -> list[nn.Cell]:
    """List the Cells of a group, which is one."""
    return [module]


def anatomy() -> Anatomy:
    """Get where Cells have their parts."""
    return Anatomy(
        parameters="_params",
        children="_cells",
        sharded=HSDPModule,
        computes=_computes,
        nbytes=lambda parameter: math.prod(parameter.shape) * itemsize(parameter.dtype),
    )


def shard(
    modules: Sequence[nn.Cell],
    mesh: DeviceMesh | None,
    options: GroupOptions,
    ignored_params: Collection[Parameter] = (),
) -> None:
    """Shard a Cell as one group, with arguments that were checked.

    Args:
        modules: the Cell, changed in place.
        mesh: of one axis or two; None for all ranks.
        options: how the group communicates.
        ignored_params: parameters to leave as they are.
    """
    (module,) = modules
    _check_statistics(module, {id(parameter) for parameter in ignored_params})
    ignored = list(ignored_params)
    found = find_parameters(modules, ignored, ManagedParameter)
    axes = DataAxes.of(all_ranks(found) if mesh is None else mesh)
    parameters = [parameter for parameter in found if not axes.divided(parameter.name, parameter.inner)]
    ignored += [parameter.parameter for parameter in found if axes.divided(parameter.name, parameter.inner)]
    watch_optimizers()
    refuse_rewriting()
    for parameter in ignored:
        ignore(parameter)
    group = ParameterGroup(modules, parameters, axes, None, options, ignored)
    shard_class(module, group)


def _check_statistics(module: nn.Cell, ignored: Collection[int]) -> None:
    """Refuses BatchNorm's running statistics: Parameters, whose shards would not get what a forward writes."""
    for name, cell in module.cells_and_names():
        for key in ("moving_mean", "moving_variance", "running_mean", "running_var"):
            parameter = cell._params.get(key)
            if parameter is not None and id(parameter) not in ignored:
                raise NotImplementedError(
                    f"fully_shard: {name or 'the Cell'} is a {type(cell).__name__}, whose {key} is written in forward"
                    " and so can't be sharded: pass its running statistics in ignored_params, or take another norm"
                )


def _computes(cell: nn.Cell) -> bool:
    """Whether a Cell computes something of its own, which a plain ``CellList`` does not."""
    inherited = (nn.CellList.construct, nn.CellDict.construct)
    return not (isinstance(cell, (nn.CellList, nn.CellDict)) and type(cell).construct in inherited)


def check_module(module: Any) -> None:
    """Raises for what `fully_shard` cannot be called on."""
    if not isinstance(module, nn.Cell):
        raise TypeError(f"fully_shard: expected a mindspore.nn.Cell, got {type(module).__name__}")
    name = type(module).__name__
    if not _computes(module):
        raise ValueError(f"fully_shard: {name} has no construct of its own. Call fully_shard on each of its Cells")
    if group_of(module) is not None:
        raise ValueError(f"fully_shard: this {name} is sharded already")
