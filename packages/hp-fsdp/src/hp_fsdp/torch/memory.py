"""Memory of a sharded model by kind: what layouts and orders predict, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hp_dtensor.torch.dtensor import local_view
from hp_fsdp.explaining import Event, MemoryRow
from hp_fsdp.held import Held
from hp_fsdp.torch.activations import Activations
from hp_fsdp.torch.group import ParameterGroup
from hp_platform import get_platform

__all__ = ["memory_rows"]


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
        *_unsharded_rows(groups, events, held),
        _activation_row(predicted, measured),
    ]
    devices = get_platform().devices
    if buckets and buckets[0].shard.device.type not in ("cpu", "meta"):
        rows.append(MemoryRow("device peak, of all kinds", None, devices.peak_memory()))
    return rows


def _unsharded_rows(groups: Sequence[ParameterGroup], events: Sequence[Event], held: Sequence[Held]) -> list[MemoryRow]:
    remark = "" if held else "not measured, no forward and backward was run yet"
    reduced = remark or "the reductions' buffers; autograd's own, of the group that computes, come on top"
    apart = [group.name for group in groups if group.deterministic]
    parameters = max((each.parameters for each in held), default=None)
    gradients = max((each.gradients for each in held), default=None)
    most = max((event.gradients for event in events), default=0)
    if apart:
        kept = f"not known with deterministic=True ({apart[0]}): a rank keeps those of each of its micro-batches"
        most_gradients = MemoryRow("unsharded gradients", None, None, kept)
    else:
        most_gradients = MemoryRow("unsharded gradients", most, gradients, reduced)
    return [
        MemoryRow("unsharded parameters", max((e.unsharded for e in events), default=0), parameters, remark),
        most_gradients,
    ]


def _activation_row(predicted: Activations | None, measured: Activations | None) -> MemoryRow:
    if predicted is None and measured is None:
        remark = "predicted with inputs=, measured with activations= of watch_activations(model)"
    else:
        remark = "kept of the model's forward; not what checkpointed blocks compute anew, nor what the loss keeps"
    uncounted = sum(each.uncounted for each in (predicted, measured) if each is not None)
    if uncounted:
        remark += f"; {uncounted} tensors without a storage of their own were not counted"
    return MemoryRow(
        "activations",
        None if predicted is None else predicted.peak,
        None if measured is None else measured.peak,
        remark,
    )


def _optimizer_row(optimizer: Optimizer | None) -> MemoryRow:
    """States, predicted of torch's Adam, AdamW and SGD."""
    if optimizer is None:
        return MemoryRow("optimizer", None, None, "give optimizer= to count its states")
    measured = None
    if optimizer.state:
        measured = sum(_bytes(value) for state in optimizer.state.values() for value in state.values())
    remark = "" if optimizer.state else "not measured, it made no step yet"
    total = 0
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            each = 3 if group["amsgrad"] else 2
        elif isinstance(optimizer, torch.optim.SGD):
            each = 1 if group["momentum"] else 0
        else:
            known = f"not predicted, {type(optimizer).__name__} is none of Adam, AdamW and SGD"
            return MemoryRow("optimizer", None, measured, "; ".join(filter(None, (known, remark))))
        total += each * sum(_bytes(parameter) for parameter in group["params"] if parameter.requires_grad)
    return MemoryRow("optimizer", total, measured, remark)


def _bytes(tensor: Any) -> int:
    return local_view(tensor).nbytes if isinstance(tensor, torch.Tensor) else 0
