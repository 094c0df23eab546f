"""What ``load_state_dict`` of a sharded module takes: DTensors, whole plain tensors, this rank's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hp_dtensor import DeviceMesh
from hp_fsdp.norms import spec_of

__all__ = ["Loading", "check_names", "laid_out"]

Entries = list[tuple[str, Any, Any]]
"""Names, the model's tensors, and what is to be loaded into them."""


class Loading(Protocol):
    """What a framework supplies: ``hp_fsdp.<framework>.loading``."""

    Tensor: type

    def is_checked(self, target: Any) -> bool:
        """Tell whether a plain tensor of the model takes its own shape only; else the framework looks at it."""
        ...

    def has_memory(self, target: Any) -> bool:
        """Tell whether a tensor of the model can be written."""
        ...

    def somewhere(self, mesh: DeviceMesh, here: bool) -> bool:
        """Tell whether a condition holds on any rank of a mesh; waits for all."""
        ...

    def part(self, target: Any, value: Any) -> Any:
        """Give this rank's part of a value, as the target is laid out, and with its layout."""
        ...


def laid_out(
    own: Mapping[str, Any], state: Mapping[str, Any], port: Loading, *, assign: bool = False
) -> dict[str, Any]:
    """A state whose tensors have the layouts of the model's, so that each rank can copy its part.

    Args:
        own: the model's parameters and buffers, by all of their names.
        state: DTensors in any layout, whole plain tensors, or this rank's parts; what has no counterpart stays.
        port: the framework's.
        assign: the model's tensors will be replaced, and may have no memory.

    Raises:
        RuntimeError: a tensor has another shape than the model's, whole or local, or the model's has no memory; on
            every rank of the mesh where tensors have to be moved between ranks.
    """
    pairs = [(name, own[name], value) for name, value in state.items() if name in own]
    tensors = [(name, target, value) for name, target, value in pairs if isinstance(value, port.Tensor)]
    faults = [fault for each in tensors if (fault := _fault(*each, port, assign))]
    _stop_together(tensors, faults, port)
    if faults:
        raise RuntimeError(
            f"load_state_dict: {len(faults)} of {len(tensors)} tensors do not fit: {'; '.join(faults[:3])}"
        )
    made: dict[tuple[int, int], Any] = {}  # tied parameters stay one tensor
    result = dict(state)
    for name, target, value in tensors:
        key = id(target), id(value)
        if key not in made:
            made[key] = port.part(target, value)
        result[name] = made[key]
    return result


def _stop_together(tensors: Entries, faults: list[str], port: Loading) -> None:
    """Stops where only other ranks have faults: what follows communicates, so all ranks do it or none."""
    moved = [
        spec for _, target, value in tensors if (spec := spec_of(value)) is not None and spec is not spec_of(target)
    ]
    for mesh in dict.fromkeys(spec.mesh for spec in moved):
        if port.somewhere(mesh, bool(faults)) and not faults:
            raise RuntimeError("load_state_dict: another rank got tensors that do not fit; its error tells which")


def _fault(name: str, target: Any, value: Any, port: Loading, assign: bool) -> str | None:
    """The reason why ``value`` can't be loaded; None where it can, or where the framework looks at it."""
    spec = spec_of(target)
    if spec is None and not port.is_checked(target):
        return None
    if not (assign or port.has_memory(target)):
        return (
            f"{name!r} of the model is on the meta device. Give it memory first (model.to_empty(device=...),"
            " hp_dtensor.init_parameters(model)), or pass assign=True"
        )
    shape, whole = tuple(value.shape), tuple(target.shape)
    if shape == whole or (not whole and shape == (1,)):  # frameworks take one element for a scalar
        return None
    if spec is None:
        return f"{name!r} has shape {shape}, the model's has {whole}"
    if spec_of(value) is None and shape == spec.local_shape:
        return None
    return (
        f"{name!r} has shape {shape}, the model's has {whole}, of which this rank's part, placed {spec.placements}, has"
        f" {tuple(spec.local_shape)}. A part of another number of ranks is loaded by way of a whole state, or by"
        " torch.distributed.checkpoint.load"
    )


def check_names(
    own: Mapping[str, Any], state: Mapping[str, Any], owner: str, *, strict: bool
) -> tuple[list[str], list[str]]:
    """The names that a state lacks, and those that the model does not know.

    Args:
        own: what the model holds, by name.
        state: what is to be loaded.
        owner: the model's class, for errors.
        strict: there may be none.

    Raises:
        RuntimeError: there are, with ``strict``; as frameworks say it.
    """
    missing, unknown = [name for name in own if name not in state], [name for name in state if name not in own]
    texts = [("Missing", missing), ("Unexpected", unknown)]
    found = [f"{text} key(s) in state_dict: {', '.join(map(repr, names))}." for text, names in texts if names]
    if strict and found:
        raise RuntimeError(f"Error(s) in loading state_dict for {owner}: {' '.join(found)}")
    return missing, unknown
