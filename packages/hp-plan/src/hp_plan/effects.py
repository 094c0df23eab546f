"""Values of a plan that nothing would read: refused, so that none is ignored."""

from __future__ import annotations

from dataclasses import fields

from hp_plan.diagnostics import Diagnostic
from hp_plan.plan import ParallelPlan

_ADAMW = ("adamw", "adamw8bit", "muon")

# Keys that some values of another key of their section read: section -> (that key, {key: those values}).
_READ_BY: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "optimizer": (
        "name",
        {"betas": _ADAMW, "eps": _ADAMW, "momentum": ("sgd",), "muon": ("muon",), "muon_momentum": ("muon",)},
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
    validation = plan.validation
    for item in fields(validation):
        value = getattr(validation, item.name)
        if not validation.paths and value != item.default:
            message = f"got {value!r}, which nothing uses without data to validate on"
            diagnostics.append(Diagnostic(f"validation.{item.name}", message, "leave it out, or give validation.paths"))
    return diagnostics
