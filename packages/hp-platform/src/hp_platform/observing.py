"""Watching the collectives that a process issues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_platform.protocols import Handle

Done = Callable[[], None]
Observer = Callable[[str, int, Any], Done | None]

# Called with (kind, bytes, group) before each collective; every platform's collectives read this one list. What an
# observer returns is called once the collective has been waited for: at its end, with `async_op` in the handle's wait.
observers: list[Observer] = []


def begin(kind: str, size: int, group: Any) -> list[Done]:
    """Tell all observers that a collective begins.

    Args:
        kind: "all_reduce", "all_gather", ...
        size: bytes.
        group: the platform's group.

    Returns:
        What is to be called when it is over.
    """
    found = [observer(kind, size, group) for observer in tuple(observers)]
    return [done for done in found if done is not None]


class Observed:
    """A collective under way that somebody wants to know the end of.

    Args:
        work: the platform's handle; None where the collective has been waited for.
        done: what to call, once, when it is over.
    """

    def __init__(self, work: Handle | None, done: Sequence[Done]) -> None:
        self.work, self.done = work, done

    def wait(self) -> None:
        """Wait for the collective and tell its end."""
        if self.work is not None:
            self.work.wait()
        for each in self.done:
            each()
        self.done = ()


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
