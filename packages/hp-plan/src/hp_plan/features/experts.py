"""Experts over ranks: the axis `ep`, a second view of the ranks that share a copy of the model, and `[experts]`.

Note [Two views of one world]
Dense parameters are sharded over `dp_shard`, `cp` and `tp`; experts over `ep`, and over the ranks that are left of
these, `efsdp`. Tensor parallel ranks have the same tokens. With `expert_parallel` experts are spread over all of them,
each of which sends a share of the tokens, so `ep` is a multiple of `tp`. With `expert_tensor_parallel` each has a part
of the features of the same experts, so `ep` divides the other ranks. In both an expert's gradient is the sum over the
tokens of its ranks, and `fully_shard`, whose groups of experts are on `efsdp`, takes the mean over all samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from hp_dtensor import DeviceMesh, Shard
from hp_moe import ExpertParallel, ExpertTensorParallel
from hp_plan.features.adapters import innermost
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.sections import MeshSection
from hp_plan.structure.outline import ExpertsOutline, ModelOutline, ModuleOutline, generalise, matched_by, matching
from hp_styles import parallelize_module

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
        sum(map(math.prod, module.shapes.values())) // max(1, module.experts.count)
        for module in model.modules.values()
        if module.experts is not None
    ]
    return plan.experts.slots * (sum(each) + max(each, default=0))


EXPERT_STYLES = {
    "expert_parallel": "whole experts on each rank of ep, tokens go to them and come back",
    "expert_tensor_parallel": "experts over ep, the features of each over tp",
}
"""Styles of modules of experts, for `mesh.ep` above 1; the first that fits the mesh is that of `styles = "auto"`."""
_NO_EXPERTS = "leave mesh.ep out; mesh.dp_shard and mesh.tp shard all parameters"
DISPATCHED = "ep_dispatch_experts"
"""transformers' name for the style of a module of experts."""


# ---- styles ----
def expert_table(plan: ParallelPlan, model: ModelOutline) -> dict[str, str]:
    """Return the styles of the modules of experts that the model's own expert parallel plan names.

    Raises:
        PlanError: it names none.
    """
    prefix = f"{model.base}." if model.base else ""
    inside = getattr(model.config, "base_model_ep_plan", None) or {}
    own = {**{f"{prefix}{pattern}": style for pattern, style in inside.items()}, **model.own_expert_table}
    style = automatic_style(plan)
    table = {name: style for name, kind in own.items() if kind == DISPATCHED and matching(name, model.names)}
    if table:
        return table
    name = f"{model.type_name} (model_type {getattr(model.config, 'model_type', None)!r})"
    modules = generalise(name for name, module in model.modules.items() if module.experts is not None)
    if modules:
        fix = f'write [styles] with "{modules[0]}" = "{style}", and styles for tp beside it where mesh.tp is above 1'
    else:
        fix = _NO_EXPERTS
    message = f"ep = {plan.mesh.ep}, but {name} has no expert parallel plan (base_model_ep_plan)"
    raise PlanError([Diagnostic("styles", message, fix)])


def automatic_style(plan: ParallelPlan) -> str:
    """Return the style that fits the mesh: Note [Two views of one world]."""
    return next((style for style in EXPERT_STYLES if _parts(plan.mesh, style)), "expert_parallel")


def with_experts(table: Mapping[str, str], experts: Mapping[str, str], model: ModelOutline) -> dict[str, str]:
    """Replace what a tensor parallel table says of modules of experts.

    Args:
        table: pattern -> style.
        experts: pattern -> style of modules of experts.
        model: its names.
    """
    names = matched_by(experts, model.names)
    inside = tuple(f"{name}." for name in names)

    def of_experts(pattern: str) -> bool:
        matched = [*matching(pattern, model.names), *matching(pattern, model.parameters)]
        return bool(matched) and all(name in names or name.startswith(inside) for name in matched)

    return {**{pattern: style for pattern, style in table.items() if not of_experts(pattern)}, **experts}


