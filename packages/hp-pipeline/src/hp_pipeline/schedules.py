"""Schedules: pure functions from a pipeline to the steps of each rank, and a search for the fastest of them.

Note [Phases]
    Most schedules are a few phases for each rank: a pattern of steps and how often it comes. A pattern names steps by
    type and chunk (the rank's own stages, from 0): ``"F0 I1 W1"``; ``"F0+B1"`` are two that run together. Forwards
    take the chunk's micro-batches in order, and so do backwards; ``W1`` is the oldest backward for the weights that
    waits in chunk 1, ``W`` in any. Where sequences are sliced, each slice is a step of its own. What goes beyond the
    last micro-batch is left out, so a pattern may come too often.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from hp_pipeline.orders.checking import check
from hp_pipeline.orders.greedy import block_order, fill, greedy, turns
from hp_pipeline.orders.pipeline import MetaStep, MetaStepType, Order, Pipeline, Shape, compute_parts, placed
from hp_pipeline.orders.simulation import Trace, halves, open_forwards, simulate

__all__ = [
    "dual_pipe_v",
    "forwards_of",
    "from_phases",
    "gpipe",
    "hanayo",
    "interleaved",
    "interleaved_zb",
    "is_placed",
    "looped_bfs",
    "one_f_one_b",
    "seq_pp",
    "synthesize",
    "v_half",
    "v_min",
    "zb1p",
    "zb2p",
    "zbv",
]

Phases = Iterable[tuple[int, str]]
_TYPES = {kind.value: kind for kind in MetaStepType}
_STEP = re.compile(r"(?P<kind>[FBI])(?P<chunk>\d+)|W(?P<waiting>\d*)")
_SIMULATED = 12_000  # micro-batches times ranks, over all blocks that are compared


def from_phases(pipeline: Pipeline, phases: Callable[[int], Phases]) -> Order:
    """Write the order of phases out: Note [Phases].

    Args:
        pipeline: what it is for.
        phases: for a rank, its pairs of (how often, pattern).

    Raises:
        ValueError: a pattern with something that is no step of the rank's own stages.
    """
    return {rank: _written(pipeline, rank, phases(rank)) for rank in range(pipeline.ranks)}


def _written(pipeline: Pipeline, rank: int, phases: Phases) -> tuple[MetaStep, ...]:
    counts: Counter[str] = Counter()
    weights: list[tuple[str, int]] = []  # backwards for the weights that are to come: (chunk, index)
    slices, steps = pipeline.seq_slices, []
    total = pipeline.micro_batches * slices

    def take(token: str) -> MetaStep | None:
        kind, chunk = _TYPES[token[0]], token[1:]
        if kind is MetaStepType.BACKWARD_WEIGHT:
            waiting = next((each for each in weights if not chunk or each[0] == chunk), None)
            if waiting is None:
                return None
            weights.remove(waiting)
            chunk, index = waiting
        else:
            counter = "F" + chunk if kind is MetaStepType.FORWARD else chunk
            index = counts[counter]
            counts[counter] += 1
            if index >= total:
                return None
            if kind is MetaStepType.BACKWARD_INPUT:
                weights.append((chunk, index))
        micro, part = divmod(index, slices)
        part = part if kind is MetaStepType.FORWARD else slices - 1 - part
        return MetaStep(micro, kind, pipeline.stages[rank][int(chunk)], None, part)

    for times, pattern in phases:
        tokens = _tokens(pipeline, rank, pattern)
        for _ in range(times):
            before = len(steps)
            for token in tokens:
                taken = [step for step in map(take, token) if step is not None]
                if len(taken) == 2:
                    ahead = taken[0].step_type is MetaStepType.FORWARD
                    kind = MetaStepType.OVERLAP_F_B if ahead else MetaStepType.OVERLAP_B_F
                    taken = [MetaStep(None, kind, None, (taken[0], taken[1]))]
                steps += taken
            if len(steps) == before:
                break
    return tuple(steps)


def _tokens(pipeline: Pipeline, rank: int, pattern: str) -> list[list[str]]:
    """Read a pattern: its steps, those that run together in one list."""
    chunks = len(pipeline.stages[rank])
    tokens = [token.split("+") for token in pattern.split()]
    for token in tokens:
        for step in token:
            match = _STEP.fullmatch(step)
            if match is None or len(token) > 2:
                raise ValueError(
                    f"from_phases: rank {rank}: {'+'.join(token)!r} in {pattern!r} is not a step; a step is F, B, I or"
                    " W and the number of one of the rank's own stages, from 0, such as 'F0', or two with a plus."
                )
            chunk = match["chunk"] or match["waiting"]
            if chunk and int(chunk) >= chunks:
                own = f"{chunks} stages" if chunks > 1 else "one stage"
                raise ValueError(
                    f"from_phases: rank {rank}: {step!r} in {pattern!r} names the rank's own stage {chunk}, but it has"
                    f" {own}, numbered from 0."
                )
    return tokens


def forwards_of(make: Callable[[Pipeline], Order], pipeline: Pipeline) -> Order:
    """Return the forwards of an order that trains, for a pipeline without backward.

    Args:
        make: returns the order of a pipeline.
        pipeline: without backward.
    """
    order = make(dataclasses.replace(pipeline, has_backward=True))
    return {
        rank: tuple(part for step in steps for part in compute_parts(step) if part.step_type is MetaStepType.FORWARD)
        for rank, steps in order.items()
    }


def is_placed(pipeline: Pipeline, shape: Shape) -> bool:
    """Tell whether a pipeline's stages are placed in a shape: see ``placed``."""
    stages, ranks = len(pipeline.placement), pipeline.ranks
    if stages % ranks or shape != "loop" and stages // ranks != {"line": 1, "v": 2, "w": 4}[shape]:
        return False
    return pipeline.placement == placed(shape, ranks, stages // ranks)


def _check_placed(pipeline: Pipeline, name: str, shape: Shape) -> None:
    """Check that stages are placed as a schedule needs it."""
    if not is_placed(pipeline, shape):
        raise ValueError(
            f"{name} needs stages placed as placed({shape!r}, {pipeline.ranks}), got {pipeline.placement}."
        )


def gpipe(pipeline: Pipeline) -> Order:
    """All forwards, then all backwards: every rank holds all micro-batches. GPipe, Huang et al. 2019.

    With several stages a rank, each stage takes all micro-batches before the next (looped, breadth first: Lamy-Poirier
    2023).
    """
    total = pipeline.micro_batches * pipeline.seq_slices

    def phases(rank: int) -> Phases:
        chunks = range(len(pipeline.stages[rank]))
        ahead = [(total, f"F{chunk}") for chunk in chunks]
        return ahead + [(total, f"B{chunk}") for chunk in reversed(chunks)]

    return from_phases(pipeline, phases)


looped_bfs = gpipe


def one_f_one_b(pipeline: Pipeline) -> Order:
    """One forward, one backward, as soon as there is a backward: rank r holds P - r micro-batches. PipeDream, 2019.

    With slices of the sequence the schedule is SeqPP's: the slices of a micro-batch go ahead first to last and come
    back last to first, and a rank holds P - r slices and those of one micro-batch.
    """
    _check_placed(pipeline, "1F1B", "line")
    total = pipeline.micro_batches * pipeline.seq_slices

    def phases(rank: int) -> Phases:
        # The forwards of the second phase run out first; its last turns are backwards alone.
        return [(pipeline.ranks - 1 - rank + pipeline.seq_slices - 1, "F0"), (total, "F0 B0")]

    return from_phases(pipeline, phases)


seq_pp = one_f_one_b


def interleaved(pipeline: Pipeline, *, overlap: bool = False, split: bool = False) -> Order:
    """1F1B over several stages a rank, in rounds of at least P micro-batches: bubble 1 / V. Narayanan et al. 2021.

    Args:
        pipeline: with its stages in a loop; any number of micro-batches.
        overlap: run a backward and the forward after it together: ``F, (B F)*, B``.
        split: each backward in two halves, the one for the weights right after the one for the inputs and what runs
            together with it: the gradients of the inputs are sent before.
    """
    _check_placed(pipeline, "interleaved 1F1B", "loop")
    chunks = len(pipeline.stages[0])
    ranks, largest, ahead, back = pipeline.ranks, *_rounds(pipeline, chunks)

    def phases(rank: int) -> Phases:
        warm = min((chunks - 1) * largest + 2 * (ranks - 1 - rank), len(ahead) - 1 if overlap else len(ahead))
        phases = [(1, f"F{chunk}") for chunk in ahead[: warm + overlap]]
        joint = ("I{0}+F{1} W{0}" if split else "B{0}+F{1}") if overlap else "F{1} I{0} W{0}" if split else "F{1} B{0}"
        alone = "I{0} W{0}" if split else "B{0}"
        phases += [(1, joint.format(b, f)) for b, f in zip(back, ahead[warm + overlap :], strict=False)]
        return phases + [(1, alone.format(chunk)) for chunk in back[len(ahead) - warm - overlap :]]

    return from_phases(pipeline, phases)


def _rounds(pipeline: Pipeline, chunks: int) -> tuple[int, list[int], list[int]]:
    """Return the most micro-batches of a round, and the chunks that forwards and backwards come to, in their order."""
    micros = pipeline.micro_batches
    rounds = max(1, micros // pipeline.ranks)
    sizes = [micros // rounds + (index < micros % rounds) for index in range(rounds)]
    # Each of a round's micro-batches through one stage, then through the next.
    ahead = [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]
    back = [chunk for size in sizes for chunk in reversed(range(chunks)) for _ in range(size)]
    return max(sizes), ahead, back


def interleaved_zb(pipeline: Pipeline) -> Order:
    """Interleaved 1F1B in halves, half of its warm-up: zero bubble but for the fill, at about 1F1B's memory.

    As in ZB1P a rank is short of forwards by its number, and as many backwards for the weights wait. 2401.10241.
    """
    _check_placed(pipeline, "interleaved zero bubble", "loop")
    chunks = len(pipeline.stages[0])
    largest, ahead, back = _rounds(pipeline, chunks)

    def phases(rank: int) -> Phases:
        warm = min((chunks - 1) * largest + pipeline.ranks - 1 - rank, len(ahead))
        yield from ((1, f"F{chunk}") for chunk in ahead[:warm])
        for index, (b, f) in enumerate(zip(back, ahead[warm:], strict=False)):
            yield 1, f"F{f} I{b}" if index < rank else f"F{f} I{b} W"
        yield from ((1, f"I{chunk} W") for chunk in back[len(ahead) - warm :])
        yield len(ahead), "W"

    return from_phases(pipeline, phases)


def zb1p(pipeline: Pipeline) -> Order:
    """Zero bubble at 1F1B's memory: bubble (P - 1)(F + I - W). ZB-H1 of Qi et al., 2401.10241."""
    _check_placed(pipeline, "ZB1P", "line")
    total, last = pipeline.micro_batches * pipeline.seq_slices, pipeline.ranks - 1

    def phases(rank: int) -> Phases:
        # A rank is short of forwards by its number: as many backwards for the weights wait.
        warm = last - rank + pipeline.seq_slices - 1
        return [(warm, "F0"), (rank, "F0 I0"), (total, "F0 I0 W0"), (total, "W0")]

    return from_phases(pipeline, phases)


def zb2p(pipeline: Pipeline) -> Order:
    """Zero bubble at twice 1F1B's memory: no rank waits between its first and its last step. ZB-H2, 2401.10241."""
    _check_placed(pipeline, "ZB2P", "line")
    return greedy(pipeline, 2 * pipeline.ranks)


def zbv(pipeline: Pipeline) -> Order:
    """Zero bubble at 1F1B's memory, stages there and back: what is left is the fill. ZB-V of 2401.10241."""
    _check_placed(pipeline, "ZBV", "v")
    ranks, total = pipeline.ranks, pipeline.micro_batches * pipeline.seq_slices

    def phases(rank: int) -> Phases:
        yield 2 * (ranks - rank) - 1, "F0"
        yield rank, "F1 F0"
        yield ranks - rank, "F1 I1 W1"
        yield max(total, 2 * ranks) - ranks, "F0 I0 W0 F1 I1 W1"
        yield rank, "I0 I1"
        yield ranks - rank, "I0 W0"
        yield total, "W1"
        yield total, "W0"

    return from_phases(pipeline, phases)


def v_half(pipeline: Pipeline) -> Order:
    """Half of 1F1B's memory, P / 2 + 1 micro-batches, and of its bubble, stages there and back. 2405.15362."""
    return _from_blocks(pipeline, "V-Half", (1, 2, 1, 2), pipeline.ranks + 2)


def v_min(pipeline: Pipeline) -> Order:
    """Least memory, stages there and back: a third of 1F1B's and two thirds of its bubble. Qi et al., 2405.15362."""
    return _from_blocks(pipeline, "V-Min", (1, 1, 1, 1), None)


def _from_blocks(pipeline: Pipeline, name: str, ways: tuple[int, int, int, int], limit: int | None) -> Order:
    """Return the fastest of the orders that repeat a block with these ways: Note [A block]."""
    _check_placed(pipeline, name, "v")
    candidates = []
    few = 1 + _SIMULATED // (pipeline.ranks * pipeline.micro_batches)
    for gaps in turns(pipeline.ranks, ways)[:few]:
        block = block_order(pipeline, ways, gaps)
        filled = fill(block, pipeline, limit or max(open_forwards(block).values()))
        if filled is not None:
            trace = simulate(filled, pipeline)
            candidates.append((0 if limit else max(trace.peaks), trace.makespan, len(candidates), filled))
    return min(candidates)[-1] if candidates else greedy(pipeline, max(limit or 0, 2 * pipeline.seq_slices))


def hanayo(pipeline: Pipeline) -> Order:
    """Zero bubble at 1F1B's memory, stages there and back twice: half of ZBV's fill. Waves: Liu et al., 2023."""
    _check_placed(pipeline, "Hanayo", "w")
    limit = len(pipeline.placement)  # the open forwards of P micro-batches, in all of the stages of a rank
    orders = [greedy(pipeline, limit, prefer=prefer) for prefer in ("IFW", "FIW")]
    filled = [each for order in orders if (each := fill(order, pipeline, limit)) is not None]
    return min([*filled, *orders], key=lambda order: simulate(order, pipeline).makespan)


def dual_pipe_v(pipeline: Pipeline) -> Order:
    """ZBV with forwards and backwards that run together, each hiding the other's exchanges. DeepSeek-AI, 2025.

    With fewer than 2 P micro-batches there is nothing to run together for long, and the order is ZBV's.
    """
    _check_placed(pipeline, "DualPipeV", "v")
    ranks, total = pipeline.ranks, pipeline.micro_batches * pipeline.seq_slices
    if total < 2 * ranks:
        return zbv(pipeline)

    def phases(rank: int) -> Phases:
        rest = ranks - 1 - rank
        yield 2 * rest, "F0"
        yield rank + 1, "F0 F1"
        yield rest, "I1 W1 F1"
        yield total - 2 * ranks + rank + 1, "F0+B1 F1+B0"
        yield rest, "B1 F1+B0"
        yield (rank + 2) // 2, "B1 B0"
        yield (rank + 1) // 2, "I1 I0"
        yield rest, "W I0"
        yield 2 * total, "W"

    return from_phases(pipeline, phases)


# Without dual_pipe_v: on these clocks two steps together take as long as one after the other, so that zbv is faster.
# Without hanayo: the list scheduling that it is made of is tried below, under the same limit, for every placement.
_FORMULAS: tuple[Callable[[Pipeline], Order], ...] = (
    gpipe,
    one_f_one_b,
    interleaved,
    interleaved_zb,
    zb1p,
    zb2p,
    zbv,
    v_half,
    v_min,
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
    if pipeline.has_backward and pipeline.seq_slices == 1 and is_placed(pipeline, "v"):
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
