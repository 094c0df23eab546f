"""The part of `shard_module` that changes a Cell; `hp_dtensor.creation.sharding_plan` reads the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mindspore import Parameter, Tensor, nn

from hp_dtensor.layout.placements import Placement
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.mindspore.api import distribute_parameter, replicate_parameters

__all__ = ["Tensor", "distribute", "named_modules", "named_parameters"]


def named_modules(module: nn.Cell) -> dict[str, nn.Cell]:
    """List all Cells inside, the Cell itself among them, each under every name that it has."""
    return dict(_walk(module, ""))


def _walk(cell: nn.Cell, prefix: str) -> Iterator[tuple[str, nn.Cell]]:
    yield prefix, cell
    for name, child in cell.name_cells().items():
        if child is not None:
            yield from _walk(child, f"{prefix}.{name}" if prefix else name)


def named_parameters(module: nn.Cell) -> dict[str, Parameter]:
    """List all parameters, each under every name that it has in the tree of Cells."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, cell in named_modules(module).items()
        for name, parameter in cell._params.items()
        if parameter is not None
    }


def distribute(
    module: nn.Cell, placed: Mapping[str, tuple[DeviceMesh, tuple[Placement, ...]]], rest: DeviceMesh
) -> None:
    """Turn all parameters into DTensors, in place.

    Args:
        module: the Cell.
        placed: mesh and placements by name of a parameter.
        rest: the mesh on which other parameters are replicated.
    """
    parameters = named_parameters(module)
    for name, (mesh, placements) in placed.items():
        distribute_parameter(parameters[name], mesh, placements)
    for cell in named_modules(module).values():
        replicate_parameters(cell, rest)
