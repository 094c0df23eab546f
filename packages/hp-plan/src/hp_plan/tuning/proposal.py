"""A plan for a model and a number of ranks, chosen by dry runs.

Note [How a plan is chosen]
Plans are tried from the least communication to the most. First all ranks share one copy by `dp_shard`; experts are
spread over as many of them as the model allows. Then samples are computed one at a time, then blocks are computed
again in backward, then `tp` doubles up to the ranks of a host, then `pp`. The first plan is taken that `lint` finds
nothing wrong with, and whose fullest rank needs no more memory than there is.

A dry run tells what that rank needs, and takes seconds, or minutes with many stages, so few plans are played. A plan is
not played where its weights, gradients and optimizer states, which are counted from shapes, are too large alone. Once
the best of all does not fit, of plans of a kind the leanest is played first, and where it does not fit none of them is
taken: of plans that differ in what is computed again, the one that does so, and of plans with as many stages, the one
with the most `tp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hp_offload.extend import size
from hp_plan.dry.report import DryReport
from hp_plan.linting import examine
from hp_plan.plan import ParallelPlan, read_plan
from hp_plan.port import build, models
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.structure.memory import training_bytes
from hp_plan.structure.outline import ModelOutline, block_lists, positions
from hp_platform import get_platform

Play = Callable[[ParallelPlan], DryReport]
"""Plays a plan without memory, as `hp_plan.dry_run` does."""
_HOST = 8  # ranks that tensor parallelism may span
_SAMPLES = 8  # of a step, at least
_LENGTH = 2048


@dataclass(frozen=True)
class Estimate:
    """Bytes of the rank that needs most.

    Attributes:
        total: on its device, at the peak of a step; of weights, gradients and optimizer states alone, counted from
            shapes, where the plan can't be played.
        by_kind: the same by `hp_plan.dry.report.KINDS`, and the most that is on the host; empty where it can't.
        unplayed: why the plan can't be played; "" where it was.
    """

    total: int
    by_kind: Mapping[str, int]
    unplayed: str = ""


@dataclass(frozen=True)
class Proposal:
    """A plan that lints clean, and why.

    Attributes:
        plan: the plan.
        tables: what it says besides defaults.
        estimate: of a rank's memory.
        reasons: dotted key -> why it has its value.
    """

    plan: ParallelPlan
    tables: Mapping[str, Any]
    estimate: Estimate
    reasons: Mapping[str, str]


def propose(tables: Mapping[str, Any], ranks: int, *, play: Play, memory: int | None = None) -> Proposal:
    """Choose a plan: see Note [How a plan is chosen].

    Args:
        tables: of a plan: `[model]`, and whatever is not to be chosen.
        ranks: their number.
        play: plays a plan without memory, as `hp_plan.dry_run` does. What it raises is the estimate's reason, and the
            plan's training bytes then decide alone.
        memory: bytes of a rank; None takes the first plan that lints clean.

    Raises:
        PlanError: the model can't be built, no plan lints clean, or none fits; it names the one that needs least.
    """
    given, diagnostics = read_plan(tables)
    builder = build()
    diagnostics += builder.check_model_section(given, run_code=True)
    if diagnostics:
        raise PlanError(diagnostics)
    model = builder.build_empty(given)
    outline = models().outline(model)
    trials = _Trials(ranks, model, outline, play, memory)
    for ladder in _ladders(tables, outline, ranks):
        found = trials.first_fit(ladder)
        if found is not None:
            return Proposal(found.plan, found.tables, trials.estimate(found), _reasons(found.plan, outline, memory))
    raise PlanError(trials.refusals())


@dataclass(eq=False)
class _Candidate:
    """A plan that lints clean.

    Attributes:
        plan: the plan.
        tables: what it says besides defaults.
        trained: bytes of its weights, gradients and optimizer states, which are there together when the optimizer
            steps.
        estimate: of its memory; None before it is played.
    """

    plan: ParallelPlan
    tables: Mapping[str, Any]
    trained: int
    estimate: Estimate | None = None


class _Trials:
    """Plans that are linted and played, each once.

    Args:
        ranks: their number.
        model: on meta.
        outline: of it.
        play: plays a plan.
        memory: bytes of a rank, or None.
    """

    def __init__(self, ranks: int, model: Any, outline: ModelOutline, play: Play, memory: int | None) -> None:
        self._ranks, self._model, self._outline = ranks, model, outline
        self._play, self._memory = play, memory
        self._linted: list[_Candidate] = []
        self._refused: list[Diagnostic] = []

    def first_fit(self, ladder: Iterable[Sequence[Mapping[str, Any]]]) -> _Candidate | None:
        """Return the first plan that fits.

        Args:
            ladder: plans of one `pp`, the best first, each in variants of which the first that lints clean counts.
        """
        clean = (each for variants in ladder if (each := self._clean(variants)) is not None)
        if not self._linted and (best := next(clean, None)) is not None and self._fits(best):
            return best
        candidates = list(clean)
        for each in candidates:
            leanest = [other for other in candidates if _kind(other.plan) == _kind(each.plan)][-1]
            if self._fits(leanest) and self._fits(each):
                return each
        return None

    def _clean(self, variants: Sequence[Mapping[str, Any]]) -> _Candidate | None:
        for tables in variants:
            plan, diagnostics = read_plan(tables)
            known = [each for each in self._linted if each.plan == plan]  # where tables give what else is chosen
            if known:
                return known[0]
            report = examine(plan, diagnostics, self._ranks, model=self._model)
            if not report.diagnostics:
                # Gradients that wait, unsharded, for the last micro-batch are gone when the optimizer steps.
                at_once = replace(plan, run=replace(plan.run, accumulate=1))
                self._linted.append(_Candidate(plan, tables, training_bytes(at_once, self._outline)))
                return self._linted[-1]
            self._refused = self._refused or list(report.diagnostics)
        return None

    def _fits(self, candidate: _Candidate) -> bool:
        if self._memory is None:
            return True
        return candidate.trained <= self._memory and self.estimate(candidate).total <= self._memory

    def estimate(self, candidate: _Candidate) -> Estimate:
        """Play a plan, once."""
        if candidate.estimate is None:
            try:
                fullest = max(self._play(candidate.plan).ranks, key=lambda each: each.peak.live)
                by_kind = {**fullest.peak.by_kind, "host": fullest.host}
                candidate.estimate = Estimate(fullest.peak.live, by_kind)
            except Exception as error:  # whatever a model does that shapes alone do not allow
                candidate.estimate = Estimate(candidate.trained, {}, _reason(error))
        return candidate.estimate

    def refusals(self) -> list[Diagnostic]:
        """Say why no plan is taken."""
        if not self._linted:
            return self._refused
        subject = f"{self._ranks} ranks of {size(self._memory or 0)} can't train the model"
        played = [(each.estimate.total, each.plan) for each in self._linted if each.estimate is not None]
        if not played:
            least = min(each.trained for each in self._linted)
            message = f"{subject}: weights, gradients and optimizer states alone take {size(least)} a rank"
            return [Diagnostic("mesh", message, "give more ranks or memory")]
        least, plan = min(played, key=lambda each: each[0])
        message = f"{subject}: {plan.mesh.described} needs least, {size(least)} a rank"
        return [Diagnostic("mesh", message, "give more ranks or memory, or make data.sequence_length smaller")]


def _reason(error: Exception) -> str:
    """Say in a line why a plan can't be played."""
    if isinstance(error, PlanError):
        return "; ".join(f"{each.key}: {each.message}" for each in error.diagnostics)
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _kind(plan: ParallelPlan) -> tuple[int, ...]:
    """Return what plans have alike of which the last needs least: see Note [How a plan is chosen]."""
    return (plan.mesh.pp,) if plan.mesh.pp > 1 else (1, plan.mesh.tp, plan.run.accumulate)


