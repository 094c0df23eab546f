"""Memory of a sharded model by kind, predicted from layouts and orders, and measured; for `hp_fsdp.explain`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hp_dtensor.torch.extend import local_view
from hp_fsdp.explanation.memory import (
    BucketBytes,
    Event,
    MemoryPoint,
    MemoryRow,
    Overlap,
    activation_row,
    optimizer_row,
    unsharded_rows,
)
from hp_fsdp.torch.groups.bucket import Bucket
from hp_fsdp.torch.groups.group import ParameterGroup
from hp_fsdp.torch.predictions.activations import Activations, watch_activations
from hp_fsdp.torch.predictions.fake_forward import predict_activations
from hp_platform import get_platform

__all__ = [
    "bytes_of",
    "memory_rows",
    "named_modules",
    "overlap",
    "predicted_activations",
    "stays_gathered",
    "watch_activations",
]


def named_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """List a module and the modules inside it, with their names."""
    return model.named_modules()


def predicted_activations(model: nn.Module, inputs: Any, activations: Any) -> Activations | None:
    """Return the activations of a forward on ``inputs``, run without kernels; None without inputs."""
    return None if inputs is None else predict_activations(model, inputs)


def overlap(root: ParameterGroup) -> Overlap:
    """Return the communication that runs beside the computation: gathers and reductions."""
    return Overlap()


def stays_gathered(group: ParameterGroup) -> bool:
    """Tell whether a group stays gathered after a backward pass."""
    return not group.reshard_after_backward


def bytes_of(bucket: Bucket) -> BucketBytes:
    """Return the sizes of a bucket."""
    layout, axes = bucket.layout, bucket.axes
    alone = axes.shard_size * axes.replicate_size == 1
    trains = any(parameter.trains for parameter in bucket.parameters)
    return BucketBytes(
        shard=layout.piece * bucket.dtype.itemsize,
        gathered=0 if _computes_with_shard(bucket) else layout.total * bucket.compute_dtype.itemsize,
        gradients=layout.total * bucket.reduce_dtype.itemsize if trains and not alone else 0,
    )


def _computes_with_shard(bucket: Bucket) -> bool:
    if bucket.prepared:
        return bucket.aliased
    return bucket.axes.shard_size == 1 and bucket.compute_dtype is bucket.dtype and bucket.offload is None


_BUFFERS = "the reductions' buffers; autograd's own, of the group that computes, come on top"


def memory_rows(
    groups: Sequence[ParameterGroup],
    events: Sequence[Event],
    memory: Sequence[MemoryPoint],
    optimizer: Optimizer | None,
    predicted: Activations | None,
    measured: Activations | None,
) -> list[MemoryRow]:
    """Return one row for each kind of memory."""
    buckets = [bucket for group in groups for bucket in group.buckets]
    training = [b for b in buckets if any(p.trains for p in b.parameters)]
    sharded = [parameter.sharded for bucket in buckets for parameter in bucket.parameters]
    gradients = [_bytes(parameter.grad) for parameter in sharded if parameter.grad is not None]
    rows = [
        MemoryRow("parameters", sum(b.layout.piece * b.dtype.itemsize for b in buckets), sum(map(_bytes, sharded))),
        MemoryRow("gradients", sum(b.layout.piece * b.dtype.itemsize for b in training), sum(gradients) or None),
        _optimizer_row(optimizer),
        *unsharded_rows(groups, events, memory, buffers=_BUFFERS),
        activation_row(predicted, measured),
    ]
    devices = get_platform().devices
    if buckets and buckets[0].shard.device.type not in ("cpu", "meta"):
        rows.append(MemoryRow("device peak, of all kinds", None, devices.peak_memory()))
    return rows


def _optimizer_row(optimizer: Optimizer | None) -> MemoryRow:
    """Count states; predict those of torch's Adam, AdamW and SGD."""
    predicted = measured = None
    if optimizer is not None:
        if optimizer.state:
            measured = sum(_bytes(value) for state in optimizer.state.values() for value in state.values())
        counts = [_states_each(optimizer, group) for group in optimizer.param_groups]
        if None not in counts:
            predicted = sum(
                (count or 0) * _bytes(parameter)
                for count, group in zip(counts, optimizer.param_groups, strict=True)
                for parameter in group["params"]
                if parameter.requires_grad
            )
    return optimizer_row(optimizer, predicted, measured, "Adam, AdamW and SGD")


def _states_each(optimizer: Optimizer, group: dict[str, Any]) -> int | None:
    """Return the number of states of its size that a parameter gets; None if unknown."""
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return 3 if group["amsgrad"] else 2
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    return None


def _bytes(tensor: Any) -> int:
    return local_view(tensor).nbytes if isinstance(tensor, torch.Tensor) else 0
