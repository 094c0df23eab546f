"""Whole tensors of distributed ones, and back: one tensor at a time, so that memory stays bounded.

Note [One tensor at a time]
    A ragged piece may be a whole parameter on one rank and nothing on the others. So its owners broadcast their pieces
    straight into the whole tensor: what is sent is what there is, and beside the result nothing is held. A gather of
    equal pieces would hold ranks times the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import RaggedShard, Replicate
from hp_dtensor.spec import TensorSpec
from hp_dtensor.torch.dtensor import DTensor, local_view
from hp_dtensor.torch.redistribute import execute
from hp_platform import get_platform
from hp_platform.torch import collectives

__all__ = ["fill", "from_rank0", "ragged_axis", "spec_of", "transport", "whole"]


def spec_of(tensor: Any) -> TensorSpec | None:
    """The layout of a DTensor; None of anything else."""
    return tensor._spec if isinstance(tensor, DTensor) else None


def transport(mesh: DeviceMesh) -> torch.device:
    """The device on which this process communicates over ``mesh``; parameters may live elsewhere."""
    return torch.device("cpu") if mesh.device_type == "cpu" else get_platform().devices.current_device()


def ragged_axis(spec: TensorSpec | None) -> int | None:
    """The mesh axis over which a tensor is cut in runs of its flattened elements; None where there is none."""
    if spec is not None:
        for axis, placement in enumerate(spec.placements):
            if isinstance(placement, RaggedShard) and len(placement.dims) == len(spec.shape):
                return axis
    return None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole value, plain, in memory of its own; every rank of the tensor's mesh has to call it.

    Args:
        tensor: a DTensor, or a plain tensor, which is copied.
    """
    spec = spec_of(tensor)
    local = local_view(tensor)
    if spec is None:
        return local.clone()
    sent = local.to(transport(spec.mesh))
    axis = ragged_axis(spec)
    if axis is not None and spec.mesh.size(axis) > 1 and spec.mesh.group_order(axis) is None:
        spec, sent = _joined(spec, sent, axis)
    made = execute(sent, spec, spec.with_placements([Replicate()] * spec.mesh.ndim))
    return made.clone() if made.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() else made


def _joined(spec: TensorSpec, local: torch.Tensor, axis: int) -> tuple[TensorSpec, torch.Tensor]:
    """Replicates over the ragged axis: Note [One tensor at a time]."""
    placement = spec.placements[axis]
    assert isinstance(placement, RaggedShard)
    inner = spec.with_placements([Replicate() if at == axis else p for at, p in enumerate(spec.placements)])
    made = local.new_empty(inner.local_shape)
    flat, total = made.view(-1), sum(placement.units)
    sizes = [flat.numel() * unit // total if total else 0 for unit in placement.units]
    me = spec.mesh.get_local_rank(axis)
    group = spec.mesh.get_group(axis)
    handles = []
    for rank, piece in enumerate(flat.split(sizes)):
        if sizes[rank]:
            if rank == me:
                piece.copy_(local)
            handles.append(collectives.broadcast(piece, rank, group=group, async_op=True))
    for handle in handles:
        if handle is not None:
            handle.wait()
    return inner, made


def fill(name: str, target: torch.Tensor, source: Any) -> None:
    """Writes a value into a tensor in place, each rank its part.

    Args:
        name: for errors.
        target: a DTensor or a plain tensor, with memory.
        source: a whole plain tensor, the same on every rank, or a DTensor in any layout.

    Raises:
        TypeError: ``source`` is no tensor.
        ValueError: it has another shape.
        RuntimeError: ``target`` is on the meta device.
    """
    if not isinstance(source, torch.Tensor):
        raise TypeError(f"load: {name!r} must be a tensor, got {type(source).__name__}")
    if tuple(source.shape) != tuple(target.shape):
        raise ValueError(
            f"load: {name!r} has shape {tuple(source.shape)}, the model's is {tuple(target.shape)}. A shard of another"
            " number of ranks is loaded by torch.distributed.checkpoint.load"
        )
    if target.device.type == "meta":
        raise RuntimeError(
            f"load: {name!r} is still on the meta device. Give it memory first: model.to_empty(device=...), or"
            " hp_dtensor.init_parameters(model)"
        )
    spec = spec_of(target)
    with torch.no_grad():
        if isinstance(source, DTensor):
            if spec is None:
                local = source.full_tensor()
            else:
                moved = source if source._spec is spec else source.redistribute(spec.mesh, spec.placements)
                local = local_view(moved)
        else:
            gather: Any = getattr(source, "full_tensor", source.detach)  # another's DTensor has one, too
            local = gather()
            if spec is not None:
                local = execute(local, spec.with_placements([Replicate()] * spec.mesh.ndim), spec)
        local_view(target).copy_(local)


class _Sent:
    """What rank 0 tells of a tensor before it sends it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def from_rank0(values: dict[Any, Any], device: torch.device) -> tuple[set[Any], Iterator[tuple[Any, Any]]]:
    """Rank 0's values on every rank; tensors are sent one at a time, as the iterator is advanced.

    Args:
        values: on rank 0, whole plain tensors and other values by name; not looked at on the others.
        device: where tensors travel.

    Returns:
        The names, and an iterator of names and values, which every rank has to take to its end.

    Raises:
        TypeError: rank 0 has a DTensor; on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return set(values), iter(values.items())
    first = dist.get_rank() == 0
    told: list[Any] = [None]
    if first:
        wrong = [name for name, value in values.items() if hasattr(value, "full_tensor")]
        told[0] = (wrong, {name: _Sent(v) if isinstance(v, torch.Tensor) else v for name, v in values.items()})
    dist.broadcast_object_list(told, src=0)
    wrong, entries = told[0]
    if wrong:
        raise TypeError(
            f"broadcast_from_rank0: rank 0 must have whole plain tensors, {len(wrong)} are DTensors: {wrong[:3]}. Load"
            " sharded states without broadcast_from_rank0"
        )
    return set(entries), _received(values if first else None, entries, device)


def _received(values: dict[Any, Any] | None, entries: dict[Any, Any], device: torch.device) -> Iterator[Any]:
    world: Any = dist.group.WORLD
    for name, entry in entries.items():
        if not isinstance(entry, _Sent):
            yield name, entry
            continue
        if values is not None:
            tensor = values[name].detach().to(device).contiguous()
        else:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        if tensor.numel():
            collectives.broadcast(tensor, 0, group=world)
        yield name, tensor
        del tensor  # before the next one is made
