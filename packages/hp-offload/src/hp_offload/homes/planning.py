"""What a cache of the device holds at each use of a block: what is used again soonest stays.

Note [Who leaves a cache]
    The uses of a step are known from the second step on. When room is needed, what is used again last leaves first, and
    what is never used again before all (L. A. Belady, "A study of replacement algorithms for a virtual-storage
    computer", 1966). Where all parts have equal bytes no other choice copies less. Where they have not, the least is a
    hard problem, and this is a heuristic: what would leave and need not, because bigger parts leave too, stays. What is
    copied ahead needs room beside the block in use, and makes nothing leave that is used before it; where there is
    no such room it is copied when it is used.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CacheUse:
    """One use of a block, and what is done for it when it begins.

    Args:
        block: that is used.
        evicted: parts that leave the cache, in order.
        fetched: parts that are copied to the device, in order: those of this use that are not there, then those ahead.
        ahead: how many of `fetched`, from the end, are for later uses.
    """

    block: str
    evicted: tuple[str, ...] = ()
    fetched: tuple[str, ...] = ()
    ahead: int = 0


@dataclass(frozen=True)
class CachePlan:
    """What the cache does in one step.

    Args:
        uses: in order.
        fetched: bytes that are copied to the device.
        evicted: bytes that leave the cache before the step is over.
        peak: the most bytes that it holds.
    """

    uses: tuple[CacheUse, ...]
    fetched: int
    evicted: int
    peak: int


@dataclass(frozen=True)
class ParameterVisits:
    """Parameters that live on the host, and the uses for which they come to a cache; `Placed.visits` has them.

    Args:
        order: the blocks in the order of their uses in a step.
        parts: of each block.
        sizes: bytes of each part.
        gradients: bytes that leave in a step.
        ahead: how many uses ahead parts are copied.
    """

    order: Sequence[str]
    parts: Mapping[str, Sequence[str]]
    sizes: Mapping[str, int]
    gradients: int = 0
    ahead: int = 1

    def caches(self) -> list[int]:
        """List the bytes of caches to choose from: from the largest block's to those of all, up to 16 of them.

        >>> ParameterVisits("abba", {"a": ["a"], "b": ["b"]}, {"a": 3, "b": 2}).caches()
        [3, 5]
        """
        least = max(sum(self.sizes[part] for part in dict.fromkeys(self.parts[block])) for block in self.parts)
        sums = itertools.accumulate(sorted(self.sizes.values(), reverse=True))
        sizes = sorted({least, *(each for each in sums if each > least)})
        places = {round(place * (len(sizes) - 1) / (_CACHES - 1)) for place in range(_CACHES)}
        return [sizes[place] for place in sorted(places)]

    def copied(self, cache: int) -> tuple[int, int]:
        """Count the bytes that come in a step, and those of them that come when they are used."""
        plan = plan_cache(self.order, self.parts, self.sizes, cache, ahead=self.ahead)
        late = (part for use in plan.uses for part in use.fetched[: len(use.fetched) - use.ahead])
        return plan.fetched, sum(self.sizes[part] for part in late)


_CACHES = 16


def plan_cache(
    order: Sequence[str], parts: Mapping[str, Sequence[str]], sizes: Mapping[str, int], cache: int, *, ahead: int = 1
) -> CachePlan:
    """Plan what a cache holds in a step whose uses are known: Note [Who leaves a cache].

    Example:
        >>> plan = plan_cache("abcba", {name: [name] for name in "abc"}, {"a": 1, "b": 1, "c": 1}, 2, ahead=0)
        >>> [use.fetched for use in plan.uses], plan.fetched
        ([('a',), ('b',), ('c',), (), ('a',)], 4)

    Args:
        order: the blocks in the order of their uses, forward and backward. The cache is empty before and after.
        parts: of each block: what is copied as one. Blocks that share a parameter share a part.
        sizes: bytes of each part.
        cache: bytes that the cache may hold.
        ahead: how many uses ahead parts are copied.

    Returns:
        What is done at each use.

    Raises:
        ValueError: `ahead` is negative; the parts of a block don't fit in the cache.
    """
    check_cache({name: sum(sizes[part] for part in dict.fromkeys(parts[name])) for name in order}, cache, ahead)
    following = _next_uses(order, parts)
    held: dict[str, int] = {}
    uses: list[CacheUse] = []
    fetched_bytes = evicted_bytes = peak = 0
    for index, block in enumerate(order):
        evicted: list[str] = []
        fetched: list[str] = []
        late = 0

        keep: set[str] = set()
        for later in range(index, min(index + ahead, len(order) - 1) + 1):
            keep.update(parts[order[later]])
            missing = [part for part in dict.fromkeys(parts[order[later]]) if part not in held]
            needed = sum(sizes[part] for part in missing)
            leaving = parts_to_evict(held, needed, cache, keep, functools.partial(following, index))
            if leaving is None:
                break
            for part in leaving:
                evicted_bytes += held.pop(part)
            held.update((part, sizes[part]) for part in missing)
            evicted += leaving
            fetched += missing
            late = len(missing) if later == index else late
            peak = max(peak, sum(held.values()))
        fetched_bytes += sum(sizes[part] for part in fetched)
        uses.append(CacheUse(block, tuple(evicted), tuple(fetched), len(fetched) - late))
    return CachePlan(tuple(uses), fetched_bytes, evicted_bytes, peak)


def parts_to_evict(
    held: Mapping[str, int],
    needed: int,
    cache: int,
    keep: Iterable[str],
    next_use: Callable[[str], float],
) -> list[str] | None:
    """Choose the parts that leave so that `needed` bytes fit, those used again last first.

    >>> parts_to_evict({"a": 2, "b": 3, "c": 1}, 2, 6, ["c"], {"a": 9, "b": 5}.get)
    ['a']

    Args:
        held: bytes of the parts that are there.
        needed: bytes of what comes.
        cache: bytes that fit.
        keep: parts that stay.
        next_use: when a part is used again.

    Returns:
        The parts; None where what stays leaves no room.
    """
    over = sum(held.values()) + needed - cache
    stays = set(keep)
    leaving: list[str] = []
    for part in sorted((part for part in held if part not in stays), key=next_use, reverse=True):
        if over <= 0:
            break
        leaving.append(part)
        over -= held[part]
    if over > 0:
        return None
    for part in reversed(list(leaving)):  # the ones that leave last may be small ones that need not
        if over + held[part] <= 0:
            leaving.remove(part)
            over += held[part]
    return leaving


def check_cache(sizes: Mapping[str, int], cache: int, ahead: int) -> None:
    """Refuse a cache that a block doesn't fit in.

    Args:
        sizes: bytes of each block.
        cache: bytes.
        ahead: uses.

    Raises:
        ValueError: `ahead` is negative, or the largest block has more bytes than the cache.
    """
    if ahead < 0:
        raise ValueError(f"ahead is how many uses ahead a block is copied: 0 or more, got {ahead}.")
    largest = max(sizes, key=lambda name: sizes[name], default=None)
    if largest is not None and sizes[largest] > cache:
        raise ValueError(
            f"A cache of {cache:,} bytes is smaller than block {largest!r}, whose parameters take"
            f" {sizes[largest]:,}: give cache={sizes[largest]} or more, or smaller blocks homes of their own."
        )


def _next_uses(order: Sequence[str], parts: Mapping[str, Sequence[str]]) -> Callable[[int, str], float]:
    """Return what tells when a part is used after a position; infinity: not again."""
    positions: dict[str, list[int]] = {}
    for index, block in enumerate(order):
        for part in parts[block]:
            positions.setdefault(part, []).append(index)
    passed = dict.fromkeys(positions, 0)

    def following(index: int, part: str) -> float:
        own = positions[part]
        while passed[part] < len(own) and own[passed[part]] <= index:
            passed[part] += 1
        return own[passed[part]] if passed[part] < len(own) else math.inf

    return following
