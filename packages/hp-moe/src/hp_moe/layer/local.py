"""What of a layer's inputs and parameters a rank computes with, and how results become the layer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hp_dtensor
from hp_dtensor import DeviceMesh, Partial, Replicate, Shard
from hp_moe.port import port

Tensor = Any
Restore = Callable[[Tensor], Tensor]


def local_inputs(
    name: str, experts: DeviceMesh | None, features: DeviceMesh | None, inputs: Sequence[Tensor]
) -> tuple[list[Tensor], Restore]:
    """Return this rank's tokens, choices and weights, and what makes of its result the layer's.

    Args:
        name: of the layer.
        experts: the mesh axis that experts are spread over, if there is one.
        features: the mesh axis that the features of each are sharded over, if there is one.
        inputs: of the layer.

    Raises:
        ValueError: tokens on other ranks than those that experts are spread over.
    """
    if features is not None:
        return _varying(features, inputs)
    mesh = next((value.device_mesh for value in inputs if isinstance(value, hp_dtensor.DTensor)), None)
    if mesh is None:
        return list(inputs), lambda out: out
    # Replicated activations: each rank takes its share of the tokens, so that none is computed twice.
    assert experts is not None
    if mesh.ndim != 1 or not _ranks(mesh) <= _ranks(experts):
        raise ValueError(
            f"{name}: its tokens are DTensors on {mesh}, whose ranks are not among those that experts are"
            f" spread over, {experts}: gradients of experts would be parts that nobody adds up. Spread experts"
            " over all these ranks, or use ExpertTensorParallel on a mesh of both axes"
        )
    whole = [_replicated(each, mesh) for each in inputs]
    shape = whole[0].shape

    def restore(out: Tensor) -> Tensor:
        return hp_dtensor.DTensor.from_local(out, mesh, [Shard(0)], shape=shape).redistribute(mesh, [Replicate()])

    return [each.redistribute(mesh, [Shard(0)]).to_local() for each in whole], restore


def _varying(mesh: DeviceMesh, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Restore]:
    """Return the tokens, which all ranks of the axis have; results are added up over it."""
    plain = not any(isinstance(each, hp_dtensor.DTensor) for each in inputs)
    whole = [_replicated(each, mesh) for each in inputs]

    def restore(out: Tensor) -> Tensor:
        total = hp_dtensor.DTensor.from_local(out, mesh, [Partial()]).redistribute(mesh, [Replicate()])
        return total.to_local() if plain else total

    return [port().varying(each.redistribute(mesh, [Replicate()])) for each in whole], restore


def local_part(parameter: Any, features: DeviceMesh | None) -> Tensor:
    """Return the part of a parameter that this rank computes with."""
    if not isinstance(parameter, hp_dtensor.DTensor):
        return parameter
    placements = parameter.placements
    if features is not None and placements[-1].is_replicate():  # a bias that is added once, on one rank
        parameter = parameter.redistribute(parameter.device_mesh, [*placements[:-1], Partial()])
    return parameter.to_local()


def _replicated(value: Tensor, mesh: DeviceMesh) -> Any:
    if isinstance(value, hp_dtensor.DTensor):
        return value
    return hp_dtensor.DTensor.from_local(value, mesh, [Replicate()])


def _ranks(mesh: DeviceMesh) -> set[int]:
    return set(mesh.ranks.flatten().tolist())
