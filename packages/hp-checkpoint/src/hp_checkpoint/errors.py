"""Errors of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CheckpointError", "InvalidCheckpointError"]


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
