"""The readings of two runs side by side: where they differ first, and where most.

Note [Runs of two layouts]
    Ranks of equal layouts have equal parts of each tensor, and their readings are compared one by one. Where meshes or
    micro-batches differ, what is compared is the whole tensor: sums of bits and squares of norms are added over the
    ranks that count their part, and over micro-batches. Bits are compared where both runs are deterministic and
    differ in data parallelism alone; else norms, with the tolerance of the dtype.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hp_plan.checks.monitor.readings import ALONE, COUNTED, PHASES, RankReadings, read_readings

TOLERANCES = {"float64": 1e-7, "float32": 1e-4, "bfloat16": 3e-2, "float16": 3e-2}
"""By how much norms may differ, in relation to the larger one, where bits are not compared."""

_FLOOR = 1e-3  # of the largest norm of the phase: below, a tensor may be of rounding errors alone
_Key = tuple[int, int, str, int, int]  # step, phase, name, micro-batch, rank


@dataclass(frozen=True, slots=True)
class Divergence:
    """A reading that differs between two runs.

    Attributes:
        step: from 1.
        phase: as of `Reading`.
        name: of the module or the parameter.
        micro: the micro-batch; -1 where all are taken together.
        rank: that has it; -1 where all are taken together.
        kind: "bits", "norm", or "missing": one of the runs does not have it.
        first: the norm in the first run; not a number where it has none.
        second: that in the second.
        difference: of the norms, in relation to the larger one or to a thousandth of the largest of the phase.
    """

    step: int
    phase: str
    name: str
    micro: int
    rank: int
    kind: Literal["bits", "norm", "missing"]
    first: float
    second: float
    difference: float

    def __str__(self) -> str:
        place = f"step {self.step}, {self.phase} of {self.name or 'the model'}"
        place += f", micro-batch {self.micro}" if self.micro >= 0 and self.phase in ("forward", "backward") else ""
        place += f", rank {self.rank}" if self.rank >= 0 else ", all ranks together"
        if self.kind == "missing":
            return f"{place}: only the {'second' if math.isnan(self.first) else 'first'} run has it"
        what = "bits differ; norms" if self.kind == "bits" else "norms"
        return f"{place}: {what} {self.first!r} and {self.second!r}, {self.difference:.1e} apart"


@dataclass(frozen=True)
class Comparison:
    """Two runs compared.

    Attributes:
        first: the first divergence, in the order of the steps; None where the runs are equal.
        largest: the five with the largest difference.
        steps: how many steps both have readings of.
        readings: how many pairs were compared.
        by: what was compared: "bits", or "norms" with a tolerance.
        tolerance: of norms; 0 of bits.
    """

    first: Divergence | None
    largest: tuple[Divergence, ...]
    steps: int
    readings: int
    by: Literal["bits", "norms"]
    tolerance: float


@dataclass(slots=True)
class _Value:
    bits: int
    squares: float
    order: int
    finite: bool
    whole: bool  # or a term of a sum over ranks, of which nothing is known together

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)


def compare_readings(
    first: str | os.PathLike[str], second: str | os.PathLike[str], *, tolerance: float | None = None
) -> Comparison:
    """Find where two monitored runs differ: the first step, phase, module and rank, and the five largest differences.

    Runs of the same layout are compared rank by rank, bits where both have them. Across layouts the whole tensors are
    compared: Note [Runs of two layouts]. Steps and phases that one run alone has are left out. Frameworks may differ.

        comparison = compare_readings("runs/a", "runs/b")
        print(comparison.first or "equal")

    Args:
        first: folder of a run.
        second: folder of another.
        tolerance: compare norms with this relative tolerance, and no bits. None compares bits where that is possible,
            else norms with `TOLERANCES` of the coarser dtype.

    Raises:
        FileNotFoundError: a run was not monitored.
        ValueError: the runs have readings of no step in common.
    """
    runs = [read_readings(folder) for folder in (first, second)]
    layouts = [run[min(run)].layout for run in runs]
    steps = _steps(runs[0]) & _steps(runs[1])
    if not steps:
        listed_steps = " and ".join(str(sorted(_steps(run))[:5]) for run in runs)
        raise ValueError(f"the runs have readings of no step in common: the first are {listed_steps}")
    alike = all(layouts[0][key] == layouts[1][key] for key in ("mesh", "micro_batches", "ranks", "batch_size"))
    by_bits = (
        tolerance is None and all("bits" in each["numbers"] for each in layouts) and (alike or _same_bits(*layouts))
    )
    by_bits = by_bits and layouts[0]["dtypes"] == layouts[1]["dtypes"]
    limit = max(TOLERANCES[dtype] for each in layouts for dtype in each["dtypes"]) if tolerance is None else tolerance
    if not by_bits and not all("norm" in each["numbers"] for each in layouts):
        raise ValueError("the runs can't be compared by bits, and one of them has no norms: write numbers = ['norm']")
    left, right = (_values(run, steps, together=not alike) for run in runs)
    apart = {key for values in (left, right) for key, value in values.items() if not value.whole}
    left, right = ({key: value for key, value in values.items() if key not in apart} for values in (left, right))
    phases = {key[1] for key in left} & {key[1] for key in right}
    left, right = ({key: value for key, value in each.items() if key[1] in phases} for each in (left, right))
    largest = _largest(left) if not by_bits else {}
    found = []
    stages = {rank: own.layout["stage"] for rank, own in runs[0].items()}
    for key in sorted(left.keys() | right.keys(), key=lambda key: _order(key, stages, left, right)):
        divergence = _differ(key, left.get(key), right.get(key), largest, 0.0 if by_bits else limit, by_bits)
        if divergence is not None:
            found.append(divergence)
    ranked = sorted(found, key=lambda each: -each.difference)
    return Comparison(
        found[0] if found else None,
        tuple(ranked[:5]),
        len(steps),
        len(left.keys() & right.keys()),
        "bits" if by_bits else "norms",
        0.0 if by_bits else limit,
    )


def _steps(run: Mapping[int, RankReadings]) -> set[int]:
    """Return the steps that all ranks of a run have read."""
    return set.intersection(*(set(np.unique(each.records["step"]).tolist()) for each in run.values()))


def _same_bits(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Tell whether two layouts of a deterministic run give the same bits."""
    others = [{name: size for name, size in each["mesh"].items() if "dp_" not in name} for each in (first, second)]
    return first["deterministic"] and second["deterministic"] and others[0] == others[1]


