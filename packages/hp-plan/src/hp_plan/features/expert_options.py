"""`[experts]` of a plan: which options go together, and the style that has them."""

from __future__ import annotations

from dataclasses import fields
from math import prod
from typing import Any

from hp_moe import ExpertParallel, ExpertTensorParallel
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.structure.outline import ModelOutline

_ALONE = {
    ("combine", "exact"): {
        "exchange": "all_gather adds results up on their way",
        "capacity": "what is dropped depends on the number of ranks",
        "chunks": "a gradient would be a sum over parts of the tokens",
    },
    ("capacity", None): {
        "exchange": "the shapes of an all_gather depend on the router's choices",
        "chunks": "each part of the tokens would have a capacity of its own",
        "slots": "a replica is for what a capacity drops",
    },
    ("exchange", "all_gather"): {"chunks": "all tokens are waited for at once"},
}
"""Values (None: any but the default) -> keys that must have their default beside them, and why."""
_OF_FEATURES = ("combine", "slots", "every")


def check_expert_options(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that the options of [experts] have an effect, and go together."""
    section = plan.experts
    given = [item.name for item in fields(section) if getattr(section, item.name) != item.default]
    if not given:
        return []
    if plan.mesh.ep == 1:
        message = f"{', '.join(given)} would have no effect: mesh.ep is 1"
        return [Diagnostic("experts", message, "leave [experts] out, or make mesh.ep at least 2")]
    diagnostics = []
    for (key, value), others in _ALONE.items():
        chosen = getattr(section, key)
        if key not in given or (value is not None and chosen != value):
            continue
        for other in (name for name in given if name in others):
            message = f"got {getattr(section, other)!r} with experts.{key} = {chosen!r}, but {others[other]}"
            diagnostics.append(Diagnostic(f"experts.{other}", message, f"leave it out, or experts.{key}"))
    if section.slots and plan.mesh.pp > 1:
        message = f"got {section.slots} with mesh.pp = {plan.mesh.pp}, whose stages have different experts"
        diagnostics.append(Diagnostic("experts.slots", message, "leave it out, or make mesh.pp 1"))
    if "every" in given and not section.slots and section.capacity is None:
        message = f"got {section.every}, which nothing uses without slots or a capacity"
        other = "experts.capacity" if plan.mesh.pp > 1 else "experts.slots or experts.capacity"
        diagnostics.append(Diagnostic("experts.every", message, f"leave it out, or give {other}"))
    return diagnostics


def check_style_options(plan: ParallelPlan, style: str) -> list[Diagnostic]:
    """Check that a style of experts has the options that the plan gives.

    Args:
        plan: the plan.
        style: of its modules of experts.
    """
    if style == "expert_parallel":
        return []
    wrong = [
        item.name
        for item in fields(plan.experts)
        if getattr(plan.experts, item.name) != item.default and item.name not in _OF_FEATURES
    ]
    return [
        Diagnostic(
            f"experts.{name}",
            f"got {getattr(plan.experts, name)!r}, which '{style}' does not have",
            "leave it out, or take 'expert_parallel', with mesh.ep a multiple of mesh.tp",
        )
        for name in wrong
    ]


def expert_style(plan: ParallelPlan, name: str) -> Any:
    """Return a style with the plan's options.

    Args:
        plan: the plan.
        name: of the style.
    """
    section = plan.experts
    if name != "expert_parallel":
        return ExpertTensorParallel(combine=section.combine, slots=section.slots)
    options = {name: getattr(section, name) for name in ("combine", "capacity", "chunks", "slots")}
    return ExpertParallel(section.exchange, **options)


def replicas(plan: ParallelPlan, model: ModelOutline) -> int:
    """Return the elements of the replicas that a rank holds, and of the gradients of one layer's.

    Args:
        plan: the plan.
        model: its modules of experts.
    """
    each = [
        sum(map(prod, module.shapes.values())) // max(1, module.experts.count)
        for module in model.modules.values()
        if module.experts is not None
    ]
    return plan.experts.slots * (sum(each) + max(each, default=0))
