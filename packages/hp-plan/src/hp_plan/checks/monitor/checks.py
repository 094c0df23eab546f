"""What `[monitor]` can't read under a plan."""

from __future__ import annotations

from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.structure.outline import ModelOutline, matched_by, matches_nothing, matching, never_called
from hp_platform import get_platform


def check_monitor(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that this framework and the plan's other sections let its phases be read."""
    section = plan.monitor
    if not section.every:
        return []
    if get_platform().name != "torch":
        message = f"got {section.every}, but tensors of MindSpore are not read yet"
        return [
            Diagnostic("monitor.every", message, "leave [monitor] out; runs of MindSpore are compared by their losses")
        ]
    if not section.phases:
        return [Diagnostic("monitor.phases", "got no phase, so nothing would be read", 'write ["loss", "gradient"]')]
    if not section.numbers:
        return [Diagnostic("monitor.numbers", "got none, so nothing would be read", 'write ["norm", "range"]')]
    if plan.memory.budget is not None and {"forward", "backward"} & set(section.phases):
        message = "got forward or backward with memory.budget, whose first step runs modules more than once to plan"
        return [
            Diagnostic("monitor.phases", message, "leave both out, or write memory.recompute in place of the budget")
        ]
    if "moment" in section.phases and plan.optimizer.name == "adamw8bit":
        message = "got 'moment' with optimizer.name = 'adamw8bit', whose moments are numbers of eight bits with scales"
        return [Diagnostic("monitor.phases", message, "leave 'moment' out")]
    return []


def check_monitored(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Check that names are those of modules that are called, and not inside of a compiled one."""
    if not plan.monitor.every:
        return []
    diagnostics = []
    compiled = sorted(matched_by(plan.compile.blocks, model.names))
    for index, pattern in enumerate(plan.monitor.names):
        key, modules = f"monitor.names[{index}]", matching(pattern, model.names)
        if not modules and not matching(pattern, model.parameters):
            diagnostics.append(matches_nothing(key, pattern, [*model.names, *model.parameters]))
        if not {"forward", "backward"} & set(plan.monitor.phases):
            continue
        for name in modules:
            block = next((each for each in compiled if name.startswith(f"{each}.")), None)
            uncalled = never_called(key, pattern, name, model)
            if block is not None:
                message = f"'{pattern}' matches {name}, inside of {block}, which [compile] makes one graph"
                uncalled = Diagnostic(key, message, f"name the block: '{block}'")
            if uncalled is not None:
                diagnostics.append(uncalled)
                break
    return diagnostics
