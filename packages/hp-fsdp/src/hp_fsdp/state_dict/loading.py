"""Loading of states: layouts and names compared with the model's, ragged shards, and values that only rank 0 has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from hp_dtensor import RaggedShard, Replicate
from hp_dtensor.extend import TensorSpec
from hp_fsdp.groups.managed_params import spec_of
from hp_fsdp.port import Broadcaster, ModelStates, model_states
from hp_platform import get_platform

Entries = list[tuple[str, Any, Any]]
"""Names, the model's tensors, and the values to load into them."""


def laid_out(own: Mapping[str, Any], state: Mapping[str, Any], *, assign: bool = False) -> dict[str, Any]:
    """Return a state whose tensors have the layouts of the model's, so that each rank can copy its part.

    Args:
        own: the model's parameters and buffers, by all of their names.
        state: DTensors in any layout, full plain tensors, or this rank's parts; entries without a counterpart stay.
        assign: the model's tensors will be replaced, and may have no memory.

    Raises:
        RuntimeError: a tensor has another shape than the model's, full or local, or the model's has no memory; on
            every rank of the mesh where tensors have to be moved between ranks.
    """
    port = model_states()
    tensors = [(name, own[name], value) for name, value in state.items() if name in own and port.is_tensor(value)]
    faults = [fault for each in tensors if (fault := _fault(*each, port, assign))]
    _stop_together(tensors, faults, port)
    if faults:
        raise RuntimeError(
            f"load_state_dict: {len(faults)} of {len(tensors)} tensors do not fit: {'; '.join(faults[:3])}"
        )
    parts: dict[tuple[int, int], Any] = {}  # tied parameters stay one tensor
    result = dict(state)
    for name, target, value in tensors:
        key = id(target), id(value)
        if key not in parts:
            parts[key] = port.laid_out_like(target, value)
        result[name] = parts[key]
    return result


def _stop_together(tensors: Entries, faults: list[str], port: ModelStates) -> None:
    """Raise if only other ranks have faults: all ranks must take part in the communication that follows, or none."""
    moved = [
        spec for _, target, value in tensors if (spec := spec_of(value)) is not None and spec is not spec_of(target)
    ]
    for mesh in dict.fromkeys(spec.mesh for spec in moved):
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        if port.largest([int(bool(faults))], mesh, groups)[0] and not faults:
            raise RuntimeError("load_state_dict: another rank got tensors that do not fit; its error tells which")


def _fault(name: str, target: Any, value: Any, port: ModelStates, assign: bool) -> str | None:
    """Return the reason why ``value`` can't be loaded; None if it can, or if the framework checks it."""
    spec = spec_of(target)
    if spec is None and not port.takes_own_shape_only(target):
        return None
    if not (assign or port.has_memory(target)):
        return (
            f"{name!r} of the model is on the meta device. Give it memory first (model.to_empty(device=...),"
            " hp_dtensor.init_parameters(model)), or pass assign=True"
        )
    shape, full = tuple(value.shape), tuple(target.shape)
    if shape == full or (not full and shape == (1,)):  # frameworks take one element for a scalar
        return None
    if spec is None:
        return f"{name!r} has shape {shape}, the model's has {full}"
    if spec_of(value) is None and shape == spec.local_shape:
        return None
    return (
        f"{name!r} has shape {shape}, the model's has {full}, of which this rank's part, placed {spec.placements}, has"
        f" {tuple(spec.local_shape)}. A part of another number of ranks is loaded by way of a full state, or by"
        " torch.distributed.checkpoint.load"
    )


def check_names(
    own: Mapping[str, Any], state: Mapping[str, Any], owner: str, *, strict: bool
) -> tuple[list[str], list[str]]:
    """Return the names that a state lacks, and those that the model does not have.

    Args:
        own: the model's entries, by name.
        state: the entries to load.
        owner: the model's class, for errors.
        strict: raise for any.

    Raises:
        RuntimeError: missing or unexpected names, with ``strict``; in the frameworks' words.
    """
    missing, unknown = [name for name in own if name not in state], [name for name in state if name not in own]
    texts = [("Missing", missing), ("Unexpected", unknown)]
    errors = [f"{text} key(s) in state_dict: {', '.join(map(repr, names))}." for text, names in texts if names]
    if strict and errors:
        raise RuntimeError(f"Error(s) in loading state_dict for {owner}: {' '.join(errors)}")
    return missing, unknown


def ragged_axis(spec: TensorSpec | None) -> int | None:
    """Return the mesh axis over which a tensor is sharded by ranges of flattened elements, or None."""
    if spec is not None:
        for axis, placement in enumerate(spec.placements):
            if isinstance(placement, RaggedShard) and len(placement.dims) == len(spec.shape):
                return axis
    return None


def pieces_along(spec: TensorSpec, axis: int) -> tuple[TensorSpec, list[int]]:
    """Return the layout of a tensor gathered over its ragged axis, and the number of elements that each rank has."""
    placement = spec.placements[axis]
    assert isinstance(placement, RaggedShard)
    gathered = spec.with_placements([Replicate() if at == axis else p for at, p in enumerate(spec.placements)])
    numel, total = prod(gathered.local_shape), sum(placement.units)
    return gathered, [numel * unit // total if total else 0 for unit in placement.units]


class _Header:
    """Shape and dtype of a tensor, sent ahead of it."""

    def __init__(self, tensor: Any) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def from_rank0(values: dict[Any, Any], broadcaster: Broadcaster) -> tuple[set[Any], Iterator[tuple[Any, Any]]]:
    """Return rank 0's values on every rank; tensors are sent one at a time, as the iterator is advanced.

    Args:
        values: on rank 0, full plain tensors and other values by name; ignored on the others.
        broadcaster: sends them.

    Returns:
        The names, and an iterator of names and values, which every rank has to take to its end.

    Raises:
        TypeError: rank 0 has a DTensor; on every rank.
    """
    groups = get_platform().groups
    if not groups.is_initialized() or groups.size() == 1:
        return set(values), iter(values.items())
    first = groups.rank() == 0
    message: Any = None
    if first:
        wrong = [name for name, value in values.items() if hasattr(value, "full_tensor")]
        message = (wrong, {name: _Header(v) if broadcaster.is_tensor(v) else v for name, v in values.items()})
    wrong, entries = broadcaster.broadcast_object(message)
    if wrong:
        raise TypeError(
            f"broadcast_from_rank0: rank 0 must have full plain tensors, {len(wrong)} are DTensors: {wrong[:3]}. Load"
            " sharded states without broadcast_from_rank0"
        )
    return set(entries), _received(values if first else None, entries, broadcaster)


def _received(values: dict[Any, Any] | None, entries: dict[Any, Any], broadcaster: Broadcaster) -> Iterator[Any]:
    for name, entry in entries.items():
        if isinstance(entry, _Header):
            # Not bound to a name, so that one is gone before the next one is made.
            yield name, broadcaster.broadcast_tensor(None if values is None else values[name], entry.shape, entry.dtype)
        else:
            yield name, entry
