"""What ``load_state_dict`` of a sharded module takes: DTensors, whole plain tensors, this rank's parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Replicate
from hp_dtensor.spec import TensorSpec
from hp_dtensor.torch.dtensor import DTensor, local_view, wrap
from hp_dtensor.torch.redistribute import execute
from hp_fsdp.torch.whole import spec_of, transport
from hp_platform import collectives

__all__ = ["laid_out", "unwrapped"]

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What torch's wrappers of a module add to the names inside it."""


def unwrapped(name: str) -> str:
    """A name without what wrappers added to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def laid_out(own: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, assign: bool) -> dict[str, Any]:
    """A state whose tensors have the layouts of the model's, so that each rank can copy its part.

    Args:
        own: the model's parameters and buffers, by all of their names.
        state: DTensors in any layout, whole plain tensors, or this rank's parts; what has no counterpart stays.
        assign: the model's tensors will be replaced, and may be on the meta device.

    Raises:
        RuntimeError: a tensor has another shape than the model's, whole or local, or the model's is on the meta device;
            on every rank of the mesh where tensors have to be moved between ranks.
    """
    pairs = [(name, own[name], value) for name, value in state.items() if name in own]
    tensors = [(name, target, value) for name, target, value in pairs if isinstance(value, torch.Tensor)]
    faults = [fault for each in tensors if (fault := _fault(*each, assign))]
    for mesh in dict.fromkeys(_meshes(tensors)):  # what follows communicates, so all ranks stop or none
        if _somewhere(mesh, bool(faults)) and not faults:
            raise RuntimeError("load_state_dict: another rank got tensors that do not fit; its error tells which")
    if faults:
        raise RuntimeError(
            f"load_state_dict: {len(faults)} of {len(tensors)} tensors do not fit: {'; '.join(faults[:3])}"
        )
    made: dict[tuple[int, int], torch.Tensor] = {}  # tied parameters stay one tensor
    result = dict(state)
    with torch.no_grad():
        for name, target, value in tensors:
            key = id(target), id(value)
            if key not in made:
                made[key] = _part(target, value)
            result[name] = made[key]
    return result


def _fault(name: str, target: torch.Tensor, value: torch.Tensor, assign: bool) -> str | None:
    """The reason why ``value`` can't be loaded; None where it can, or where torch looks at it."""
    spec = spec_of(target)
    if is_lazy(target) or (spec is None and not isinstance(target, torch.nn.Parameter)):
        return None
    if target.device.type == "meta" and not assign:
        return (
            f"{name!r} of the model is on the meta device. Give it memory first (model.to_empty(device=...),"
            " hp_dtensor.init_parameters(model)), or pass assign=True"
        )
    shape, whole = tuple(value.shape), tuple(target.shape)
    if shape == whole or (not whole and shape == (1,)):  # torch takes one element for a scalar
        return None
    if spec is None:
        return f"{name!r} has shape {shape}, the model's has {whole}"
    if not isinstance(value, DTensor) and shape == spec.local_shape:
        return None
    return (
        f"{name!r} has shape {shape}, the model's has {whole}, of which this rank's part, placed {spec.placements}, has"
        f" {tuple(spec.local_shape)}. A part of another number of ranks is loaded by torch.distributed.checkpoint.load"
    )


def _moves(target: torch.Tensor, value: torch.Tensor) -> bool:
    return isinstance(value, DTensor) and value._spec is not spec_of(target)


def _meshes(tensors: list[tuple[str, torch.Tensor, torch.Tensor]]) -> Iterator[DeviceMesh]:
    """The meshes over which tensors are moved, in their order."""
    for _, target, value in tensors:
        if _moves(target, value):
            yield value._spec.mesh  # type: ignore[attr-defined]


def _somewhere(mesh: DeviceMesh, here: bool) -> bool:
    told = torch.tensor([int(here)], device=transport(mesh))
    for axis in range(mesh.ndim):
        collectives.all_reduce(told, "max", group=mesh.get_group(axis))
    return bool(told.item())


def _part(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``value``, as the target is laid out."""
    spec: TensorSpec | None = spec_of(target)
    if isinstance(value, DTensor):
        if spec is None:
            return value.full_tensor()
        return value if value._spec is spec else value.redistribute(spec.mesh, spec.placements)
    if spec is None:
        return value
    value = value.reshape(spec.shape) if not spec.shape else value
    if tuple(value.shape) != tuple(spec.shape):
        return wrap(local_view(value), spec)
    part = execute(value.detach(), spec.with_placements([Replicate()] * spec.mesh.ndim), spec)
    return wrap(local_view(part), spec)
