"""Keep, swap or recompute, chosen together for the fastest step that fits a budget, and the model of memory for it.

Note [The program]
    Each storage has a 0/1 variable for swap and one for recompute (neither: keep). Memory is compared with the budget
    where each block's backward begins (`Blocks`); each block that swaps has two more variables, the
    seconds that its copies take longer than the block after it, and each block that runs again has one, whose price
    is what its second run takes whatever is kept. HiGHS solves it, to optimality for steps of up to 48
    storages and to 0.2% of the step's time for larger ones. So a larger budget is never slower, but for these 0.2%.

Note [Equal blocks]
    Most models repeat one block. Then what counts is in how many blocks each storage is kept, swapped or recomputed: a
    program of three numbers a storage, rounded up to whole blocks, whatever the number of blocks. It allows for what
    every block might have on the device at once, and no waiting for copies. Blocks at the front recompute, then swap,
    those at the end keep. What room that leaves is filled by keeping more, one storage at a time. Where this program
    has no solution, the large one is solved.

Note [A cache of the same budget]
    Where parameters visit, their cache takes of the budget what saved storages leave, and the other way round. For each
    of up to 16 sizes of the cache the rest is planned as above. A step takes as long as its computation with what is
    copied too late for it, or as the busier direction of the link: parameters and what is swapped back, or gradients
    and what is swapped out. The fastest is taken, and of those that are as fast the one that copies least.

Note [Where the peak is]
    Blocks run one after the other, in backward the other way round. What is kept stays from its making to its use. What
    is computed again is there from the begin of its block's backward to its use. What is swapped is there while its
    block and the next one are in their forward, and again while the next one and its block are in their backward
    (`SwapManager`). So memory only falls inside a block's backward, and grows where one begins: there it is compared
    with the budget. A block's forward is no higher than its backward's begin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hp_offload.homes.planning import ParameterVisits
from hp_offload.saved import CheckpointPolicy, MemoryPlan, Saved, block_of, near, size

KEEP, SWAP, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE


class Blocks:
    """The blocks of a step, in the order of forward.

    Attributes:
        names: of the blocks.
        index: the block of each saved storage.
        begins: when each block's backward begins.
        forward: seconds of each block's forward.
        backward: seconds of each block's backward.
        rerun: seconds that each block's second run takes whatever is kept.
        saved: the storages, aliases left out.
    """

    def __init__(self, saved: Sequence[Saved]) -> None:
        self.saved = [each for each in saved if each.alias_of is None]
        by_block: dict[str, list[Saved]] = {}
        for each in self.saved:
            by_block.setdefault(block_of(each.site), []).append(each)
        self.names = sorted(by_block, key=lambda name: max(each.made_at for each in by_block[name]))
        place = {name: index for index, name in enumerate(self.names)}
        self.index = [place[block_of(each.site)] for each in self.saved]
        self.begins = [min(each.needed_at for each in by_block[name]) for name in self.names]
        ends = [max(each.made_at for each in by_block[name]) for name in self.names]
        self.rerun = [sum(each.rerun for each in by_block[name]) for name in self.names]
        self.end = max((each.needed_at for each in self.saved), default=0.0)
        self.forward = [end - before for end, before in zip(ends, [0.0, *ends])]
        following = [self.end, *self.begins]  # backward goes on to the block before
        self.backward = [max(0.0, after - begin) for begin, after in zip(self.begins, following)]

    def choices(self, number: int) -> list[CheckpointPolicy]:
        """List the policies that a storage may have."""
        each = self.saved[number]
        swap = each.swappable and self.index[number] < len(self.names) - 1
        again = not math.isinf(each.recompute)
        return [KEEP, *([SWAP] if swap else []), *([RECOMPUTE] if again else [])]

    def present(self, number: int, policy: CheckpointPolicy, block: int) -> bool:
        """Tell if a storage is on the device when a block's backward begins."""
        each, own = self.saved[number], self.index[number]
        time = self.begins[block]
        if each.needed_at < time:
            return False
        if policy is KEEP:
            return True
        first = own + 1 if policy is SWAP else own  # the block whose backward brings it
        return time >= self.begins[min(first, len(self.names) - 1)]

    def stalls(self, block: int, swapped: int, bandwidth: float) -> float:
        """Count the seconds that a block's copies take beyond the block after it, out and back."""
        if not swapped:
            return 0.0
        copy = swapped / bandwidth
        return max(0.0, copy - self.forward[block + 1]) + max(0.0, copy - self.backward[block + 1])


@dataclass(frozen=True)
class Replay:
    """A step under policies.

    Attributes:
        peak: the most bytes on the device.
        step: seconds.
    """

    peak: int
    step: float


