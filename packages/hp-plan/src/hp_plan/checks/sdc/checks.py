"""What `[sdc]` can't compare under a plan, and what a replay on one data parallel rank does not find."""

from __future__ import annotations

from hp_plan.checks.sdc.rotation import Rotation
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_platform import get_platform


def check_sdc(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that this framework and the plan's other sections let copies and computations be compared."""
    section, diagnostics = plan.sdc, list[Diagnostic]()
    if not section.replicas and not section.replay_every:
        return []
    if get_platform().name != "torch":
        key = "sdc.replicas" if section.replicas else "sdc.replay_every"
        message = f"got {getattr(section, key[4:])!r}, but tensors of MindSpore are not compared yet"
        return [Diagnostic(key, message, "leave [sdc] out")]
    if section.replicas and plan.mesh.world_size == 1:
        message = "got true, but on one rank there is one copy of each weight"
        diagnostics.append(Diagnostic("sdc.replicas", message, "leave it out, or give sdc.replay_every"))
    if section.replicas and plan.optimizer.swap_slices:
        message = f"got true with optimizer.swap_slices = {plan.optimizer.swap_slices}, whose states come and go"
        diagnostics.append(Diagnostic("sdc.replicas", message, "leave one of the two out"))
    if not section.replay_every:
        return diagnostics
    every = f"got {section.replay_every}"
    if plan.memory.budget is not None:
        message = f"{every} with memory.budget, whose first step runs modules more than once to plan"
        fix = "leave it out, or write memory.recompute in place of the budget"
        diagnostics.append(Diagnostic("sdc.replay_every", message, fix))
    if plan.experts.slots:
        message = f"{every} with experts.slots = {plan.experts.slots}, whose loads would be counted twice"
        diagnostics.append(Diagnostic("sdc.replay_every", message, "leave one of the two out"))
    return diagnostics


def sdc_notes(plan: ParallelPlan) -> list[str]:
    """Say what a plan's `[sdc]` does not find."""
    section, notes = plan.sdc, list[str]()
    if get_platform().name != "torch":
        return notes
    copies = len(Rotation(plan).copies)
    if section.replay_every and copies == 1:
        notes.append(
            "sdc.replay_every: with one part of the batch each rank computes its samples again itself, which finds what"
            " happens once, and nothing that lasts"
        )
    if section.replay_every and copies == 2:
        notes.append(
            "sdc.replay_every: with two parts of the batch a fault that gives the same wrong bits each time is found,"
            " but not which of two ranks has it"
        )
    if section.replicas and plan.mesh.world_size > 1 and plan.mesh.dp_replicate == 1:
        notes.append("sdc.replicas: with mesh.dp_replicate = 1 no other rank holds the weights that dp_shard divides")
    if section.replicas and plan.mesh.dp_replicate == 2:
        notes.append("sdc.replicas: of two copies that differ nobody knows which is right: make mesh.dp_replicate 3")
    return notes
