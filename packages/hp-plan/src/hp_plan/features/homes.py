"""Modules whose parameters live on the host: `[memory] homes` and `cache`.

Note [Homes on one rank and on several]
    On one rank the modules visit a cache of the device (`hp_offload.place`). On several they are groups of
    `fully_shard` whose shards are on the host, as `[fsdp] offload` has all of them: gathered one ahead, gradients
    reduced on the device and then home, so a rank copies its shard alone. Where no axis shards, as with tensor
    parallelism alone, they are groups of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import hp_offload
from hp_dtensor import DeviceMesh
from hp_offload.extend import parse_size, size
from hp_plan.plan import ParallelPlan
from hp_plan.port import models
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.structure.outline import ModelOutline, matched_by, matches_nothing, matching, never_called
from hp_platform import get_platform

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def check_home_values(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that homes are known, that the cache is a number of bytes, and that nothing else moves the parameters."""
    memory, diagnostics = plan.memory, []
    if memory.cache is not None:
        try:
            parse_size(memory.cache)
        except ValueError as error:
            diagnostics.append(Diagnostic("memory.cache", str(error), 'write for example cache = "4GiB"'))
    if not memory.homes:
        if memory.cache is not None:
            message = f"got {memory.cache!r}, which nothing uses without homes"
            diagnostics.append(Diagnostic("memory.cache", message, "leave it out, or give memory.homes"))
        return diagnostics
    if get_platform().name != "torch":
        message = "got homes, which this version does not support on MindSpore"
        return [Diagnostic("memory.homes", message, "leave it out; memory.swap saves memory")]
    for pattern, home in memory.homes.items():
        if home != "host":
            message = f"got {home!r}; the one home is 'host'"
            fix = "write 'host'"
            if home == "neighbour":
                message = f"got {home!r}, whose memory is as full as this rank's: each takes what it gives"
                fix = "write 'host', or make mesh.dp_shard larger, which spreads parameters over ranks"
            diagnostics.append(Diagnostic(f'memory.homes."{pattern}"', message, fix))
    reasons = [
        (plan.fsdp.offload, "fsdp.offload, which moves them, too", "fsdp.offload"),
        (plan.optimizer.swap_slices, "swap_slices, for states on the device", "optimizer.swap_slices"),
    ]
    if visits(plan):
        reasons += [
            (plan.compile.blocks, "blocks to compile, which would keep them on the device", "[compile]"),
            (plan.fsdp.param_dtype is not None, "param_dtype, for sharded parameters alone", "fsdp.param_dtype"),
            (plan.run.deterministic, "deterministic, for sharded parameters alone", "run.deterministic"),
        ]
    else:
        reasons += [
            (
                memory.cache is not None,
                "a cache, which is for one rank: groups are copied ahead",
                "memory.cache",
            ),
            (plan.mesh.ep > 1 and not plan.mesh.shard_axes, "mesh.ep over ranks of mesh.tp alone", "mesh.ep"),
        ]
    for found, what, other in reasons:
        if found:
            diagnostics.append(Diagnostic("memory.homes", f"got homes with {what}", f"leave it out, or {other}"))
    return diagnostics