def replay(
    saved: Sequence[Saved], policies: Mapping[str, CheckpointPolicy], bandwidth: float, *, in_flight: int = 1
) -> Replay:
    """Go through a step's memory and time under policies; see Note [Where the peak is].

    Args:
        saved: what the step saves.
        policies: of each site.
        bandwidth: bytes a second, in each direction.
        in_flight: micro-batches that are alive at once; what the others keep is there throughout.
    """
    blocks = Blocks(saved)
    chosen = [policies[each.site] for each in blocks.saved]
    kept = sum(each.bytes for each, policy in zip(blocks.saved, chosen) if policy is KEEP)
    peak = 0
    for block in range(len(blocks.names)):
        present = (
            each.bytes
            for number, (each, policy) in enumerate(zip(blocks.saved, chosen))
            if blocks.present(number, policy, block)
        )
        peak = max(peak, sum(present))
    again = sum(each.recompute for each, policy in zip(blocks.saved, chosen) if policy is RECOMPUTE)
    again += sum(
        blocks.rerun[block] for block in {blocks.index[n] for n, each in enumerate(chosen) if each is RECOMPUTE}
    )
    swapped = [0] * len(blocks.names)
    for number, (each, policy) in enumerate(zip(blocks.saved, chosen)):
        if policy is SWAP:
            swapped[blocks.index[number]] += each.bytes
    stalls = sum(blocks.stalls(block, count, bandwidth) for block, count in enumerate(swapped) if count)
    return Replay(peak + (in_flight - 1) * kept, blocks.end + again + stalls)


_EXACT = 48  # storages
_EQUAL = 8  # blocks
_GAP = 2e-3  # of a step's seconds: half of it takes HiGHS up to ten times as long


class BudgetError(ValueError):
    """A budget that no plan keeps to.

    Args:
        budget: bytes.
        least: bytes that the step needs.
    """

    def __init__(self, budget: int, least: int) -> None:
        self.budget, self.least = budget, least
        super().__init__(
            f"plan_memory: a budget of {size(budget)} ({budget} bytes) is below the least that this step needs,"
            f" {size(least)} ({least} bytes), by {size(least - budget)}: what its blocks are given, the largest block,"
            " and its parameters where they visit. Use smaller blocks or batches."
        )


def plan_memory(
    saved: Sequence[Saved],
    budget: int,
    bandwidth: float,
    *,
    in_flight: int = 1,
    visits: ParameterVisits | None = None,
) -> MemoryPlan:
    """Choose keep, swap or recompute for everything a step saves, so that the step is fastest and fits the budget.

    Args:
        saved: what the step saves; `trace_saved` measures it.
        budget: bytes on the device for saved storages, at most, at any moment.
        bandwidth: bytes a second between device and host, in each direction; 0 swaps nothing.
        in_flight: micro-batches that are alive at once, as a pipeline's schedule has them.
        visits: of parameters that live on the host; their cache is of the same budget, and chosen too: Note [A cache
            of the same budget].

    Returns:
        The plan; `apply_memory_plan` makes a model follow it.

    Raises:
        ValueError: the budget is below the least that any plan needs, which the text says; a site twice; an unknown
            `alias_of`; numbers out of range.
        ImportError: scipy is not installed.
    """
    _check(saved, budget, bandwidth, in_flight)
    if visits is not None:
        return _with_cache(saved, budget, bandwidth, in_flight, visits)
    usable = [each if bandwidth > 0 else replace(each, swappable=False) for each in saved]
    blocks = Blocks(usable)
    bandwidth = bandwidth or 1.0
    policies = _equal_blocks(blocks, budget, bandwidth, in_flight)
    if policies is None:
        policies = _fitting(blocks, budget, bandwidth, in_flight)
    if policies is None:
        least = _least(blocks, bandwidth, in_flight)
        raise BudgetError(budget, least)
    named = {each.site: policy for each, policy in zip(blocks.saved, policies)}
    for each in saved:
        if each.alias_of is not None:
            named[each.site] = named[each.alias_of]
    outcome = replay(usable, named, bandwidth, in_flight=in_flight)
    assert outcome.peak <= budget
    sizes = {each.site: each.bytes for each in saved if each.alias_of is None}
    return MemoryPlan({each.site: named[each.site] for each in saved}, outcome.peak, outcome.step, sizes)


