"""Values of a plan that nothing would read, and validation and profiles where there can be none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_platform import get_platform


def check_validation(plan: ParallelPlan) -> list[Diagnostic]:
    """Refuse validation of a model in stages, whose schedules have no forward alone, and prompts without texts."""
    section, diagnostics = plan.validation, []
    if section.paths and plan.mesh.pp > 1:
        message = f"got {list(section.paths)}, but with pp = {plan.mesh.pp} a model can't be validated yet"
        fix = "leave [validation] out, and evaluate the checkpoints with --set mesh.pp=1; or leave pp out"
        diagnostics.append(Diagnostic("validation.paths", message, fix))
    reason = no_text(plan)
    if section.prompts and reason is not None:
        message = f"got {list(section.prompts)}, but {reason}"
        diagnostics.append(Diagnostic("validation.prompts", message, "leave it out, and generate from the checkpoints"))
    return diagnostics


def check_best(plan: ParallelPlan) -> list[Diagnostic]:
    """Refuse to compare checkpoints that have no validation loss."""
    best, run, every = plan.run.keep_best, plan.run, plan.validation.every
    if not best:
        return []
    if not plan.validation.paths:
        message = f"got {best}, but nothing is validated, so checkpoints have no loss to compare"
        fix = "leave it out" if plan.mesh.pp > 1 else "leave it out, or give validation.paths"
        return [Diagnostic("run.keep_best", message, fix)]
    if not run.checkpoint_every:
        message = f"got {best}, which nothing uses without run.checkpoint_every"
        fix = "leave it out, or give run.checkpoint_every, a multiple of validation.every"
        return [Diagnostic("run.keep_best", message, fix)]
    if run.checkpoint_every % every:
        message = f"got {best}, but checkpoints are every {run.checkpoint_every} steps and validated every {every}"
        return [Diagnostic("run.keep_best", message, "make run.checkpoint_every a multiple of validation.every")]
    return []


def no_text(plan: ParallelPlan) -> str | None:
    """Say why a model can't generate, as far as the plan tells."""
    for axis in ("pp", "cp"):
        if getattr(plan.mesh, axis) > 1:
            return f"with {axis} = {getattr(plan.mesh, axis)} a model does not generate"
    if plan.model.function is not None:
        return "a function's model has no way to generate that is known"
    if plan.model.task not in (None, "causal-lm"):
        return f"task = {plan.model.task!r} is not tested to generate"
    return None


def check_profile(plan: ParallelPlan) -> list[Diagnostic]:
    """Refuse profiles that this framework or device has none of, and steps and ranks that there are not."""
    section = plan.profile
    if section.start is None:
        return []
    platform, diagnostics = get_platform(), []
    if platform.name != "torch" or platform.devices.kind == "npu":
        on = "MindSpore" if platform.name != "torch" else "NPUs"
        message = f"got {section.start}, but profiles on {on} are not supported yet"
        return [Diagnostic("profile.start", message, "leave [profile] out, and profile with the tools of the device")]
    last = section.start + section.steps - 1
    if last > plan.run.steps:
        message = f"steps {section.start} to {last} are profiled, but the run has {plan.run.steps}"
        diagnostics.append(Diagnostic("profile.start", message, "make profile.start or profile.steps smaller"))
    absent = [rank for rank in section.ranks if rank >= plan.mesh.world_size]
    if absent:
        message = f"rank {absent[0]} is profiled, but the mesh has ranks 0 to {plan.mesh.world_size - 1}"
        diagnostics.append(Diagnostic("profile.ranks", message, "name ranks of the mesh"))
    return diagnostics


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


def check_unused_keys(plan: ParallelPlan) -> list[Diagnostic]:
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
    monitor = _without(plan, "monitor", "every", ("phases", "names", "numbers"))
    if not plan.sdc.replicas:
        monitor += _without(plan, "sdc", "replay_every", ("on_fault",))
    return [*diagnostics, *validation, *monitor, *_without(plan, "profile", "start", ("steps", "ranks"))]


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
