"""Memory of a sharded model by kind: what layouts and orders predict, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, nn

from hp_dtensor.mindspore.extend import local_view
from hp_fsdp.explainer import optimizer_row, unsharded_rows
from hp_fsdp.explaining import Event, MemoryRow
from hp_fsdp.held import Held
from hp_fsdp.mindspore.group import ParameterGroup
from hp_fsdp.mindspore.optimizer_state import States
from hp_fsdp.mindspore.parameter import itemsize
from hp_platform import get_platform

__all__ = ["memory_rows"]

_GRADIENTS = "not measured, the backward pass returns them: they live as long as the caller keeps them"
_FROZEN = "the prediction frees {} after its backward, but what has no trained parameters stays until all is over"
_BUFFERS = "the buffers in which they are put together; autograd's own, of the group that computes, come on top"
_ACTIVATIONS = "not known on MindSpore, which has no hooks for what its autograd saves"
_STATES = {
    "mindspore.experimental.optim": {"Adam": 3, "AdamW": 3, "SGD": 2},  # with amsgrad and momentum or not
    "mindspore.mint.optim": {"Adam": 2, "AdamW": 2, "SGD": 1},
    "mindspore.nn.optim": {"Adam": 2, "AdamWeightDecay": 2, "Momentum": 1, "SGD": 2},
}
"""How many states of its size a parameter gets, by the package and the class of an optimizer."""


def memory_rows(
    groups: Sequence[ParameterGroup], events: Sequence[Event], held: Sequence[Held], optimizer: nn.Cell | None
) -> list[MemoryRow]:
    """The rows, one a kind.

    Args:
        groups: of the model.
        events: of a step, predicted.
        held: unsharded bytes over the last step; empty before it.
        optimizer: whose states to count, if one is given.
    """
    buckets = [bucket for group in groups for bucket in group.buckets]
    sharded = [parameter.parameter for bucket in buckets for parameter in bucket.parameters]
    pieces = [bucket.layout.piece * itemsize(bucket.dtype) for bucket in buckets]
    frozen = ", ".join(group.name for group in groups if not group.trains)
    rows = [
        MemoryRow("parameters", sum(pieces), sum(map(_bytes, sharded))),
        MemoryRow("gradients", sum(n for n, each in zip(pieces, buckets) if each.trains), None, _GRADIENTS),
        _optimizer_row(optimizer),
        *unsharded_rows(groups, events, held, remark=_FROZEN.format(frozen) if frozen else "", buffers=_BUFFERS),
        MemoryRow("activations", None, None, _ACTIVATIONS),
    ]
    devices = get_platform().devices
    if devices.kind != "cpu":
        rows.append(MemoryRow("device peak, of all kinds", None, devices.peak_memory()))
    return rows


def _optimizer_row(optimizer: Any) -> MemoryRow:
    """States, which an optimizer has from the beginning; predicted of MindSpore's Adam, AdamW, SGD and Momentum."""
    if optimizer is None:
        return optimizer_row(None, None, None, "")
    held = States(optimizer)
    measured = sum(_bytes(slot) for slots in held.slots for slot in slots.values())
    measured += sum(map(_bytes, held.shared.values()))
    package = next((each for each in _STATES if type(optimizer).__module__.startswith(f"{each}.")), "")
    each = _STATES.get(package, {}).get(held.kind)
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
        predicted = each * sum(map(_bytes, held.parameters))
    return optimizer_row(optimizer, predicted, measured, "MindSpore's Adam, AdamW, AdamWeightDecay, SGD and Momentum")


def _bytes(tensor: Tensor) -> int:
    """Bytes of this rank's part; none of a Parameter without values."""
    return 0 if getattr(tensor, "has_init", False) else local_view(tensor).nbytes
