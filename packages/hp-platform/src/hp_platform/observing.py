"""Watching the collectives that a process issues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Observer = Callable[[str, int, Any], None]

# Called with (kind, bytes, group) before each collective; every platform's collectives read this one list.
observers: list[Observer] = []


class CollectiveCounts(Counter[str]):
    """How often each kind of collective was called.

    Attributes:
        bytes: sum of the sizes that the calls moved, by the larger of a call's tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def observe(self, kind: str, size: int, group: Any) -> None:
        """Count one call."""
        self[kind] += 1
        self.bytes += size


@contextmanager
def count_collectives() -> Iterator[CollectiveCounts]:
    """Count the collectives that this process issues inside the block.

        with count_collectives() as counts:
            all_reduce(tensor, group=group)
        counts["all_reduce"]  # 1

    Yields:
        The counts, which stay readable afterwards. Threads that issue collectives meanwhile (the backward pass) are
        counted too.
    """
    counts = CollectiveCounts()
    observers.append(counts.observe)
    try:
        yield counts
    finally:
        observers.remove(counts.observe)
