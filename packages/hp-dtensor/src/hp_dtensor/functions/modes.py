"""Contexts for DTensors next to plain tensors and in local code; the same on every framework."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

from hp_dtensor import port

_implicit: contextvars.ContextVar[bool] = contextvars.ContextVar("implicit_replication", default=False)
_open: list[object] = []  # the contexts of all threads


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Treat plain tensors in operations with DTensors as replicated on their mesh.

    They must have the same values on every rank of the mesh. Outside of this context, mixing the two is an error.
    Threads of Python each have their own contexts; those of a framework, as the ones that run backward and its
    recomputed blocks on an accelerator, have the contexts of all.
    """
    token = _implicit.set(True)
    _open.append(token)
    try:
        yield
    finally:
        _open.remove(token)
        _implicit.reset(token)


def replicates_plain() -> bool:
    """Tell whether plain tensors count as replicated here."""
    return _implicit.get() or bool(_open) and isinstance(threading.current_thread(), threading._DummyThread)


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
