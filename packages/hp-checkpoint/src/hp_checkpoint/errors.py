"""Errors of checkpoints."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any


class CheckpointError(RuntimeError):
    """A save or a load failed; raised on all ranks alike.

    Args:
        text: the message, with each rank that failed and its reason.
        ranks: their global ranks, ascending.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks: tuple[int, ...] = tuple(ranks)


class InvalidCheckpointError(ValueError):
    """Files that are no checkpoint, or that were changed since they were written."""


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 80, 80
        self.maxlist = self.maxtuple = self.maxdict = 8

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 256 else f"<an integer of {x.bit_length()} bits>"


_short = _Short()


def shown(value: Any) -> str:
    """Return the beginning of a value's text, for an error: what a file has may be long, or nested without end."""
    return _short.repr(value)