# ---- checks ----
def check_expert_axis(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that some style of experts fits the mesh: Note [Two views of one world]."""
    mesh = plan.mesh
    if mesh.ep == 1 or any(_parts(mesh, style) for style in EXPERT_STYLES):
        return []
    sizes = {"dp_shard": mesh.dp_shard, "cp": mesh.cp, "tp": mesh.tp}
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "dp_shard 1"
    fitting = [
        number
        for number in range(2, mesh.sharing + 1)
        if any(_parts(dataclasses.replace(mesh, ep=number), style) for style in EXPERT_STYLES)
    ]
    message = f"ep = {mesh.ep} does not fit the {mesh.sharing} ranks that share a copy of the model, {product}"
    if mesh.sharing % mesh.ep == 0 and mesh.tp > 1:
        message += f": it is a multiple of tp = {mesh.tp}, whose ranks have the same tokens, or divides the others"
    choices = f"make it one of {', '.join(map(str, fitting))}, or " if fitting else ""
    fix = f"{choices}raise mesh.dp_shard: experts are spread over ranks that the mesh has already"
    return [Diagnostic("mesh.ep", message, fix)]


def check_experts(plan: ParallelPlan, styles: Mapping[str, str], model: ModelOutline) -> list[Diagnostic]:
    """Check the styles of modules of experts against the mesh and the experts' shapes.

    Args:
        plan: the plan.
        styles: name of a module -> style.
        model: its shapes.
    """
    chosen = {name: style for name, style in expert_styles(styles).items() if name in model.modules}
    if not chosen and plan.mesh.ep > 1:
        names = generalise(name for name, module in model.modules.items() if module.experts is not None)
        message = f"ep = {plan.mesh.ep}, but no style spreads experts over it"
        return [
            Diagnostic("styles", message, f'add "{names[0]}" = "{automatic_style(plan)}"' if names else _NO_EXPERTS)
        ]
    if len(set(chosen.values())) > 1:
        message = f"styles of experts are both {' and '.join(map(repr, EXPERT_STYLES))}, for one axis ep"
        return [Diagnostic("styles", message, f"take '{automatic_style(plan)}' for all of them")]
    options = check_style_options(plan, next(iter(chosen.values()))) if chosen else []
    options += _check_adapted(plan, chosen, model)
    plain = tuple(f"{name}." for name, style in styles.items() if style == "plain")
    diagnostics: dict[tuple[str, str], Diagnostic] = {}
    for name, style in chosen.items():
        problem = _mismatch(plan, style, model.modules[name])
        if problem is None and name.startswith(plain):
            problem = (
                "it is inside of a part with style 'plain', whose tokens are the same on all ranks of tp",
                _UNPLAIN,
            )
        if problem is not None:
            shown = generalise([name])[0]
            key = f'styles."{shown}"' if isinstance(plan.styles, Mapping) else "mesh.ep"
            diagnostics.setdefault((shown, style), Diagnostic(key, f"'{style}' on {shown}: {problem[0]}", problem[1]))
    return [*diagnostics.values(), *options]


def _check_adapted(plan: ParallelPlan, chosen: Iterable[str], model: ModelOutline) -> list[Diagnostic]:
    """Check that adapters of experts' parameters can be where the experts are: their matrices are for even parts."""
    adapted = [name for name in chosen if innermost(name, model.modules) != name]
    if not adapted:
        return []
    linear = [
        name for name, module in model.modules.items() if module.is_linear and f"{name}.base_layer" in model.modules
    ]
    ends = ", ".join(repr(end) for end in dict.fromkeys(name.rpartition(".")[2] for name in linear))
    alone = f"adapt Linear modules alone: targets = [{ends}]" if ends else "adapt Linear modules in place of them"
    counts = {module.experts.count for name in adapted if (module := model.modules[name]).experts is not None}
    uneven = next((count for count in counts if count % plan.mesh.ep), None)
    diagnostics = []
    if uneven is not None:
        message = f"ep = {plan.mesh.ep} does not divide the {uneven} experts, whose parameters have adapters"
        diagnostics.append(Diagnostic("adapter.targets", message, f"make mesh.ep a divisor of {uneven}, or {alone}"))
    if plan.experts.slots:
        message = f"got {plan.experts.slots} for replicas of experts whose parameters have adapters, which stay at home"
        diagnostics.append(Diagnostic("experts.slots", message, f"leave it out, or {alone}"))
    return diagnostics


def balances_alone(plan: ParallelPlan, config: Any) -> str | None:
    """Return the setting by which a model adds a load balancing loss of each rank's own tokens; None if it does not."""
    return None if plan.mesh.data_parallel * plan.mesh.cp == 1 else balancing_setting(config)


def balancing_setting(config: Any) -> str | None:
    """Return the setting by which a model adds a load balancing loss; None if it does not."""
    parts = {f"{name}.": getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    on = (name for name, each in {"": config, **parts}.items() if getattr(each, "output_router_logits", False))
    return next((f"{name}output_router_logits" for name in on), None)


def check_auxiliary_loss(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Check that a load balancing loss can be that of all tokens, which is no mean of those of the ranks' tokens."""
    setting = balances_alone(plan, model.config)
    if setting is None or model.balances:
        return []
    parts = plan.mesh.data_parallel * plan.mesh.cp
    message = f"{setting} adds a load balancing loss of the tokens of each of {parts} ranks alone"
    fix = f"write {setting} = false in [model.overrides]: the loss of all tokens is no mean of theirs"
    return [Diagnostic("model.overrides", message, fix)]


_UNPLAIN = "give the modules of that part styles of their own, or make mesh.tp 1"


def _mismatch(plan: ParallelPlan, style: str, module: ModuleOutline) -> tuple[str, str] | None:
    """Return what is wrong with a style on a module, and what to do; None if nothing is."""
    mesh, experts = plan.mesh, module.experts
    if experts is None:
        fix = "name a module of experts that is called with tokens, the experts chosen for each, and their weights"
        return f"a {module.type_name} is no module of experts, or is called without its tokens' routing", fix
    if mesh.ep == 1:
        return "mesh.ep is 1", "make mesh.ep at least 2, or leave the style out"
    if experts.count < mesh.ep:
        return f"{experts.count} experts for ep = {mesh.ep} ranks", f"make mesh.ep at most {experts.count}"
    if experts.normed:
        return f"a {module.type_name} has a norm after its experts, whose gradient nobody would add up", _NO_EXPERTS
    if not _parts(mesh, style):
        if not _parts(mesh, automatic_style(plan)):
            return None  # no style can have this ep, which is reported under mesh.ep
        fix = f"take '{automatic_style(plan)}'"
        if style == "expert_parallel":
            return f"ep = {mesh.ep} is no multiple of tp = {mesh.tp}, whose ranks have the same tokens", fix
        if mesh.tp == 1:
            return "there is no tp, over which features would be sharded", fix
        return f"ep = {mesh.ep} does not divide the {mesh.sharing // mesh.tp} ranks beside tp", fix
    if style == "expert_parallel":
        return None
    if experts.count % mesh.ep:
        fix = f"make mesh.ep a divisor of {experts.count}, or take 'expert_parallel', which spreads experts unevenly"
        return f"ep = {mesh.ep} does not divide {experts.count} experts with sharded features", fix
    if experts.features % mesh.tp:
        fix = f"make mesh.tp a divisor of {experts.features}, or take 'expert_parallel'"
        return f"tp = {mesh.tp} does not divide the {experts.features} inner features of an expert", fix
    return None


# ---- application ----
def expert_sources(plan: ParallelPlan) -> tuple[int, int]:
    """Return how many ranks of data parallelism, and of `cp`, an expert's tokens come from in one product."""
    parts = _parts(plan.mesh, "expert_parallel")
    assert parts is not None
    return parts["dp_shard"][1], parts["cp"][1]


def expert_styles(styles: Mapping[str, str]) -> dict[str, str]:
    """Return the styles of modules of experts among the styles by name."""
    return {name: style for name, style in styles.items() if style in EXPERT_STYLES}


def with_expert_axes(plan: ParallelPlan, mesh: DeviceMesh, styles: Mapping[str, str]) -> DeviceMesh:
    """Return a mesh of the same ranks with the axes of the plan and `ep` and `efsdp`, all slices of one root.

    Args:
        plan: the plan.
        mesh: of the axes of the plan.
        styles: name of a module of experts -> style, one for all; empty for a mesh as it is.
    """
    if not styles:
        return mesh
    parts = _parts(plan.mesh, next(iter(styles.values()))) or {}
    sizes: dict[str, int] = {}
    cut, left, ep = [], [], []
    for axis, size in plan.mesh.axes.items():
        outer, inner = parts.get(axis, (1, 1))
        names = (f"{axis}_outer", f"{axis}_inner") if outer > 1 and inner > 1 else (axis, axis)
        left += names[:1] if outer > 1 else []
        ep += names[1:] if inner > 1 else []
        cut += [(axis, names)] if outer > 1 and inner > 1 else []
        sizes.update(zip(names, (outer, inner), strict=True) if names[0] != axis else [(axis, size)])
    if not left:
        sizes["efsdp"] = 1
    fine = DeviceMesh(mesh.device_type, mesh.ranks.reshape(tuple(sizes.values())), mesh_dim_names=tuple(sizes))
    for name, names in [*cut, ("ep", tuple(ep)), *([("efsdp", tuple(left))] if left else [])]:
        fine[names]._flatten(name)
    return fine


def spread_experts(
    model: Any, plan: ParallelPlan, mesh: DeviceMesh, outline: ModelOutline, styles: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Spread experts over the ranks of `ep`.

    Args:
        model: the model, or a stage of it under its names.
        plan: the plan.
        mesh: of all axes, by `with_expert_axes`.
        outline: of the whole model.
        styles: name of a module of experts -> style.

    Returns:
        Name of a module of experts -> arguments of `fully_shard` for its group.
    """
    if not styles:
        return {}
    kind = next(iter(styles.values()))
    over_ranks = mesh["ep"] if kind == "expert_parallel" else mesh["ep", "tp"]
    inside = {name: innermost(name, outline.modules) for name in styles}
    parallelize_module(model, over_ranks, {inside[name]: expert_style(plan, kind) for name in styles})
    over = mesh["dp_replicate", "efsdp"] if "dp_replicate" in plan.mesh.axes else mesh["efsdp"]
    return {name: {"mesh": over, **_sharding(outline.modules[name].experts, plan.mesh.ep)} for name in styles}


def _sharding(experts: ExpertsOutline | None, ranks: int) -> dict[str, Any]:
    """Return how a group shards experts further: those that ranks do not divide by feature, as one dim is uneven."""
    if experts is None or experts.count % ranks == 0:
        return {}
    return {"shard_placement_fn": lambda parameter: Shard(1)}


def _parts(mesh: MeshSection, style: str) -> dict[str, tuple[int, int]] | None:
    """Cut axes, the innermost first, into an outer and an inner part, so that the inner parts have `ep` ranks together.

    Returns:
        Name of an axis -> sizes of its two parts; None if `ep` does not fit the axes, or the style.
    """
    sizes = {"dp_shard": mesh.dp_shard, "cp": mesh.cp}
    if style == "expert_parallel":
        sizes["tp"] = mesh.tp
    elif mesh.tp == 1:
        return None
    parts, ep = {}, mesh.ep
    for axis, size in reversed(sizes.items()):
        inner = math.gcd(size, ep)
        if inner not in (size, ep) or (axis == "tp" and inner < size):
            return None
        parts[axis] = size // inner, inner
        ep //= inner
    return parts if ep == 1 else None