def _values(run: Mapping[int, RankReadings], steps: set[int], *, together: bool) -> dict[_Key, _Value]:
    """Return the readings of some steps by their place, or by that of the whole tensor."""
    values: dict[_Key, _Value] = {}
    for rank, own in run.items():
        averaged = own.layout["averaged"]
        # As a loss that is averaged over ranks is larger than its part in the mean, its gradients are.
        scales = {PHASES.index("backward"): 1.0 / averaged**2} if together else {}
        for order, record in enumerate(own.records.tolist()):
            step, name, _, micro, phase, flags, bits, norm, low, _ = record
            if step not in steps or (together and not flags & (COUNTED | ALONE)):
                continue
            key = (step, phase, own.names[int(name)], -1 if together else micro, -1 if together else rank)
            has = own.layout["numbers"] if PHASES[phase] != "loss" else ("norm",)
            finite = "norm" not in has or math.isfinite(norm)
            square = norm * norm * scales.get(phase, 1.0) if "norm" in has else 0.0
            value = values.get(key)
            if together and PHASES[phase] == "loss":  # their mean, and not the sum of squares
                before = 0.0 if value is None else value.norm
                square, bits, value = (before + low / own.layout["losses"]) ** 2, 0, None
            if value is None:
                values[key] = _Value(bits, square, order, finite, not (together and flags & ALONE))
            else:
                value.bits = (value.bits + bits) % 2**64
                value.squares += square
                value.finite = value.finite and finite
    for value in values.values():
        value.bits %= 2**64
    return values


def _order(key: _Key, stages: Mapping[int, int], *runs: Mapping[_Key, _Value]) -> tuple[int, ...]:
    """Return where in a step a reading is: ranks of a stage read alike, so a record's number tells when."""
    step, phase, _, _, rank = key
    stage = stages.get(rank, 0) * (-1 if PHASES[phase] == "backward" else 1)
    return step, phase, stage, min(run[key].order for run in runs if key in run), rank


def _largest(values: Mapping[_Key, _Value]) -> dict[tuple[int, int], float]:
    largest: dict[tuple[int, int], float] = {}
    for (step, phase, *_), value in values.items():
        largest[step, phase] = max(largest.get((step, phase), 0.0), value.norm if value.finite else 0.0)
    return largest


def _differ(
    key: _Key,
    left: _Value | None,
    right: _Value | None,
    largest: Mapping[tuple[int, int], float],
    limit: float,
    by_bits: bool,
) -> Divergence | None:
    step, phase, name, micro, rank = key
    place = (step, PHASES[phase], name, micro, rank)
    if left is None or right is None:
        first, second = (math.nan if each is None else each.norm for each in (left, right))
        return Divergence(*place, "missing", first, second, math.inf)
    if not left.finite and not right.finite:  # the bits of two NaNs may differ
        return None
    norms = (left.norm, right.norm)
    scale = max(*norms, _FLOOR * largest.get((step, phase), 0.0)) or 1.0
    apart = abs(norms[0] - norms[1]) / scale if left.finite and right.finite else math.inf
    if by_bits and left.bits != right.bits:
        return Divergence(*place, "bits", *norms, apart)
    exact = by_bits and (rank >= 0 or PHASES[phase] != "loss")  # a mean of losses has no bits
    if PHASES[phase] == "loss":  # which models compute in float32 whatever their weights are
        limit = max(limit, 1e-6)
    return None if exact or apart <= limit else Divergence(*place, "norm", *norms, apart)
