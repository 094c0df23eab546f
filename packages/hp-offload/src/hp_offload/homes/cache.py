"""A cache that follows a plan where the order of a step is known, and copies at each use where it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hp_offload.homes.planning import CachePlan, CacheUse, parts_to_evict, plan_cache


class Carrier(Protocol):
    """Copies parts between their home and the device."""

    def fetch(self, part: str) -> None:
        """Begin to copy a part to the device."""
        ...

    def wait(self, part: str) -> None:
        """Make what is computed from here on wait for the copy of a part."""
        ...

    def drop(self, part: str) -> None:
        """Let a part's memory on the device go."""
        ...

    def is_fresh(self, part: str) -> bool:
        """Tell whether a part on the device has the values of its home."""
        ...


@dataclass(frozen=True)
class Step:
    """What a cache did in a step.

    Args:
        order: the blocks in the order of their uses.
        fetched: bytes that were copied to the device.
        evicted: bytes that left before the step was over.
        peak: the most bytes that were there.
        planned: the step followed a plan from its first use to its last.
    """

    order: tuple[str, ...] = ()
    fetched: int = 0
    evicted: int = 0
    peak: int = 0
    planned: bool = False


class Cache:
    """Parts of blocks on the device, within a number of bytes.

    A step begins and ends without any. Its kind ("training", "evaluation") has the order of the last step of that kind;
    a step that goes another way copies at each use from there on, and what was used longest ago leaves first.

    Args:
        parts: of each block.
        sizes: bytes of each part.
        budget: bytes.
        ahead: how many uses ahead parts are copied.
        carrier: copies.

    Attributes:
        last: what the last whole step did.
    """

    def __init__(
        self, parts: Mapping[str, Sequence[str]], sizes: Mapping[str, int], budget: int, ahead: int, carrier: Carrier
    ) -> None:
        self._parts, self._sizes, self.budget, self.ahead, self._carrier = parts, sizes, budget, ahead, carrier
        self._plans: dict[str, CachePlan] = {}
        self._held: dict[str, int] = {}  # in the order of their last uses
        self.last = Step()
        self.begin("")

    def resize(self, budget: int) -> None:
        """Hold as many bytes from here on; plans are made anew."""
        self.budget, self._plan = budget, None
        self._plans.clear()

    def begin(self, kind: str) -> None:
        """Begin a step: of a kind, or with `""` one that nothing is learned from."""
        self._drop_all()
        self._kind, self._plan = kind, self._plans.get(kind)
        self._trace: list[str] = []
        self._current = ""
        self._fetched = self._evicted = self._peak = 0

    def use(self, block: str) -> None:
        """Have a block's parts on the device for what is computed next."""
        stale = [part for part in self._parts[block] if part in self._held and not self._carrier.is_fresh(part)]
        if stale:
            self._plan = None
            self._evict(stale)
        if block != self._current or stale:
            position, self._current = len(self._trace), block
            if self._kind:
                self._trace.append(block)
            self._do(self._next(position, block))
        for part in self._parts[block]:
            if part not in self._held:  # another use made it leave
                self._plan = None
                self._do(self._on_demand(block))
            self._carrier.wait(part)
            self._held[part] = self._held.pop(part)

    def end(self, whole: bool) -> None:
        """End a step, and learn its order if it is `whole`: nothing raised, and what began came to its end."""
        if whole and self._kind:
            order, planned = tuple(self._trace), self._plan is not None and len(self._trace) == len(self._plan.uses)
            self.last = Step(order, self._fetched, self._evicted, self._peak, planned)
            if not planned:
                plan = plan_cache(order, self._parts, self._sizes, self.budget, ahead=self.ahead)
                self._plans[self._kind] = plan
        self.begin("")

    def _next(self, position: int, block: str) -> CacheUse:
        if self._plan is not None and position < len(self._plan.uses) and self._plan.uses[position].block == block:
            return self._plan.uses[position]
        self._plan = None
        return self._on_demand(block)

    def _on_demand(self, block: str) -> CacheUse:
        missing = [part for part in dict.fromkeys(self._parts[block]) if part not in self._held]
        needed, uses = sum(self._sizes[part] for part in missing), [*self._held]
        leaving = parts_to_evict(self._held, needed, self.budget, self._parts[block], lambda part: -uses.index(part))
        assert leaving is not None, "a block fits in the cache"
        return CacheUse(block, tuple(leaving), tuple(missing))

    def _do(self, use: CacheUse) -> None:
        self._evict(use.evicted)
        for part in use.fetched:
            self._carrier.fetch(part)
            self._held[part] = self._sizes[part]
            self._fetched += self._sizes[part]
        self._peak = max(self._peak, sum(self._held.values()))

    def _evict(self, parts: Sequence[str]) -> None:
        for part in parts:
            self._evicted += self._held.pop(part)
            self._carrier.drop(part)

    def _drop_all(self) -> None:
        for part in self._held:
            self._carrier.drop(part)
        self._held.clear()
