"""What holds symmetric memory on a kind of device, and what its ranks compare before they share any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hp_onesided.port import Dtype, Group, Tensor


class Store(Protocol):
    """The memory of one allocation, without the checks of `SymmetricMemory`.

    Attributes:
        rank: this one, in the group.
        size: ranks of the group.
    """

    rank: int
    size: int

    def ranks(self) -> str:
        """Write the group's ranks."""
        ...

    def check(self) -> None:
        """Refuse a use of memory that is closed."""
        ...

    def is_open(self) -> bool:
        """Tell whether this process has not let go of the memory."""
        ...

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Make a tensor of a rank's memory."""
        ...

    def add(self, slot: int, rank: int, n: int) -> None:
        """Count up a signal of this rank to another one."""
        ...

    def count(self, slot: int, rank: int) -> int:
        """Get what a rank has added to a signal of this one."""
        ...

    def wait(self, slot: int, rank: int, value: int, limit: float | None) -> None:
        """Wait for a signal from a rank."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def finish(self) -> None:
        """Wait until all ranks close the memory."""
        ...

    def leave(self) -> None:
        """Let go of the memory, and tell those that wait for this rank."""
        ...


class DeviceMemory(Protocol):
    """Memory of devices, `<framework>/symmetric_<kind>.py`."""

    def open_memory(self, group: Group, nbytes: int, slots: int, device: Any) -> Store:
        """Make the memory of one allocation; all ranks of the group do it together."""
        ...


def is_number(value: object) -> bool:
    """Tell whether a value is a size: a number from 1."""
    return type(value) is int and value > 0


def compare(members: Sequence[int], told: Sequence[Mapping[str, object]]) -> None:
    """Refuse what ranks ask for, in the same words on each.

    Args:
        members: global ranks of the group.
        told: the sizes that each rank asks for.

    Raises:
        ValueError: one is no size, or they differ.
    """
    over = f"SymmetricMemory over ranks {list(members)}"
    for name, what in (("nbytes", "bytes"), ("slots", "slots")):
        for rank, each in zip(members, told, strict=True):
            if not is_number(each[name]):
                raise ValueError(f"{over}: {name} has to be a number from 1, rank {rank} has {each[name]!r}.")
            if each[name] != told[0][name]:
                first = f"rank {members[0]} asks for {told[0][name]} {what}"
                raise ValueError(f"{over}: {first}, rank {rank} for {each[name]}; each rank has to ask for the same.")


def refusal(members: Sequence[int], texts: Mapping[int, str], own: Exception | None) -> Exception:
    """Make what all ranks raise where some of them can't share memory.

    Args:
        members: global ranks of the group.
        texts: why not, by rank of the group.
        own: this rank's error.
    """
    rank = min(texts)
    return RuntimeError(f"SymmetricMemory over ranks {list(members)}: rank {members[rank]}: {texts[rank]}")