def _with_cache(
    saved: Sequence[Saved], budget: int, bandwidth: float, in_flight: int, visits: ParameterVisits
) -> MemoryPlan:
    """See Note [A cache of the same budget]."""
    best: tuple[float, int, MemoryPlan] | None = None
    for cache in visits.caches():
        try:
            plan = plan_memory(saved, max(0, budget - cache), bandwidth, in_flight=in_flight)
        except BudgetError as error:
            least = error.least
        else:
            least = plan.predicted_peak
        if least + cache > budget:  # a larger cache leaves less
            if best is None:
                raise BudgetError(budget, least + cache)
            break
        fetched, late = visits.copied(cache)
        swapped = plan.total(SWAP)
        link = (max(fetched, visits.gradients) + swapped) / bandwidth if bandwidth else 0.0
        step = max(plan.predicted_step + (late / bandwidth if bandwidth else 0.0), link)
        if best is None or (step, fetched + swapped) < best[:2]:
            peak = plan.predicted_peak + cache
            best = step, fetched + swapped, replace(plan, predicted_peak=peak, predicted_step=step, cache=cache)
    assert best is not None
    return best[2]


def _check(saved: Sequence[Saved], budget: int, bandwidth: float, in_flight: int) -> None:
    sites = [each.site for each in saved]
    if len(set(sites)) < len(sites):
        twice = next(site for site in sites if sites.count(site) > 1)
        raise ValueError(f"plan_memory: the site {twice!r} is named twice; a site is one storage.")
    originals = {each.site for each in saved if each.alias_of is None}
    for each in saved:
        if each.alias_of is not None and each.alias_of not in originals:
            raise ValueError(
                f"plan_memory: {each.site!r} is an alias of {each.alias_of!r}, which is no storage"
                f"{near(each.alias_of, originals)}."
            )
    for name, value, least in (("budget", budget, 0), ("bandwidth", bandwidth, 0), ("in_flight", in_flight, 1)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value < least:
            unit = " of bytes" if name == "budget" else ""
            raise ValueError(f"plan_memory: {name} is a number{unit} of at least {least}, got {value!r}.")


def _milp(
    cost: np.ndarray,
    rows: list[tuple[np.ndarray, float]],
    upper: np.ndarray,
    integral: np.ndarray,
    gap: float,
    base: float = 0.0,
) -> np.ndarray | None:
    """Minimize `base + cost @ x`, to a relative gap, with `row @ x <= bound` for each row; None where nothing fits."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise ImportError(
            "plan_memory solves its program by scipy, which is not installed: pip install 'hp-offload[plan]'."
        ) from error
    matrix = csr_array(np.array([[*row, 0.0] for row, _ in rows]))
    lower, upper = np.array([*np.zeros(len(cost)), 1.0]), np.array([*upper, 1.0])  # the last is 1: the base
    most = np.array([bound for _, bound in rows])
    found = milp(
        np.array([*cost, base]),
        integrality=np.array([*integral, 0]),
        bounds=Bounds(lower, upper),  # type: ignore[arg-type]
        constraints=LinearConstraint(matrix, -np.inf, most),  # type: ignore[arg-type]
        options={"mip_rel_gap": gap, "time_limit": 60.0},
    )
    return None if found.x is None else found.x[:-1]


def _variables(blocks: Blocks) -> list[tuple[int, CheckpointPolicy]]:
    return [(number, policy) for number in range(len(blocks.saved)) for policy in blocks.choices(number)[1:]]


def _rows(blocks: Blocks, variables: Sequence[tuple[int, CheckpointPolicy]], in_flight: int, extra: int):
    """Build what is on the device where each block's backward begins: coefficients of the variables, and a constant."""
    unit = min(1.0, 1e6 / max(1, sum(each.bytes for each in blocks.saved)))  # HiGHS wants numbers of moderate size
    for block in range(len(blocks.names)):
        row, constant = np.zeros(len(variables) + extra), 0.0
        kept = [
            (blocks.present(number, KEEP, block) + in_flight - 1) * each.bytes * unit
            for number, each in enumerate(blocks.saved)
        ]
        constant = sum(kept)
        for column, (number, policy) in enumerate(variables):
            row[column] = blocks.present(number, policy, block) * blocks.saved[number].bytes * unit - kept[number]
        yield row, constant, unit


def _one_policy(blocks: Blocks, variables: Sequence[tuple[int, CheckpointPolicy]], extra: int):
    """Build the rows by which a storage is not both swapped and recomputed."""
    for number in range(len(blocks.saved)):
        columns = [column for column, (own, _) in enumerate(variables) if own == number]
        if len(columns) == 2:
            row = np.zeros(len(variables) + extra)
            row[columns] = 1
            yield row, 1.0


def _chosen(blocks: Blocks, variables: Sequence[tuple[int, CheckpointPolicy]], x: np.ndarray) -> list[CheckpointPolicy]:
    policies = [KEEP] * len(blocks.saved)
    for (number, policy), value in zip(variables, x):
        if value > 0.5:
            policies[number] = policy
    return policies


def _fitting(blocks: Blocks, budget: int, bandwidth: float, in_flight: int) -> list[CheckpointPolicy] | None:
    """Solve the program for a budget that its answer keeps to the byte: a solver's tolerance may be some bytes."""
    aim = budget
    while (policies := _solve(blocks, aim, bandwidth, in_flight)) is not None:
        named = {each.site: policy for each, policy in zip(blocks.saved, policies)}
        over = replay(blocks.saved, named, bandwidth, in_flight=in_flight).peak - budget
        if over <= 0:
            break
        aim -= over
    return policies


def _solve(blocks: Blocks, budget: int, bandwidth: float, in_flight: int) -> list[CheckpointPolicy] | None:
    """Solve the program of Note [The program]; None where no plan fits."""
    variables = _variables(blocks)
    count = len(blocks.names)
    waits = 2 * max(0, count - 1)  # seconds of waiting: copies out of each block, then copies back
    extra = waits + count  # and if anything of a block is computed again
    rows = [
        (row, (budget + 0.25) * unit - constant) for row, constant, unit in _rows(blocks, variables, in_flight, extra)
    ]
    if not variables:
        return [KEEP] * len(blocks.saved) if all(bound >= 0 for _, bound in rows) else None
    rows += _one_policy(blocks, variables, extra)
    for block in range(count - 1):
        for direction, window in enumerate((blocks.forward[block + 1], blocks.backward[block + 1])):
            row = np.zeros(len(variables) + extra)
            for column, (number, policy) in enumerate(variables):
                if policy is SWAP and blocks.index[number] == block:
                    row[column] = blocks.saved[number].bytes / bandwidth
            if row.any():
                row[len(variables) + 2 * block + direction] = -1
                rows.append((row, window))
    for column, (number, policy) in enumerate(variables):
        if policy is RECOMPUTE and blocks.rerun[blocks.index[number]]:
            row = np.zeros(len(variables) + extra)
            row[column], row[len(variables) + waits + blocks.index[number]] = 1, -1
            rows.append((row, 0.0))
    again = [blocks.saved[number].recompute if policy is RECOMPUTE else 0.0 for number, policy in variables]
    # Of two plans that take as long, the one that does less.
    cost = np.array([*(each + 1e-9 for each in again), *np.ones(waits), *blocks.rerun])
    scale = max(cost.max(initial=0.0), 1e-9)
    upper = np.array([*np.ones(len(variables)), *np.full(waits, np.inf), *np.ones(count)])
    integral = np.array([*np.ones(len(variables)), *np.zeros(waits), *np.ones(count)])
    gap = 0.0 if len(blocks.saved) <= _EXACT else _GAP
    x = _milp(cost / scale, rows, upper, integral, gap, blocks.end / scale)
    return None if x is None else _chosen(blocks, variables, x)


def _least(blocks: Blocks, bandwidth: float, in_flight: int) -> int:
    """Return the least peak of any plan."""
    variables = _variables(blocks)
    rows = []
    for row, constant, _ in _rows(blocks, variables, in_flight, 1):
        row[-1] = -1
        rows.append((row, -constant))
    rows += _one_policy(blocks, variables, 1)
    cost = np.zeros(len(variables) + 1)
    cost[-1] = 1
    upper = np.array([*np.ones(len(variables)), np.inf])
    integral = np.array([*np.ones(len(variables)), 0])
    x = _milp(cost, rows, upper, integral, 1e-6)
    assert x is not None
    named = {each.site: policy for each, policy in zip(blocks.saved, _chosen(blocks, variables, x))}
    return replay(blocks.saved, named, bandwidth, in_flight=in_flight).peak


# ---- equal blocks ----
def _equal_blocks(blocks: Blocks, budget: int, bandwidth: float, in_flight: int) -> list[CheckpointPolicy] | None:
    """Plan the blocks that are equal by Note [Equal blocks]; None where there are few, or where it finds no plan."""
    layers = _equal(blocks)
    if len(layers) < _EQUAL:
        return None
    first = layers[0]
    number, width = len(layers), len(first)
    sizes = np.array([blocks.saved[each].bytes for each in first], float) * 2.0**-20
    again = np.array([blocks.saved[each].recompute for each in first])
    own = {each for layer in layers for each in layer}
    others = sum(each.bytes for index, each in enumerate(blocks.saved) if index not in own) * 2.0**-20 * in_flight
    # Columns: layers that swap, layers that recompute, any that swaps, any that recomputes; of each storage. Then the
    # layers that run again.
    swap, rec, any_swap, any_rec = (slice(part * width, (part + 1) * width) for part in range(4))
    column = lambda: np.zeros(4 * width + 1)  # noqa: E731
    memory = column()
    memory[swap] = memory[rec] = -in_flight * sizes
    memory[any_swap], memory[any_rec] = 2 * sizes, sizes
    rows = [(memory, budget * 2.0**-20 - others - in_flight * number * sizes.sum())]
    link = column()
    link[any_swap] = sizes * 2.0**20 / bandwidth
    window = min(min(blocks.forward[1:]), min(blocks.backward[1:]))
    rows.append((link, window))
    for each in range(width):
        both, swaps, recs, runs = column(), column(), column(), column()
        both[swap][each] = both[rec][each] = both[any_swap][each] = 1  # the last layer does not swap
        runs[rec][each], runs[-1] = 1, -1
        swaps[swap][each], swaps[any_swap][each] = 1, -number
        recs[rec][each], recs[any_rec][each] = 1, -number
        rows += [(both, number), (swaps, 0.0), (recs, 0.0), (runs, 0.0)]
    cost = column()
    impossible = np.isinf(again)
    cost[rec] = np.where(impossible, 0, again) + 1e-9
    cost[swap] = 1e-9
    cost[-1] = sum(blocks.saved[each].rerun for each in first)
    swappable = np.array([blocks.saved[each].swappable for each in first])
    upper = np.array([*(swappable * (number - 1)), *(~impossible * number), *np.ones(2 * width), number])
    integral = np.array([*np.zeros(2 * width), *np.ones(2 * width + 1)])  # numbers of layers are rounded up
    x = _milp(cost / cost.max(), rows, upper, integral, _GAP, blocks.end / cost.max())
    if x is None:
        return None
    policies = [KEEP] * len(blocks.saved)
    recs = np.ceil(x[rec] - 1e-6).astype(int)
    swaps = np.minimum(np.ceil(x[swap] - 1e-6), number - 1 - recs).clip(0).astype(int)
    for depth, layer in enumerate(layers):
        for place, each in enumerate(layer):
            if depth < recs[place]:
                policies[each] = RECOMPUTE
            elif depth < recs[place] + swaps[place]:
                policies[each] = SWAP
    return _filled(blocks, policies, budget, in_flight)


def _equal(blocks: Blocks) -> list[list[int]]:
    """Return the storages of each of the equal blocks, which follow one another."""
    by_block: list[list[int]] = [[] for _ in blocks.names]
    for number, block in enumerate(blocks.index):
        by_block[block].append(number)
    for members in by_block:
        members.sort(key=lambda number: blocks.saved[number].site.removeprefix(blocks.names[blocks.index[number]]))

    def kind(block: int):
        name = blocks.names[block]
        members = [blocks.saved[number] for number in by_block[block]]
        return [
            (each.site.removeprefix(name), each.bytes, each.swappable, math.isinf(each.recompute)) for each in members
        ]

    best: list[int] = []
    run: list[int] = []
    for block in range(len(blocks.names)):
        run = [*run, block] if run and kind(block) == kind(run[-1]) else [block]
        best = max(best, run, key=len)
    return [by_block[block] for block in best]


def _filled(
    blocks: Blocks, policies: list[CheckpointPolicy], budget: int, in_flight: int
) -> list[CheckpointPolicy] | None:
    """Keep more where there is room, the dearest seconds a byte first, from the last block on."""
    begins = range(len(blocks.names))
    at = np.array([
        sum(each.bytes for number, each in enumerate(blocks.saved) if blocks.present(number, policies[number], block))
        for block in begins
    ], np.int64)  # fmt: skip
    at += (in_flight - 1) * sum(each.bytes for each, policy in zip(blocks.saved, policies) if policy is KEEP)
    if at.max() > budget:
        return None
    again = [number for number, policy in enumerate(policies) if policy is RECOMPUTE]
    again.sort(key=lambda number: (-blocks.saved[number].recompute / max(1, blocks.saved[number].bytes), -number))
    for number in again:
        gain = np.array([
            int(blocks.present(number, KEEP, block)) - int(blocks.present(number, RECOMPUTE, block)) for block in begins
        ])  # fmt: skip
        changed = at + (gain + in_flight - 1) * blocks.saved[number].bytes
        if changed.max() <= budget:
            at, policies[number] = changed, KEEP
    return policies
