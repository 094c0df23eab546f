"""The methods by which torch.distributed.checkpoint saves and loads a tensor: its chunks, and the memory of each.

Note [Chunks are boxes]
    A checkpoint consists of chunks: boxes of the global tensor, by offsets and sizes. A rank's shard in any layout is a
    few boxes (of a matrix up to three, because a `RaggedShard` may divide rows), each a view of the local tensor. So a
    save reads and a load writes the local tensor in place, nothing is gathered, and any layout loads from any other.
"""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor.layout.boxes import Box, boxes
from hp_dtensor.layout.spec import TensorSpec
from hp_platform.torch.internals import torch_function_enabled


def write_items(local: torch.Tensor, spec: TensorSpec, fqn: str) -> list[Any]:
    """Return a ``WriteItem`` for each of this rank's boxes, for torch's ``SavePlan`` (``__create_write_items__``).

    Args:
        local: this rank's local tensor.
        spec: the layout.
        fqn: the DTensor's name in the state dict.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(local)
    size = torch.Size(spec.shape)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in chunk_list(spec)
    ]


def chunk_list(spec: TensorSpec) -> list[Any]:
    """Return this rank's boxes as ``ChunkStorageMetadata`` (method ``__create_chunk_list__``)."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in _boxes(spec)]


def tensor_shard(local: torch.Tensor, spec: TensorSpec, index: Any) -> torch.Tensor:
    """Return the elements of one box, a view of the local tensor (method ``__get_tensor_shard__``).

    Args:
        local: this rank's local tensor.
        spec: the layout.
        index: a ``MetadataIndex`` with the box's offsets.

    Raises:
        ValueError: this rank has no box at these offsets.
    """
    local_boxes = _boxes(spec)
    for box in local_boxes:
        if index.offset is None or tuple(index.offset) == box.offsets:
            return _view(local, box)
    raise ValueError(
        f"checkpoint: {index.fqn!r} has no chunk at {tuple(index.offset or ())} on this rank, whose chunks start at"
        f" {[box.offsets for box in local_boxes]}"
    )


def set_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Refuse ``Tensor.set_``, with which ``async_save`` copies: it would give a local tensor the global shape.

    Raises:
        NotImplementedError: always, unless interception is off.
    """
    if torch_function_enabled():
        raise NotImplementedError(
            "set_ of a DTensor is not supported, because it takes no local tensor. torch.distributed.checkpoint"
            ".async_save copies with it: copy the state yourself, as StateDictOptions(cpu_offload=True) does, and save"
            " in a thread. Parametrizations (weight_norm) write with it: register them before fully_shard or"
            " distribute_tensor; adapters that peft adds to parameters (target_parameters) before hp_plan.apply"
        )
    return torch.Tensor.set_(tensor, *args, **kwargs)


def _boxes(spec: TensorSpec) -> tuple[Box, ...]:
    coordinate = spec.mesh.get_coordinate()
    return () if coordinate is None else boxes(spec.shape, spec.placements, tuple(spec.mesh.shape), tuple(coordinate))


def _view(local: torch.Tensor, box: Box) -> torch.Tensor:
    if not local.numel():
        return local.view(box.sizes)
    if box.ragged is not None:
        dim, start, block = box.ragged
        local = local.narrow(dim, start, torch.Size(block).numel())
        local = local.unflatten(dim, block) if block else local.squeeze(dim)
    for dim, (start, size) in enumerate(zip(box.at, box.sizes, strict=True)):
        local = local.narrow(dim, start, size)
    return local
