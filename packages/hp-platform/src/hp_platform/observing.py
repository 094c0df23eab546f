"""Watching the collectives that a process issues."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from hp_platform.port import Handle

Given = ParamSpec("Given")
Result = TypeVar("Result")
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


_told = threading.local()


def communicate_for(
    modules: Sequence[Any], run: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
) -> Result:
    """Run what communicates for a module other than the one at hand: ahead of time, or after it.

    Where nobody observes, this is the call of ``run`` and nothing else.

    Args:
        modules: the module, and after it those that hold it, the outermost last; some in between may be left out.
        run: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        What ``run`` returns.
    """
    if not observers:
        return run(*args, **kwargs)
    before = communicating_for()
    _told.modules = modules
    try:
        return run(*args, **kwargs)
    finally:
        _told.modules = before


def communicating_for() -> Sequence[Any]:
    """Tell an observer what `communicate_for` was told in this thread; empty outside of it."""
    return getattr(_told, "modules", ())


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
