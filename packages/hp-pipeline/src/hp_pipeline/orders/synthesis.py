"""The best order that can be found for a pipeline's costs and a limit of memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from hp_pipeline import schedules
from hp_pipeline.orders.checking import check
from hp_pipeline.orders.greedy import block_order, fill, greedy, turns
from hp_pipeline.orders.pipeline import Order, Pipeline
from hp_pipeline.orders.simulation import Trace, halves, open_forwards, simulate

_FORMULAS: tuple[Callable[[Pipeline], Order], ...] = (
    schedules.gpipe,
    schedules.one_f_one_b,
    schedules.interleaved,
    schedules.interleaved_zb,
    schedules.zb1p,
    schedules.zb2p,
    schedules.zbv,
    schedules.v_half,
    schedules.v_min,
)
_WAYS = ((1, 1, 1, 1), (1, 2, 1, 2), (2, 2, 2, 2), (3, 3, 3, 3))
_REACH = 4


def synthesize(pipeline: Pipeline, memory: float | None = None, *, moves: int = 300, seed: int = 0) -> Order:
    """Find a fast order within a limit of memory.

    Candidates are the schedules that fit the placement, list scheduling under several limits of open forwards and
    orders of urgency, and repeated blocks; each also with its backwards for the weights moved to where ranks wait. The
    simulator takes the fastest. It is then changed step by step: a random step goes a few places earlier, the
    backwards for the weights are placed anew, and what is not slower stays.

    Args:
        pipeline: what it is for, with its costs.
        memory: bytes that a rank may hold at once, by ``pipeline.cost``; None for no limit.
        moves: how many changes to try.
        seed: of the random changes: the same arguments give the same order.

    Returns:
        Computing steps by rank.

    Raises:
        ValueError: no order was found within the limit; the text names the least memory that was.
    """
    best: tuple[float, float] | None = None
    order: Order = {}
    least = float("inf")
    for candidate in _candidates(pipeline):
        try:  # stages that are a graph, placed as those of a chain are, have fewer orders
            check(candidate, pipeline)
        except ValueError:
            continue
        trace = simulate(candidate, pipeline)
        least = min(least, max(trace.peaks))
        if memory is not None and max(trace.peaks) > memory:
            continue
        if best is None or _score(trace) < best:
            best, order = _score(trace), candidate
    if best is None:
        raise ValueError(f"synthesize: no order within {memory:g} bytes a rank; the least found takes {least:.17g}.")
    order = _improved(order, pipeline, memory, moves, random.Random(seed))
    check(order, pipeline, memory=memory)
    return order


def _score(trace: Trace) -> tuple[float, float]:
    return trace.makespan, max(trace.peaks)


def _candidates(pipeline: Pipeline) -> Iterator[Order]:
    for candidate in _unfilled(pipeline):
        yield candidate
        if halves(candidate):
            for limit in (max(open_forwards(candidate).values()), None):
                filled = fill(candidate, pipeline, limit)
                if filled is not None:
                    yield filled


def _unfilled(pipeline: Pipeline) -> Iterator[Order]:
    for formula in _FORMULAS:
        try:
            yield formula(pipeline)
        except ValueError:  # another placement
            continue
    chunks = max(map(len, pipeline.stages)) * pipeline.seq_slices
    ranks = pipeline.ranks
    for limit in sorted({chunks, *(chunks * ranks * part // 4 for part in (2, 3, 4, 6, 8)), chunks * ranks // 2 + 2}):
        for prefer in ("IFW", "FIW", "IWF"):
            if limit >= chunks:
                yield greedy(pipeline, limit, prefer=prefer)
    if pipeline.has_backward and pipeline.seq_slices == 1 and schedules.is_placed(pipeline, "v"):
        for ways in _WAYS:
            for gaps in turns(ranks, ways)[:3]:
                yield block_order(pipeline, ways, gaps)


def _improved(order: Order, pipeline: Pipeline, memory: float | None, moves: int, chance: random.Random) -> Order:
    """Move random steps a few places earlier, as long as nothing gets slower."""
    best = _score(simulate(order, pipeline))
    split = bool(halves(order))
    for _ in range(moves):
        rank = chance.randrange(pipeline.ranks)
        steps = list(order[rank])
        place = chance.randrange(len(steps))
        if not place or steps[place].sub_steps:
            continue
        steps.insert(max(0, place - chance.randint(1, _REACH)), steps.pop(place))
        changed: Order | None = {**order, rank: tuple(steps)}
        if split and chance.random() < 0.5:
            changed = fill(changed, pipeline, max(open_forwards(order).values()))
        if changed is None:
            continue
        try:
            trace = simulate(changed, pipeline)
        except ValueError:  # ranks would wait for each other
            continue
        if (memory is None or max(trace.peaks) <= memory) and _score(trace) <= best:
            best, order = _score(trace), changed
    return order
