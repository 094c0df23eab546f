"""Contexts that say how DTensors meet plain tensors and local code; the same on every framework."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from hp_dtensor import port

__all__ = ["SkipDTensorDispatch", "implicit_replication", "replicates_plain"]

_implicit: contextvars.ContextVar[bool] = contextvars.ContextVar("implicit_replication", default=False)


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, a plain tensor that meets DTensors in an operation counts as replicated on their mesh.

    It must then hold the same values on every rank of the mesh. Outside, mixing the two is an error.
    """
    token = _implicit.set(True)
    try:
        yield
    finally:
        _implicit.reset(token)


def replicates_plain() -> bool:
    """Tell whether plain tensors count as replicated here."""
    return _implicit.get()


class SkipDTensorDispatch:
    """Context: inside, DTensors are their local parts in every respect. Nests; each thread has its own.

    What works element by element on local parts, an optimizer's step above all, runs in it untouched.

    Example:
        >>> with SkipDTensorDispatch():
        ...     optimizer.step()
    """

    def __init__(self) -> None:
        self._contexts: list[Any] = []

    def __enter__(self) -> SkipDTensorDispatch:
        context = port.gradients().local_mode()
        context.__enter__()
        self._contexts.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)
