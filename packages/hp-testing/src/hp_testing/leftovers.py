"""What stays of a step until Python's collector runs: tensors, modules and groups in cycles of references."""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable

_KINDS = {"torch": {"Tensor", "Module", "ProcessGroup"}, "mindspore": {"Tensor", "Cell"}}
_PATIENCE = 5.0  # seconds; spent only where each step left more than the one before


@functools.cache
def _matters(kind: type) -> bool:
    return any(base.__name__ in _KINDS.get(str(base.__module__).partition(".")[0], ()) for base in kind.__mro__)


def _live() -> int:
    return sum(_matters(type(each)) for each in gc.get_objects())


def _grows(counts: list[int]) -> bool:
    return all(one < other for one, other in itertools.pairwise(counts))


def leftovers(step: Callable[[], object], *, steps: int = 4) -> list[str]:
    """Run a step several times with the collector off, and describe what each leaves behind.

    The step runs once before, so that what it creates for good is there.

    Args:
        step: one step.
        steps: how many times it runs.

    Returns:
        Each kind of tensor, module or group that the steps left in cycles, with how many; and the numbers of live
        tensors after each step, if they only grow. Empty where all is well.
    """
    step()
    gc.collect()
    enabled, counts = gc.isenabled(), list[int]()
    gc.disable()
    gc.freeze()  # what was there before, as of a compiler, may end meanwhile
    try:
        for _ in range(steps):
            step()
            counts.append(_live())
        until = time.monotonic() + _PATIENCE
        while _grows(counts) and time.monotonic() < until:
            # What was communicated stays until the thread that did it runs once more.
            time.sleep(0.01)
            counts[-1] = _live()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
    finally:
        gc.set_debug(0)
        gc.unfreeze()
        if enabled:
            gc.enable()
    cyclic = any(_matters(type(each)) for each in gc.garbage)
    kinds = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage if cyclic)
    gc.garbage.clear()
    found = [f"{count} {name} in cycles" for name, count in kinds.items() if not name.startswith("builtins.")]
    if _grows(counts):
        found.append(f"more live tensors after each step: {counts}")
    return found
