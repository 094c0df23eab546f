"""State dicts that only rank 0 has: sent to the other ranks one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hp_platform import get_platform

__all__ = ["Wire", "from_rank0"]


@dataclass(frozen=True, slots=True)
class Wire:
    """How rank 0 sends to all others.

    Attributes:
        is_tensor: what is sent by itself.
        tell: gives rank 0's object on every rank; others pass None.
        send: gives rank 0's tensor on every rank; others pass None, and all the shape and the dtype.
    """

    is_tensor: Callable[[Any], bool]
    tell: Callable[[Any], Any]
    send: Callable[[Any, tuple[int, ...], Any], Any]


class _Sent:
    """What rank 0 tells of a tensor before it sends it."""

    def __init__(self, tensor: Any) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def from_rank0(values: dict[Any, Any], wire: Wire) -> tuple[set[Any], Iterator[tuple[Any, Any]]]:
    """Rank 0's values on every rank; tensors are sent one at a time, as the iterator is advanced.

    Args:
        values: on rank 0, whole plain tensors and other values by name; not looked at on the others.
        wire: how they travel.

    Returns:
        The names, and an iterator of names and values, which every rank has to take to its end.

    Raises:
        TypeError: rank 0 has a DTensor; on every rank.
    """
    groups = get_platform().groups
    if not groups.is_initialized() or groups.size() == 1:
        return set(values), iter(values.items())
    first = groups.rank() == 0
    told: Any = None
    if first:
        wrong = [name for name, value in values.items() if hasattr(value, "full_tensor")]
        told = (wrong, {name: _Sent(v) if wire.is_tensor(v) else v for name, v in values.items()})
    wrong, entries = wire.tell(told)
    if wrong:
        raise TypeError(
            f"broadcast_from_rank0: rank 0 must have whole plain tensors, {len(wrong)} are DTensors: {wrong[:3]}. Load"
            " sharded states without broadcast_from_rank0"
        )
    return set(entries), _received(values if first else None, entries, wire)


def _received(values: dict[Any, Any] | None, entries: dict[Any, Any], wire: Wire) -> Iterator[Any]:
    for name, entry in entries.items():
        if isinstance(entry, _Sent):
            # Not bound to a name, so that one is gone before the next one is made.
            yield name, wire.send(None if values is None else values[name], entry.shape, entry.dtype)
        else:
            yield name, entry
