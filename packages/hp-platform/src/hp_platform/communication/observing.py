"""Watching the collectives that a process issues."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from hp_platform.port import Handle

Arguments = ParamSpec("Arguments")
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
        The functions to call when it is over.
    """
    callbacks = [observer(kind, size, group) for observer in tuple(observers)]
    return [done for done in callbacks if done is not None]


_local = threading.local()


def attribute_to(
    modules: Sequence[Any], run: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Run a function whose collectives observers shall attribute to a module other than the running one.

    Such collectives are issued ahead of the module's call, or after it. If nobody observes, this only calls ``run``.

    Args:
        modules: the module, then the modules around it, the outermost last; some in between may be left out.
        run: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The result of ``run``.
    """
    if not observers:
        return run(*args, **kwargs)
    before = attributed_modules()
    _local.modules = modules
    try:
        return run(*args, **kwargs)
    finally:
        _local.modules = before


def attributed_modules() -> Sequence[Any]:
    """Return the modules of the innermost `attribute_to` in this thread; empty outside of any."""
    return getattr(_local, "modules", ())


class Observed:
    """A collective under way whose end is reported to observers.

    Args:
        work: the platform's handle; None where the collective has been waited for.
        done: functions to call, once, at its end.
    """

    def __init__(self, work: Handle | None, done: Sequence[Done]) -> None:
        self.work, self.done = work, done

    def wait(self) -> None:
        """Wait for the collective and report its end."""
        if self.work is not None:
            self.work.wait()
        for each in self.done:
            each()
        self.done = ()


class CollectiveCounts(Counter[str]):
    """Number of calls of each kind of collective.

    Attributes:
        bytes: sum over the calls of the size of the larger tensor.
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
