"""Steps that fail: memory that runs out, with what was alive, and losses or gradients that are no numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hp_offload.extend import BudgetError, parse_size, size
from hp_plan import Diagnostic, ParallelPlan
from hyper_parallel.reports.output import weights_option


class MemoryShortage(RuntimeError):
    """A step ran out of memory; the text is the report."""


def over_budget(plan: ParallelPlan, error: BudgetError) -> Diagnostic:
    """Say what the plan's budget would have to be.

    Args:
        plan: with a budget.
        error: of the first step, which needs more than the budget leaves.
    """
    states = parse_size(str(plan.memory.budget)) - error.budget
    message = (
        f"got {plan.memory.budget}, of which weights, gradients and optimizer states take {size(states)} on each rank;"
        f" what backward needs is {size(error.least)} at least"
    )
    enough = f"{-(-(states + error.least) // (1 << 20))} MiB"
    return Diagnostic("memory.budget", message, f'write budget = "{enough}", or make mesh.dp_shard or mesh.tp larger')


@dataclass(frozen=True)
class Storage:
    """Memory that is in use.

    Attributes:
        size: in bytes.
        what: the name of the parameter, gradient or state, the operation that saved it for its backward, or "tensor".
        shape: of a tensor in it.
        dtype: of that tensor.
        device: of that tensor.
    """

    size: int
    what: str
    shape: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True)
class Spot:
    """Where memory ran out.

    Attributes:
        phase: of the step, such as "forward".
        module: the innermost that ran; empty where none did.
    """

    phase: str
    module: str


def report(
    error: BaseException, plan: ParallelPlan, *, rank: int, step: int, place: Spot, storages: Sequence[Storage]
) -> str:
    """Return the text of a report.

    Args:
        error: the framework's.
        plan: the run's.
        rank: of this process.
        step: under way.
        place: in the step.
        storages: the largest ones.
    """
    inside = f", in {place.module}" if place.module else ""
    lines = [f"rank {rank} ran out of memory in step {step}, {place.phase}{inside}: {_first_line(error)}"]
    if storages:
        lines.append(f"The {len(storages)} largest storages in use:")
        for each in storages:
            shape = "x".join(map(str, each.shape)) or "scalar"
            lines.append(f"  {each.size / 2**20:10,.1f} MiB  {each.what}: {each.dtype} {shape} on {each.device}")
    lines.append(f"Less memory: {advice(plan)}")
    return "\n".join(lines)


def advice(plan: ParallelPlan) -> str:
    """Say which values of a plan take less memory."""
    if plan.memory.budget is None:
        first = (
            'write budget = "20GiB" in [memory], less than what a rank has: what backward needs is then swapped or'
            " computed again (hp_offload.fit_memory)"
        )
    else:
        first = f"make memory.budget less than {plan.memory.budget}: buffers of communication come on top of it"
    return f"{first}; make data.batch_size ({plan.data.batch_size}) smaller; make mesh.dp_shard or mesh.tp larger"


def write(folder: Path, rank: int, text: str) -> None:
    """Write a report beside the run's other files, where that can be done."""
    try:
        (folder / f"out-of-memory-rank-{rank}.txt").write_text(text + "\n", encoding="utf-8")
    except OSError:
        pass


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class DivergedError(RuntimeError):
    """A step whose loss or gradients are infinite or not a number: its weights are worth nothing, and are not saved."""


def check_finite(step: int, loss: float, norm: float, *, saved: str | None) -> None:
    """Raise where a step has spoiled the weights.

    Args:
        step: which.
        loss: of all ranks.
        norm: of all gradients, before clipping.
        saved: the newest checkpoint, which is of a step before; None without one.

    Raises:
        DivergedError: the loss or the norm is not finite.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    spoiled = not math.isfinite(loss)
    what = f"the loss of step {step} is {loss}" if spoiled else f"the gradients of step {step} have norm {norm}"
    kept = "there is no checkpoint yet" if saved is None else f"the newest checkpoint is {saved}"
    fix = "start again with a smaller optimizer.lr, with run.grad_clip or with schedule.warmup_steps"
    if saved is not None:
        fix += f", from its weights by {weights_option(Path(saved))}"
    raise DivergedError(f"{what}, so the weights after it are worth nothing and are not saved; {kept}; {fix}")
