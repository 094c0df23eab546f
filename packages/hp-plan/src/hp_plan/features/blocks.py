"""Blocks of a model that are compiled, computed again or swapped: `[compile]`, `[memory] recompute` and `swap`."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import hp_offload
from hp_plan.features.homes import in_groups
from hp_plan.plan import ParallelPlan
from hp_plan.port import models
from hp_plan.reading.diagnostics import Diagnostic, near_misses
from hp_plan.structure.outline import (
    ModelOutline,
    block_lists,
    generalise,
    matched_by,
    matches_nothing,
    matching,
    never_called,
)
from hp_platform import get_platform

_WRAPPERS = {"recompute": hp_offload.checkpoint_wrapper, "swap": hp_offload.swap_wrapper}


def check_saving(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that activations are saved by one plan alone, and that the framework can compute them again."""
    if plan.memory.recompute and plan.mesh.tp > 1 and get_platform().name == "mindspore":
        message = f"got recompute with mesh.tp = {plan.mesh.tp}, which this version does not support on MindSpore"
        return [Diagnostic("memory.recompute", message, "write swap in its place, or make mesh.tp 1")]
    listed = [name for name in _WRAPPERS if getattr(plan.memory, name)]
    if plan.memory.budget is None or not listed:
        return []
    message = f"got {listed[0]} with a budget, which decides itself what is computed again and what is swapped"
    return [Diagnostic(f"memory.{listed[0]}", message, "leave it out, or memory.budget")]


def check_activations(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Check that patterns name modules that are called, none of them twice or inside another."""
    diagnostics: dict[str, Diagnostic] = {}
    chosen: dict[str, str] = {}
    for key, pattern in _patterns(plan):
        matched = matching(pattern, model.names)
        if not matched:
            diagnostics[key] = matches_nothing(key, pattern, model.names)
        for name in matched:
            uncalled = never_called(key, pattern, name, model)
            if uncalled is not None:
                diagnostics.setdefault(key, uncalled)
            elif name in chosen:
                message = f"'{pattern}' matches {name}, as {chosen[name]} does"
                diagnostics.setdefault(key, Diagnostic(key, message, "name each module once"))
            chosen.setdefault(name, key)
    for name, key in chosen.items():
        outer = next((each for each in _around(name) if each in chosen), None)
        if outer is not None:
            message = f"{name} is inside of {outer}, which {chosen[outer]} names"
            diagnostics.setdefault(key, Diagnostic(key, message, "name the one or the other"))
    return list(diagnostics.values())


def _patterns(plan: ParallelPlan) -> list[tuple[str, str]]:
    return [
        (f"memory.{kind}[{index}]", pattern)
        for kind in _WRAPPERS
        for index, pattern in enumerate(getattr(plan.memory, kind))
    ]


def _around(name: str) -> list[str]:
    """List the modules around one, the outermost first.

    >>> _around("layers.0.mlp")
    ['layers', 'layers.0']
    """
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def save_less(model: Any, plan: ParallelPlan, outline: ModelOutline, here: Container[str]) -> None:
    """Wrap the modules that the plan names.

    Args:
        model: the model, or a stage of it under its names.
        plan: the plan.
        outline: of the whole model.
        here: names of the modules that `model` runs itself.
    """
    modules = dict(models().named_modules(model))
    for kind, wrap in _WRAPPERS.items():
        for pattern in getattr(plan.memory, kind):
            for name in matching(pattern, outline.names):
                if name in here:
                    wrap(modules[name])


_AXES = {
    "tp": "its DTensors meet plain tensors inside of blocks",
    "cp": "attention that is spread over ranks is not traced",
    "ep": "experts gather their parameters inside of blocks",
}
_BESIDE = {
    "swap": "what leaves for the host is not traced",
    "budget": "a plan of memory is made operation by operation",
}


def check_compile(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that nothing else in the plan keeps blocks from being one graph."""
    section, default = plan.compile, type(plan.compile)()
    if not section.blocks:
        if section.backend == default.backend:
            return []
        message = f"got {section.backend!r}, which nothing uses without blocks"
        return [
            Diagnostic("compile.backend", message, 'leave it out, or write for example blocks = ["model.layers.*"]')
        ]
    if get_platform().name != "torch":
        message = "got blocks to compile, which this version does not support on MindSpore"
        return [Diagnostic("compile.blocks", message, "leave [compile] out")]
    reasons = [
        (f"mesh.{axis} = {getattr(plan.mesh, axis)}", why, f"make mesh.{axis} 1")
        for axis, why in _AXES.items()
        if getattr(plan.mesh, axis) > 1
    ]
    if plan.precision.experts is not None:
        what = f"precision.experts = {plan.precision.experts!r}"
        reasons.append((what, "an expert's tokens are counted on the host, which is not traced", "precision.experts"))
    if plan.precision.linear == "mxfp8" and plan.precision.kernels == "emulated":
        reasons.append(("precision.linear = 'mxfp8'", "emulated products of blocks are not traced", "precision.linear"))
    if plan.precision.linear is not None and plan.precision.all_gather is not None:
        what = f"precision.all_gather = {plan.precision.all_gather!r}"
        reasons.append((what, "weights that are gathered as bytes are not traced", "precision.all_gather"))
    reasons += [(f"memory.{key}", why, f"memory.{key}") for key, why in _BESIDE.items() if getattr(plan.memory, key)]
    diagnostics = [
        Diagnostic(
            "compile.blocks", f"got blocks to compile with {what}, but {why}", f"leave [compile] out, or {other}"
        )
        for what, why, other in reasons
    ]
    backends = models().compilers()
    if section.backend not in backends:
        message = f"there is no compiler {section.backend!r}"
        diagnostics.append(Diagnostic("compile.backend", message, near_misses(section.backend, backends)))
    return diagnostics


def check_compiled(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Check that patterns name modules that are called, and around no other group of parameters."""
    diagnostics = []
    groups = (plan.fsdp.groups or block_lists(model)) if in_groups(plan) else ()
    chosen = matched_by(plan.compile.blocks, model.names)
    apart = sorted(matched_by(groups, model.names) | chosen)
    for index, pattern in enumerate(plan.compile.blocks):
        key, matched = f"compile.blocks[{index}]", matching(pattern, model.names)
        if not matched:
            diagnostics.append(matches_nothing(key, pattern, model.names))
        for name in matched:
            inside = next((each for each in apart if each.startswith(f"{name}.")), None)
            uncalled = never_called(key, pattern, name, model)
            if uncalled is not None:
                diagnostics.append(uncalled)
            elif inside is not None:
                what = "is compiled too" if inside in chosen else "gathers its parameters by itself"
                message = f"'{pattern}' matches {name}, but {inside} inside of it {what}"
                diagnostics.append(
                    Diagnostic(key, message, f"name the inner modules alone: '{generalise([inside])[0]}'")
                )
            else:
                continue
            break
    return diagnostics


def compile_blocks(model: Any, plan: ParallelPlan, outline: ModelOutline, here: Container[str]) -> None:
    """Let the modules that the plan names be compiled in their first call.

    Args:
        model: the model, or a stage of it under its names.
        plan: the plan.
        outline: of the whole model.
        here: names of the modules that `model` runs itself.
    """
    named = matched_by(plan.compile.blocks, outline.names)
    for name, module in models().named_modules(model):
        if name in named and name in here:
            models().compile(module, plan.compile.backend)