def _ladders(tables: Mapping[str, Any], outline: ModelOutline, ranks: int) -> Iterator[list[list[dict[str, Any]]]]:
    """List tables of plans for each `pp`, the best first, each with fewer and fewer `ep`."""
    limit = positions(outline.config)
    length = min(limit, _LENGTH) if limit is not None and limit > 1 else _LENGTH
    experts = max((module.experts.count for module in outline.modules.values() if module.experts), default=0)
    blocks = block_lists(outline)
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    for pp in divisors:
        shared = ranks // pp
        ep = [each for each in reversed(divisors) if each == 1 or (each <= experts and shared % each == 0)]
        plans = []
        for tp in [each for each in divisors if each <= _HOST and shared % each == 0]:
            dp = shared // tp
            rows = max(math.ceil(_SAMPLES / dp), 2 * pp if pp > 1 else 1)
            savings: list[dict[str, Any]] = [{}]
            if pp == 1:
                apart = {"run": {"accumulate": rows}} if rows > 1 else {}
                savings += [apart] if apart else []
                savings += [{**apart, "memory": {"recompute": list(blocks)}}] if blocks else []
            for saving in savings:
                chosen = {**saving, "data": {"sequence_length": length, "batch_size": dp * rows}}
                if dp > 1 and get_platform().devices.kind != "cpu":
                    chosen["fsdp"] = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
                meshes = ({"pp": pp, "dp_shard": dp, "tp": tp, "ep": each} for each in ep)
                named = [{axis: number for axis, number in mesh.items() if number > 1} for mesh in meshes]
                plans.append([_merged({"mesh": mesh, **chosen}, tables) for mesh in named])
        yield plans


def _merged(chosen: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with what was given in place of what was chosen."""
    result = {key: table for key, table in given.items() if key not in chosen}
    for key, table in chosen.items():
        merged = {**table, **given.get(key, {})}
        if merged:
            result[key] = merged
    return result


def _reasons(plan: ParallelPlan, outline: ModelOutline, memory: int | None) -> dict[str, str]:
    """Say for each chosen key why it has its value."""
    parts = plan.mesh.data_parallel
    without = "lint refuses the plan" if memory is None else f"a rank needs more than {size(memory)}"
    length = positions(outline.config)
    return {
        "mesh.pp": f"stages; without them {without}",
        "mesh.dp_shard": "ranks that share one copy of weights, gradients and optimizer states",
        "mesh.tp": f"ranks that share each matrix, at most the {_HOST} of a host; with less {without}",
        "mesh.ep": "ranks that share a layer's experts, which are not gathered",
        "run.accumulate": f"one sample at a time; with all of a rank's at once {without}",
        "memory.recompute": f"computed again in backward; without it {without}",
        "fsdp.param_dtype": "computed and gathered in it; weights and states stay float32",
        "fsdp.reduce_dtype": "of gradients, so that their sum over ranks loses nothing",
        "data.sequence_length": f"the model takes up to {length}" if length is not None else "a choice",
        "data.batch_size": f"samples of a step, over {parts} part{'s' if parts > 1 else ''} of the ranks",
    }
