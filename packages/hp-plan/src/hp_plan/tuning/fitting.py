"""The largest micro-batch, sequence length or number of layers of a plan that fits a memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hp_offload.extend import size
from hp_plan.features.homes import check_home_values
from hp_plan.features.pipelines import micro_batches
from hp_plan.plan import ParallelPlan
from hp_plan.tuning.space import ModelSizes

Quantity = Literal["micro_batch", "sequence_length", "layers"]
Peak = Callable[[ParallelPlan], int]
"""From a plan to the bytes of its rank with the most."""

_NAMES: dict[str, str] = {
    "micro_batch": "samples a micro-batch",
    "sequence_length": "tokens a sample",
    "layers": "layers",
}


class NotMonotone(ValueError):
    """More of a quantity takes less memory, so that halving intervals would find nothing."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a plan by which it would fit.

    Attributes:
        what: for people, as it is written in the plan.
        plan: with the change.
        peak: its bytes.
    """

    what: str
    plan: ParallelPlan
    peak: int


@dataclass(frozen=True, slots=True)
class Fit:
    """The largest value of a quantity that fits, or what is missing.

    Attributes:
        quantity: `"micro_batch"` (samples), `"sequence_length"` (tokens) or `"layers"`.
        memory: bytes that there are.
        value: the largest that fits; None where the least does not.
        plan: with that value, or with the least.
        peak: its bytes.
        beyond: the next value and its bytes, which do not fit; None where the largest that was asked for fits.
        changes: where nothing fits, each single change by which the least would.
    """

    quantity: Quantity
    memory: int
    value: int | None
    plan: ParallelPlan
    peak: int
    beyond: tuple[int, int] | None
    changes: tuple[Change, ...] = ()

    @property
    def excess(self) -> int:
        """Bytes that are missing; 0 where something fits."""
        return max(0, self.peak - self.memory)

    def __str__(self) -> str:
        """Say it for people."""
        name = _NAMES[self.quantity]
        if self.value is not None:
            text = f"{self.value:,} {name} fit: {size(self.peak)} of {size(self.memory)}"
            if self.beyond is None:
                return f"{text}, and no more were asked for"
            return f"{text}; {self.beyond[0]:,} take {size(self.beyond[1])}"
        least = f"the least {name} do not fit: {size(self.peak)} of {size(self.memory)}, {size(self.excess)} too much"
        if not self.changes:
            several = "recompute, homes, shards and stages"
            return f"{least}; no single change is enough: give more memory, or several of {several}"
        lines = [f"  {each.what}: {size(each.peak)}" for each in self.changes]
        return "\n".join([f"{least}; one of these is enough:", *lines])


def fit(
    plan: ParallelPlan,
    peak: Peak,
    memory: int,
    *,
    quantity: Quantity = "micro_batch",
    most: int = 4096,
    step: int | None = None,
    model: ModelSizes | None = None,
) -> Fit:
    """Find the largest value of a quantity by halving intervals: some 12 peaks for 4,096 values.

    The peak is taken to grow with the quantity; of the answer and the next value it has been asked, and one that fell
    between two that were asked is refused.

    Args:
        plan: all else stays as it says, micro-batches too: the batch of a step grows with a micro-batch.
        peak: of a plan, as the dry run or a `Curve` tells it.
        memory: bytes of a rank for the plan, such as `Hardware.room`.
        quantity: what is made larger.
        most: the largest value to try.
        step: values are multiples of it; None is 1, or for sequence lengths what `cp` divides.
        model: says by which setting layers are counted, and which blocks can be computed again; without it changes
            leave recompute out.

    Raises:
        NotMonotone: the peak of a larger value is smaller.
        ValueError: `most` is below the step, or layers are asked for without `model`.
    """
    if quantity == "layers" and model is None:
        raise ValueError("fit: quantity='layers' needs model=ModelSizes(...), which names the setting of the layers.")
    if plan.mesh.pp > 1:  # where they are one for each sample, there would be more of them in place of larger ones
        plan = replace(plan, pipeline=replace(plan.pipeline, micro_batches=micro_batches(plan)))
    step = step or _step(plan, quantity)
    if most < step:
        raise ValueError(f"fit: most is {most}, below the step of {step} {_NAMES[quantity]}.")
    asked: dict[int, int] = {}

    def fits(steps: int) -> bool:
        if steps not in asked:
            asked[steps] = peak(_with(plan, quantity, steps * step, model))
            _check_monotone(asked, step, quantity)
        return asked[steps] <= memory

    low, high = 0, most // step
    if fits(high):
        return Fit(quantity, memory, high * step, _with(plan, quantity, high * step, model), asked[high], None)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low:
        beyond = high * step, asked[high]
        return Fit(quantity, memory, low * step, _with(plan, quantity, low * step, model), asked[low], beyond)
    fits(1)
    least = _with(plan, quantity, step, model)
    changes = tuple(_changes(least, peak, memory, model))
    return Fit(quantity, memory, None, least, asked[1], (step, asked[1]), changes)


def _check_monotone(asked: dict[int, int], step: int, quantity: Quantity) -> None:
    peaks = sorted(asked.items())
    for (few, small), (many, large) in zip(peaks, peaks[1:], strict=False):
        if large < small:
            raise NotMonotone(
                f"{many * step:,} {_NAMES[quantity]} take {size(large)}, fewer bytes than the {size(small)} of"
                f" {few * step:,}: the program changes between them. Ask for each side of it, by `most` and `step`."
            )


def _step(plan: ParallelPlan, quantity: Quantity) -> int:
    if quantity == "micro_batch":
        return 1
    if quantity == "layers":
        return plan.mesh.pp
    return 2 * plan.mesh.cp if plan.context.load_balance and plan.mesh.cp > 1 else max(2, plan.mesh.cp)


def _with(plan: ParallelPlan, quantity: Quantity, value: int, model: ModelSizes | None) -> ParallelPlan:
    """Return the plan with a value of a quantity."""
    if quantity == "sequence_length":
        return replace(plan, data=replace(plan.data, sequence_length=value))
    if quantity == "layers":
        assert model is not None, "asked for before"
        return replace(plan, model=replace(plan.model, overrides={**plan.model.overrides, model.layers_key: value}))
    return replace(plan, data=replace(plan.data, batch_size=value * _parts(plan)))


def _parts(plan: ParallelPlan) -> int:
    """Return into how many micro-batches all ranks cut the batch of a step."""
    return plan.mesh.data_parallel * (micro_batches(plan) if plan.mesh.pp > 1 else plan.run.accumulate)


def _changes(plan: ParallelPlan, peak: Peak, memory: int, model: ModelSizes | None) -> list[Change]:
    """Try single changes, and return those that are enough."""
    tried: list[tuple[str, ParallelPlan]] = []
    blocks = () if model is None else model.blocks
    if blocks and not plan.memory.recompute:
        patterns = ", ".join(f'"{each}"' for each in blocks)
        tried.append((f"memory.recompute = [{patterns}]", replace(plan, memory=replace(plan.memory, recompute=blocks))))
    if blocks and not plan.memory.homes:
        homes = dict.fromkeys(blocks, "host")
        patterns = ", ".join(f'"{each}" = "host"' for each in blocks)
        placed = replace(plan, memory=replace(plan.memory, homes=homes))
        if not check_home_values(placed):
            tried.append((f"memory.homes = {{{patterns}}}", placed))
    if plan.fsdp.reshard_after_forward is False:
        section = replace(plan.fsdp, reshard_after_forward=True)
        tried.append(("fsdp.reshard_after_forward = true", replace(plan, fsdp=section)))
    samples = plan.data.batch_size // _parts(plan)
    if samples > 1 and plan.data.batch_size % samples == 0:
        if plan.mesh.pp > 1:
            count = micro_batches(plan) * samples
            smaller = replace(plan, pipeline=replace(plan.pipeline, micro_batches=count))
            tried.append((f"pipeline.micro_batches = {count}", smaller))
        else:
            count = plan.run.accumulate * samples
            tried.append((f"run.accumulate = {count}", replace(plan, run=replace(plan.run, accumulate=count))))
    for shards in (2, 4, 8):
        mesh = replace(plan.mesh, dp_shard=plan.mesh.dp_shard * shards)
        batch = replace(plan.data, batch_size=plan.data.batch_size * shards)
        what = f"mesh.dp_shard = {mesh.dp_shard}, with {shards} times the ranks"
        tried.append((what, replace(plan, mesh=mesh, data=batch)))
    found: list[Change] = []
    for what, changed in tried:
        if what.startswith("mesh") and any(each.what.startswith("mesh") for each in found):
            continue
        needs = peak(changed)
        if needs <= memory:
            found.append(Change(what, changed, needs))
    return found
