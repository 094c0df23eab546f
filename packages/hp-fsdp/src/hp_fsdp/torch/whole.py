"""Whole tensors of distributed ones, and back: one tensor at a time, so that memory stays bounded.

Note [One tensor at a time]
    A ragged piece may be a whole parameter on one rank and nothing on the others. So its owners broadcast their pieces
    straight into the whole tensor: what is sent is what there is, and beside the result nothing is held. A gather of
    equal pieces would hold ranks times the longest one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hp_dtensor import RaggedShard, Replicate
from hp_dtensor.extend import TensorSpec
from hp_dtensor.torch.extend import DTensor, execute, local_view
from hp_fsdp.from_rank0 import Wire
from hp_fsdp.torch.host import transport
from hp_platform import collectives

__all__ = ["cut_axis", "fill", "ragged_axis", "spec_of", "whole", "wire"]


def spec_of(tensor: Any) -> TensorSpec | None:
    """The layout of a DTensor; None of anything else."""
    return tensor._spec if isinstance(tensor, DTensor) else None


def ragged_axis(spec: TensorSpec | None) -> int | None:
    """The mesh axis over which a tensor is cut in runs of its flattened elements; None where there is none."""
    if spec is not None:
        for axis, placement in enumerate(spec.placements):
            if isinstance(placement, RaggedShard) and len(placement.dims) == len(spec.shape):
                return axis
    return None


def cut_axis(spec: TensorSpec | None) -> int | None:
    """The mesh axis over which a parameter is sharded, or else the first that divides it; None where it is whole."""
    axis = ragged_axis(spec)
    if axis is None and spec is not None:
        return next((axis for axis, placement in enumerate(spec.placements) if not placement.is_replicate()), None)
    return axis


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


def wire(device: torch.device) -> Wire:
    """How rank 0's values travel.

    Args:
        device: where tensors do.
    """

    def tell(value: Any) -> Any:
        told = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def send(tensor: Any, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        if tensor is not None:
            made = tensor.detach().to(device).contiguous()
        else:
            made = torch.empty(shape, dtype=dtype, device=device)
        if made.numel():
            world: Any = dist.group.WORLD
            collectives.broadcast(made, 0, group=world)
        return made

    return Wire(lambda value: isinstance(value, torch.Tensor), tell, send)
