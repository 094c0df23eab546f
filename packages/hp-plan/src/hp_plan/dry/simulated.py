"""What one device measures of a rank of a cluster, and what its messages cost by a table of the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hp_offload.extend import size
from hp_plan.dry.report import RankReport
from hp_plan.dry.trace import Trace
from hp_plan.features.pipelines import micro_batches
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.tuning.hardware import Hardware
from hp_plan.tuning.seconds import Seconds, count_work, price
from hp_plan.tuning.space import MESH

_BUBBLES = {"1f1b": "1f1b", "gpipe": "1f1b", "interleaved": "interleaved", "zbv": "zbv"}
"""Schedules whose bubble `price` knows, by the name that it goes by there."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A step on the device that there is; each number is the median of several.

    Attributes:
        compute: seconds of forward, backward and clipping.
        optimizer: seconds of the optimizer's step.
        cpu: seconds of the CPU in both; None on an accelerator.
        copies: seconds of copies that stand for messages, which are in no other number.
    """

    compute: float
    optimizer: float
    cpu: float | None
    copies: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """A rank of a plan, played on one device.

    Attributes:
        mesh: the plan's, for people.
        world_size: number of ranks.
        device: that computed.
        steps: that were measured.
        measured: seconds of a step there.
        peak: the most bytes of the device in a step.
        allocated: the peak is that of the device's allocator; else of tensors, as `dry_run` counts them.
        hardware: name of the machine whose network prices messages.
        communication: seconds of a step's messages there, hidden ones too, by the axes of their group.
        seconds: of a step: what was measured, messages that compute does not hide, and the bubble of stages.
        report: of the rank, as a dry run's.
    """

    mesh: str
    world_size: int
    device: str
    steps: int
    measured: Measured
    peak: int
    allocated: bool
    hardware: str
    communication: Mapping[str, float]
    seconds: Seconds
    report: RankReport

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as plain values."""
        return {
            "mesh": self.mesh,
            "world_size": self.world_size,
            "rank": self.report.rank,
            "coordinates": dict(self.report.coordinates),
            "device": self.device,
            "steps": self.steps,
            "measured": dataclasses.asdict(self.measured),
            "peak": self.peak,
            "allocated": self.allocated,
            "flops": self.report.trace.flops,
            "hardware": self.hardware,
            "communication": dict(self.communication),
            "seconds": {**dataclasses.asdict(self.seconds), "total": self.seconds.total},
        }

    def __str__(self) -> str:
        """Return what was measured, what was counted, and the step of both, in 80 columns."""
        rank = self.report
        place = ", ".join(f"{axis} {number}" for axis, number in rank.coordinates.items())
        by = "its allocator" if self.allocated else "the bytes of tensors"
        lines = [
            f"rank {rank.rank} ({place}) of {self.world_size}, {self.mesh}"[:80],
            f"played on {self.device}: tokens are random, others say what it says"[:80],
            "losses mean nothing",
            "",
        ]
        rows = [("compute", self.measured.compute, self.seconds.compute, "measured")]
        rows.append(("optimizer", self.measured.optimizer, self.seconds.optimizer, "measured"))
        rows += [
            (axes, seconds, self.seconds.exposed.get(axes, 0.0), f"counted for {self.hardware}")
            for axes, seconds in self.communication.items()
        ]
        if self.seconds.bubble:
            rows.append(("bubble", self.seconds.bubble, self.seconds.bubble, "counted"))
        width = max(len("optimizer"), *(len(name) for name, *_ in rows))
        lines.append(f"{'':{width}}  {'seconds':>10}  {'of the step':>11}")
        lines += [f"{name:{width}}  {own:10.6f}  {part:11.6f}  {how}" for name, own, part, how in rows]
        lines += [f"{'step':{width}}  {'':10}  {self.seconds.total:11.6f}  estimated", ""]
        cpu = "" if self.measured.cpu is None else f", {self.measured.cpu:.6f} s of CPU"
        lines.append(f"median of {self.steps} step{'s' if self.steps > 1 else ''}{cpu}")
        lines.append(f"without copies in place of messages, {self.measured.copies:.6f} s")
        lines.append(f"peak {size(self.peak)}, by {by}, in {rank.peak.phase}")
        return "\n".join(lines)


def estimate(
    plan: ParallelPlan, trace: Trace, measured: Measured, hardware: Hardware
) -> tuple[dict[str, float], Seconds]:
    """Price a rank's messages, and put them together with what was measured: Note [Seconds of a step].

    Args:
        plan: the rank's.
        trace: of the rank's step.
        measured: its seconds.
        hardware: the machine whose network is used.

    Returns:
        The seconds of messages by axes, and those of the step.

    Raises:
        ValueError: the machine's table lacks the plan's dtype, or its network is too small.
    """
    mesh, pipeline = plan.mesh, plan.pipeline
    messages = {key: value for key, value in count_work(trace).items() if key[0] in ("calls", "bytes")}
    work = {**messages, ("measured",): measured.compute, ("measured", "optimizer"): measured.optimizer}
    sizes = {axis: getattr(mesh, axis) for axis in MESH}
    own: dict[str, Any] = {"dtype": plan.fsdp.param_dtype or plan.run.dtype}
    alone = price(messages, hardware, sizes, **own).one()
    if mesh.pp > 1:
        own |= {
            "schedule": _BUBBLES[pipeline.schedule],
            "micro_batches": micro_batches(plan),
            "stages_a_rank": pipeline.stages_per_rank or 2,
        }
    return dict(alone.exposed), price(work, hardware, sizes, **own).one()


def check_bubble(plan: ParallelPlan) -> None:
    """Check that a plan's bubble can be estimated.

    Args:
        plan: the plan.

    Raises:
        PlanError: of a schedule that has no formula.
    """
    schedule = plan.pipeline.schedule
    if plan.mesh.pp > 1 and schedule not in _BUBBLES:
        message = f"there is no formula for the bubble of {schedule!r}"
        raise PlanError([Diagnostic("pipeline.schedule", message, f"take one of {', '.join(_BUBBLES)}")])
