"""Memory of a sharded model by kind, predicted from layouts and orders, and measured; for `hp_fsdp.explain`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from mindspore import Tensor, nn

from hp_dtensor.mindspore.extend import local_view
from hp_fsdp.explanation.memory import (
    BucketBytes,
    Event,
    MemoryPoint,
    MemoryRow,
    Overlap,
    optimizer_row,
    unsharded_rows,
)
from hp_fsdp.mindspore.groups.bucket import Bucket
from hp_fsdp.mindspore.groups.group import ParameterGroup
from hp_fsdp.mindspore.groups.parameter import itemsize
from hp_fsdp.mindspore.optimizers import States
from hp_platform import get_platform


def named_modules(model: nn.Cell) -> Iterable[tuple[str, nn.Cell]]:
    return model.cells_and_names()


def predicted_activations(model: nn.Cell, inputs: Any, activations: Any) -> None:
    """Refuse ``inputs`` and ``activations``."""
    if inputs is not None or activations is not None:
        raise NotImplementedError(
            "explain: inputs= and activations= are not supported on MindSpore, which has no tensors without values and"
            " no hooks for the tensors that autograd saves; leave them out. The peak of a device, of all kinds"
            " together, is mindspore.runtime.max_memory_allocated()"
        )


def overlap(root: ParameterGroup) -> Overlap:
    return Overlap(gathers=root.overlaps, reductions=False)


def stays_gathered(group: ParameterGroup) -> bool:
    """Tell whether a group stays gathered after a backward pass: only if no optimizer step follows it.

    Parameters have no version counter that would show the step.
    """
    return not (group.reshard_after_backward or group.reduces)


def bytes_of(bucket: Bucket) -> BucketBytes:
    total = bucket.layout.total
    return BucketBytes(
        shard=bucket.layout.piece * itemsize(bucket.dtype),
        gathered=total * itemsize(bucket.compute_dtype),
        gradients=total * itemsize(bucket.reduce_dtype) if bucket.trains else 0,
    )


_GRADIENTS = "not measured, the backward pass returns them: they live as long as the caller keeps them"
_FROZEN = "the prediction frees {} after its backward, but what has no trained parameters stays until all is over"
_BUFFERS = "the buffers in which they are put together; autograd's own, of the group that computes, come on top"
_ACTIVATIONS = "not known on MindSpore, which has no hooks for the tensors that autograd saves"
_STATES = {
    "mindspore.experimental.optim": {"Adam": 3, "AdamW": 3, "SGD": 2},  # with amsgrad and momentum or not
    "mindspore.mint.optim": {"Adam": 2, "AdamW": 2, "SGD": 1},
    "mindspore.nn.optim": {"Adam": 2, "AdamWeightDecay": 2, "Momentum": 1, "SGD": 2},
}
"""Number of states of its size that a parameter gets, by the package and the class of an optimizer."""


def memory_rows(
    groups: Sequence[ParameterGroup],
    events: Sequence[Event],
    memory: Sequence[MemoryPoint],
    optimizer: nn.Cell | None,
    predicted: None,
    measured: None,
) -> list[MemoryRow]:
    buckets = [bucket for group in groups for bucket in group.buckets]
    sharded = [parameter.parameter for bucket in buckets for parameter in bucket.parameters]
    pieces = [bucket.layout.piece * itemsize(bucket.dtype) for bucket in buckets]
    frozen = ", ".join(group.name for group in groups if not group.trains)
    rows = [
        MemoryRow("parameters", sum(pieces), sum(map(_bytes, sharded))),
        MemoryRow("gradients", sum(n for n, each in zip(pieces, buckets) if each.trains), None, _GRADIENTS),
        _optimizer_row(optimizer),
        *unsharded_rows(groups, events, memory, remark=_FROZEN.format(frozen) if frozen else "", buffers=_BUFFERS),
        MemoryRow("activations", None, None, _ACTIVATIONS),
    ]
    devices = get_platform().devices
    if devices.kind != "cpu":
        rows.append(MemoryRow("device peak, of all kinds", None, devices.peak_memory()))
    return rows


def _optimizer_row(optimizer: Any) -> MemoryRow:
    """Count states, which an optimizer has from the beginning; predict those of Adam, AdamW, SGD and Momentum."""
    if optimizer is None:
        return optimizer_row(None, None, None, "")
    states = States(optimizer)
    measured = sum(_bytes(slot) for slots in states.slots for slot in slots.values())
    measured += sum(map(_bytes, states.shared.values()))
    package = next((each for each in _STATES if type(optimizer).__module__.startswith(f"{each}.")), "")
    each = _STATES.get(package, {}).get(states.kind)
    if each is None:
        predicted = None
    elif package == "mindspore.mint.optim":
        predicted = sum(
            (each + bool(group.get("amsgrad"))) * _bytes(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
    else:
        each += bool(getattr(optimizer, "use_amsgrad", False))
        predicted = each * sum(map(_bytes, states.parameters))
    return optimizer_row(optimizer, predicted, measured, "MindSpore's Adam, AdamW, AdamWeightDecay, SGD and Momentum")


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of this rank's part; 0 for a Parameter without values."""
    return 0 if getattr(tensor, "has_init", False) else local_view(tensor).nbytes


def watch_activations(model: nn.Cell) -> NoReturn:
    """Refuse: MindSpore does not support it yet.

    Raises:
        NotImplementedError: always; MindSpore has no hooks for the tensors that autograd saves.
    """
    raise NotImplementedError(
        "watch_activations is not supported on MindSpore yet; mindspore.runtime.max_memory_allocated() tells the peak"
        " of a device, of all kinds together"
    )
