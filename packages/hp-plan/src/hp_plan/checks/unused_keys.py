"""Values of a plan that nothing would read: refused, so that none is ignored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from hp_plan.checks.watching import no_text
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic

_ADAMW = ("adamw", "adamw8bit", "muon")

# Keys that some values of another key of their section read: section -> (that key, {key: those values}).
_READ_BY: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "optimizer": (
        "name",
        {"betas": _ADAMW, "eps": _ADAMW, "momentum": ("sgd",), "muon": ("muon",), "muon_momentum": ("muon",)},
    ),
    "objective": (
        "kind",
        {
            **dict.fromkeys(("beta", "loss", "label_smoothing"), ("dpo",)),
            **dict.fromkeys(("temperature", "mix"), ("distill",)),
            "reference": ("dpo", "distill"),
        },
    ),
    "schedule": ("kind", {"final": ("linear", "cosine", "wsd"), "decay_steps": ("wsd",), "decay": ("wsd",)}),
}


def check_effects(plan: ParallelPlan) -> list[Diagnostic]:
    """Name the values that differ from their defaults and would have no effect."""
    diagnostics = []
    for name, (chooser, keys) in _READ_BY.items():
        section = getattr(plan, name)
        choice = getattr(section, chooser)
        for item in fields(section):
            value = getattr(section, item.name)
            readers = keys.get(item.name, (choice,))
            if choice not in readers and value != item.default:
                message = f"got {value!r}, which {chooser} = {choice!r} does not use"
                shown = " or ".join(repr(reader) for reader in readers)
                fix = f"leave it out, or make {name}.{chooser} {shown}"
                diagnostics.append(Diagnostic(f"{name}.{item.name}", message, fix))
    memory = plan.memory
    if memory.budget is None and memory.bandwidth != type(memory)().bandwidth:
        message = f"got {memory.bandwidth:g}, which nothing uses without a budget"
        diagnostics.append(Diagnostic("memory.bandwidth", message, "leave it out, or give memory.budget"))
    paths, prompts = ("batches",), ("prompt_tokens",)
    if not plan.validation.paths and not plan.validation.prompts:
        paths = ("batches", "every")
    validation = _without(plan, "validation", "paths", paths, possible=plan.mesh.pp == 1)
    validation += _without(plan, "validation", "prompts", prompts, possible=no_text(plan) is None)
    return [*diagnostics, *validation, *_without(plan, "profile", "start", ("steps", "ranks"))]


def _without(
    plan: ParallelPlan, name: str, needed: str, keys: Sequence[str], *, possible: bool = True
) -> list[Diagnostic]:
    """Name those of some keys of a section that have a value, and no effect without another of its keys.

    Args:
        plan: the plan.
        name: of the section.
        needed: the other key.
        keys: those that it gives an effect.
        possible: the rest of the plan can have it.
    """
    section = getattr(plan, name)
    if getattr(section, needed):
        return []
    default = type(section)()
    return [
        Diagnostic(
            f"{name}.{key}",
            f"got {getattr(section, key)!r}, which nothing uses without {name}.{needed}",
            f"leave it out, or give {name}.{needed}" if possible else "leave it out",
        )
        for key in keys
        if getattr(section, key) != getattr(default, key)
    ]
