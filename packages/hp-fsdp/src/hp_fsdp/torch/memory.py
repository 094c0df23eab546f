"""Memory of a sharded model by kind: what layouts and orders predict, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hp_dtensor.torch.extend import local_view
from hp_fsdp.explainer import activation_row, optimizer_row, unsharded_rows
from hp_fsdp.explaining import Event, MemoryRow
from hp_fsdp.held import Held
from hp_fsdp.torch.activations import Activations
from hp_fsdp.torch.group import ParameterGroup
from hp_platform import get_platform

__all__ = ["memory_rows"]

_BUFFERS = "the reductions' buffers; autograd's own, of the group that computes, come on top"


def memory_rows(
    groups: Sequence[ParameterGroup],
    events: Sequence[Event],
    held: Sequence[Held],
    optimizer: Optimizer | None,
    predicted: Activations | None,
    measured: Activations | None,
) -> list[MemoryRow]:
    """The rows, one a kind.

    Args:
        groups: of the model.
        events: of a step, predicted.
        held: unsharded bytes over the last step; empty before it.
        optimizer: whose states to count, if one is given.
        predicted: what a forward without kernels saved, if it ran.
        measured: what `watch_activations` saw, if it watched.
    """
    buckets = [bucket for group in groups for bucket in group.buckets]
    training = [b for b in buckets if any(p.trains for p in b.parameters)]
    sharded = [parameter.sharded for bucket in buckets for parameter in bucket.parameters]
    gradients = [_bytes(parameter.grad) for parameter in sharded if parameter.grad is not None]
    rows = [
        MemoryRow("parameters", sum(b.layout.piece * b.dtype.itemsize for b in buckets), sum(map(_bytes, sharded))),
        MemoryRow("gradients", sum(b.layout.piece * b.dtype.itemsize for b in training), sum(gradients) or None),
        _optimizer_row(optimizer),
        *unsharded_rows(groups, events, held, buffers=_BUFFERS),
        activation_row(predicted, measured),
    ]
    devices = get_platform().devices
    if buckets and buckets[0].shard.device.type not in ("cpu", "meta"):
        rows.append(MemoryRow("device peak, of all kinds", None, devices.peak_memory()))
    return rows


def _optimizer_row(optimizer: Optimizer | None) -> MemoryRow:
    """States, predicted of torch's Adam, AdamW and SGD."""
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
    """How many states of its size a parameter gets; None where that is not known."""
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return 3 if group["amsgrad"] else 2
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    return None


def _bytes(tensor: Any) -> int:
    return local_view(tensor).nbytes if isinstance(tensor, torch.Tensor) else 0
