"""Contexts for DTensors next to plain tensors and in local code; the same on every framework."""

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
    """Treat plain tensors in operations with DTensors as replicated on their mesh.

    They must have the same values on every rank of the mesh. Outside of this context, mixing the two is an error.
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
    """Context in which DTensors act as their local tensors in every respect. Nests; each thread has its own.

    Elementwise code, above all an optimizer's step, runs in it unchanged.

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
