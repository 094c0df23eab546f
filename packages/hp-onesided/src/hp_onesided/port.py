"""Protocols that a framework implements for hp-onesided: primitives, without the checks of the neutral modules."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hp_platform.extend import load_port

Group = Any
Tensor = Any


class Port(Protocol):
    """Tensors in the host's memory, by their addresses; `<framework>/port.py`."""

    def limit(self, group: Group) -> float | None:
        """Get the seconds that a group's backend waits for a rank; None where it is not one of the host's memory."""
        ...

    def dtype(self, tensor: Tensor) -> str | None:
        """Name the dtype of a plain tensor in the host's memory; None of any other one, as those without memory."""
        ...

    def address(self, tensor: Tensor) -> int:
        """Get where its values are, one after the other."""
        ...

    def seen(self, name: str) -> AbstractContextManager[Any] | None:
        """Make a range of that name for a profiler; None where none runs."""
        ...

    def reduce(self, target: int, parts: Sequence[int], nbytes: int, dtype: str, op: str) -> None:
        """Reduce values in the order of the parts, bfloat16 and float16 in float32 and rounded once.

        Args:
            target: address of the result, which may be that of a part.
            parts: addresses of what is reduced, at least two.
            nbytes: of each.
            dtype: one that the cores reduce.
            op: "sum", "avg", "min", "max" or "product".
        """
        ...


@functools.cache
def port() -> Port:
    """Get what the framework in use supplies."""
    return load_port(Port)
