"""The tensors of a Cell, for `hp_fsdp.state_dict`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspore import Parameter, Tensor, nn
from mindspore.nn.cell import _IncompatibleKeys

from hp_dtensor.mindspore.extend import local_view, wrap
from hp_fsdp.from_rank0 import Wire
from hp_fsdp.mindspore import whole
from hp_fsdp.norms import spec_of
from hp_fsdp.sharded_class import groups_in

__all__ = ["entries", "fill", "full", "incompatible_keys", "is_tensor", "load_extra", "parameters", "part", "wire"]

incompatible_keys = _IncompatibleKeys


def entries(model: nn.Cell) -> dict[str, Any]:
    """Get the very objects that ``model.state_dict()`` holds, with the sharded parameters registered."""
    for group in groups_in(cell for _, cell in model.cells_and_names()):
        group.reshard()
    return dict(model.state_dict(keep_vars=True))


def parameters(model: nn.Cell) -> Iterator[tuple[str, Parameter]]:
    """List the parameters by name, under each name where one is tied."""
    return ((name, value) for name, value in entries(model).items() if isinstance(value, Parameter))


def is_tensor(value: Any) -> bool:
    """Tell tensors from the rest of a state."""
    return isinstance(value, Tensor)


def full(tensor: Tensor, *, on_host: bool) -> Tensor:
    """Gather the full tensor, in memory of its own."""
    gathered = whole.whole(tensor)
    return _on_host(gathered) if on_host else gathered


def part(tensor: Tensor, *, on_host: bool) -> Tensor:
    """Get a tensor that looks into this rank's part, or a copy of it on the host."""
    spec = spec_of(tensor)
    local = _on_host(tensor) if on_host else local_view(tensor)
    return local if spec is None else wrap(local, spec)


def fill(name: str, target: Tensor, source: Any) -> None:
    """Write a value into a tensor, each rank its part."""
    whole.fill(name, target, source, spec_of(target))


def load_extra(model: nn.Cell, extra: dict[str, Any]) -> None:
    """Hand Cells the extra states that are no tensors."""
    model.load_state_dict(extra, strict=False)


def wire(model: nn.Cell) -> Wire:
    """Get how rank 0 sends."""
    return whole.WIRE


def _on_host(tensor: Tensor) -> Tensor:
    """Copy to the host."""
    return Tensor(local_view(tensor).asnumpy())