def check_homes(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Check that patterns match modules that are called, none inside of another, and that each fits in the cache."""
    diagnostics: dict[str, Diagnostic] = {}
    chosen: dict[str, str] = {}
    for pattern in plan.memory.homes:
        key, matched = f'memory.homes."{pattern}"', matching(pattern, model.names)
        if not matched:
            diagnostics[key] = matches_nothing(key, pattern, model.names)
        for name in matched:
            uncalled = never_called(key, pattern, name, model)
            other = next((each for each in chosen if f"{each}.".startswith(f"{name}.")), None)
            other = other or next((each for each in chosen if f"{name}.".startswith(f"{each}.")), None)
            if uncalled is not None:
                diagnostics.setdefault(key, uncalled)
            elif other is not None:
                message = f"'{pattern}' matches {name}, and '{chosen[other]}' matches {other}: one module has one home"
                diagnostics.setdefault(key, Diagnostic(key, message, "name the one or the other"))
            chosen.setdefault(name, pattern)
    diagnostics.update(_check_tied(plan, model, chosen))
    cache = _cache(plan)
    largest = max(chosen, key=lambda name: _elements(model, name), default=None)
    if cache is not None and largest is not None:
        needed = _elements(model, largest) * _BYTES[plan.run.dtype]
        if needed > cache:
            message = f"got {plan.memory.cache}, and the parameters of {largest} take {size(needed)}"
            diagnostics["memory.cache"] = Diagnostic("memory.cache", message, "raise it, or give smaller modules homes")
    return list(diagnostics.values())


def _check_tied(plan: ParallelPlan, model: ModelOutline, chosen: Mapping[str, str]) -> dict[str, Diagnostic]:
    """Check that who shares a parameter has a home, too; a parameter is of one group, where there are groups."""
    for names in model.tied if plan.mesh.pp == 1 else ():  # stages have groups for theirs
        held = {home: name for name in names for home in chosen if name.startswith(f"{home}.")}
        outside = [name for name in names if not any(name.startswith(f"{home}.") for home in held)]
        if held and (outside or (in_groups(plan) and len(held) > 1)):
            key, (name, other) = f'memory.homes."{chosen[next(iter(held))]}"', [*held.values(), *outside][:2]
            fix = "leave it out, or tie_word_embeddings = false" if in_groups(plan) else "give both a home"
            return {key: Diagnostic(key, f"{name} is {other} as well", fix)}
    return {}


def visits(plan: ParallelPlan) -> bool:
    """Tell whether parameters visit a cache: Note [Homes on one rank and on several]."""
    return bool(plan.memory.homes) and plan.mesh.world_size == 1


def shares_budget(plan: ParallelPlan) -> bool:
    """Tell whether the plan that the first step makes for `[memory] budget` chooses the cache, too."""
    return visits(plan) and plan.memory.budget is not None and plan.memory.cache is None


def in_groups(plan: ParallelPlan) -> bool:
    """Tell whether parameters are in groups of `fully_shard`."""
    return not visits(plan) and bool(plan.mesh.shard_axes or plan.memory.homes)


def with_home_axis(plan: ParallelPlan, mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with an axis of one rank for homes to be sharded over, where the plan has none."""
    if plan.mesh.shard_axes or not plan.memory.homes:
        return mesh
    return DeviceMesh(mesh.device_type, mesh.ranks[None], ("dp_shard", *(mesh.mesh_dim_names or ())))


def elements_at_home(plan: ParallelPlan, model: ModelOutline) -> int:
    """Count the elements of the parameters that live on the host."""
    names = matched_by(plan.memory.homes, model.names)
    return min(sum(_elements(model, name) for name in names), model.elements)


def cache_elements(plan: ParallelPlan, model: ModelOutline) -> int:
    """Count the elements of parameters that the device has room for while they visit; 0 where a budget decides."""
    cache, names = _cache(plan), matched_by(plan.memory.homes, model.names)
    if shares_budget(plan):
        return 0
    if cache is not None:
        return cache // _BYTES[plan.run.dtype]
    return 2 * max((_elements(model, name) for name in names), default=0) // plan.mesh.tp


def place_homes(model: Any, plan: ParallelPlan) -> hp_offload.Placed | None:
    """Let the modules that the plan names have their homes; return whose cache is of the budget."""
    if not visits(plan):
        return None
    placed = hp_offload.place(models().base(model), plan.memory.homes, cache=_cache(plan))
    return placed if shares_budget(plan) else None


def _cache(plan: ParallelPlan) -> int | None:
    try:
        return None if plan.memory.cache is None else parse_size(plan.memory.cache)
    except ValueError:  # `check_home_values` tells
        return None


def _elements(model: ModelOutline, name: str) -> int:
    inside = (module for each, module in model.modules.items() if f"{each}.".startswith(f"{name}."))
    return sum(sum(map(prod, module.shapes.values())) for module in inside)
