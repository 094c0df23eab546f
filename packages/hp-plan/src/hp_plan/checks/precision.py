"""`[precision]`: which layers multiply in eight bits, and what keeps them from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from hp_plan.features.adapters import is_of_adapter
from hp_plan.features.homes import in_groups
from hp_plan.plan import ParallelPlan
from hp_plan.port import models
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.sections import PrecisionSection
from hp_plan.structure.outline import ModelOutline, generalise, matches, matches_inside, matches_nothing

_MULTIPLE = {"float8-tensorwise": 16, "float8-rowwise": 16, "mxfp8": 32}
_NONE = PrecisionSection()


def check_precision(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that this framework and device have the products, and that nothing else in the plan is against them."""
    section = plan.precision
    if not section.formats:
        given = [item.name for item in fields(section) if getattr(section, item.name) != getattr(_NONE, item.name)]
        message = f"{', '.join(given)} would have no effect: there are no products in eight bits"
        fix = 'write linear = "float8-tensorwise", or leave [precision] out'
        return [Diagnostic("precision", message, fix)] if given else []
    for key, form in section.formats.items():
        lack = models().lacks_products(key, form, section.kernels)
        if lack is not None:
            return [Diagnostic(f"precision.{key}", f"got {form!r}, but {lack[0]}", lack[1])]
    key, form = next(iter(section.formats.items()))
    key, got, diagnostics = f"precision.{key}", f"got {form!r}", []
    if plan.adapter.kind is not None:
        message = f"{got} with an adapter, whose layers add their own product to one of weights that are not trained"
        diagnostics.append(Diagnostic(key, message, "leave [precision] out, or [adapter]"))
    if section.linear and plan.communication.async_tensor_parallel != "off":
        message = f"{got} with communication.async_tensor_parallel, whose product is in the dtype of the model"
        diagnostics.append(Diagnostic(key, message, "leave the one or the other out"))
    if plan.optimizer.name == "adamw8bit":
        message = f"{got} with adamw8bit, whose states are cut in blocks of 256 elements: verify can't compare the two"
        diagnostics.append(Diagnostic("optimizer.name", message, "make it 'adamw', or leave [precision] out"))
    if plan.memory.budget is not None:
        message = f"{got} with memory.budget, whose plan of what is computed again knows no tensors of eight bits"
        diagnostics.append(Diagnostic("memory.budget", message, "write memory.recompute or swap in its place"))
    return [*diagnostics, *_check_tokens(plan), *_check_gather(plan), *_check_dispatch(plan)]


def _check_tokens(plan: ParallelPlan) -> list[Diagnostic]:
    linear = plan.precision.linear
    if linear is None:
        return []
    rows = plan.data.batch_size * plan.data.width // plan.mesh.data_parallel
    parts = (plan.pipeline.micro_batches or rows) if plan.mesh.pp > 1 else plan.run.accumulate
    tokens = rows // parts * plan.data.sequence_length // plan.mesh.cp
    multiple = _MULTIPLE[linear]
    if tokens % multiple == 0:
        return []
    message = f"a rank multiplies {tokens} tokens at a time, and {linear} needs a multiple of {multiple}"
    fix = f"make data.sequence_length a multiple of {multiple * plan.mesh.cp}"
    return [Diagnostic("data.sequence_length", message, fix)]


def _check_dispatch(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that an expert's tokens are multiplied together: scales of its weight's gradient are of all of them."""
    section, key, form = plan.experts, "precision.experts", plan.precision.experts
    if form is None:
        return []
    found = [
        Diagnostic(
            key,
            f"got {form!r} with experts.{name} = {value}, which cuts an expert's tokens in parts with other scales",
            f"leave experts.{name} out",
        )
        for name, value, usual in (("chunks", section.chunks, 1), ("slots", section.slots, 0))
        if value != usual
    ]
    if section.capacity is not None and form == "mxfp8":
        message = (
            f"got 'mxfp8' with experts.capacity = {section.capacity}, which changes the 32 tokens that share a scale"
        )
        found.append(Diagnostic(key, message, "make it 'float8-rowwise', or leave experts.capacity out"))
    if plan.precision.kernels == "auto" and "float16" in (plan.fsdp.param_dtype, plan.run.dtype):
        message = f"got {form!r}, whose grouped kernels take float32 and bfloat16, with float16"
        found.append(Diagnostic(key, message, "write 'bfloat16' in its place"))
    return found


def _check_gather(plan: ParallelPlan) -> list[Diagnostic]:
    key, got = "precision.all_gather", f"got {plan.precision.all_gather!r}"
    reason = None
    if plan.precision.all_gather is None:
        return []
    if plan.precision.linear != "float8-tensorwise":
        reason = f"with {plan.precision.linear!r}, which has a scale for each row in two directions"
        return [Diagnostic(key, f"{got} {reason}", "leave it out, or make precision.linear 'float8-tensorwise'")]
    if not in_groups(plan):
        reason = f"but the mesh {plan.mesh.described} gathers no weights"
    elif plan.memory.homes:
        reason = "with memory.homes, whose ranks send their weights as they are"
    return [] if reason is None else [Diagnostic(key, f"{got}, {reason}", "leave it out")]


def check_layers(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Check that patterns match, and that each layer has a shape that can be multiplied in eight bits."""
    section, diagnostics = plan.precision, []
    if not section.formats:
        return []
    kinds = {"linear": "Linear layer", "experts": "experts"}
    candidates = [*(_linear(model) if section.linear else ()), *(_experts(model) if section.experts else ())]
    for index, pattern in enumerate(section.exclude or ()):
        key, matched = f"precision.exclude[{index}]", [name for name in model.names if matches(pattern, name)]
        if not matched:
            diagnostics.append(matches_nothing(key, pattern, model.names))
        elif not any(matches_inside([pattern], name) for name in candidates):
            what = " or ".join(kinds[name] for name in section.formats)
            message = f"'{pattern}' matches {matched[0]}, and no {what} to multiply in eight bits"
            diagnostics.append(Diagnostic(key, message, "leave it out"))
    names, experts = low_precision_layers(plan, model), low_precision_experts(plan, model)
    if section.linear and not names and not diagnostics:
        message = f"got {section.linear!r}, but all Linear layers are left out"
        return [Diagnostic("precision.linear", message, "leave [precision] out, or make precision.exclude less")]
    if section.experts and not experts and not diagnostics:
        what = "all experts are left out" if _experts(model) else f"{model.type_name} has no experts"
        return [Diagnostic("precision.experts", f"got {section.experts!r}, but {what}", "leave precision.experts out")]
    layers = {name: model.modules[name] for name in names}
    shapes = {name: (each.out_features, each.in_features) for name, each in layers.items()}
    diagnostics += _odd(shapes, section.linear, plan, model)
    matrices = {name: [shape for shape in model.modules[name].shapes.values() if len(shape) == 3] for name in experts}
    diagnostics += _odd({name: each[-1] for name, each in matrices.items()}, section.experts, plan, model)
    tied = {name.rpartition(".")[0] for together in model.tied for name in together}
    shared = [name for name in names if name in tied]
    if shared and section.all_gather:
        message = f"the weight of {shared[0]} is tied to another layer's, which would get bytes"
        diagnostics.append(
            Diagnostic("precision.exclude", message, f"{_adding(shared[:1], plan, model)}, or leave all_gather out")
        )
    return diagnostics


def check_styled_layers(plan: ParallelPlan, styles: Mapping[str, str], model: ModelOutline) -> list[Diagnostic]:
    """Check that each rank's part of a layer can be multiplied in eight bits."""
    section, found = plan.precision, []
    if not section.formats or plan.mesh.tp == 1:
        return []
    cut = [name for name in low_precision_experts(plan, model) if styles.get(name) != "expert_parallel"]
    if cut:
        message = (
            f"got {section.experts!r} with mesh.tp = {plan.mesh.tp}, whose ranks have parts of {generalise(cut)[0]}"
        )
        fix = f"make mesh.ep a multiple of {plan.mesh.tp}, which leaves experts whole, or leave precision.experts out"
        found.append(Diagnostic("precision.experts", message, fix))
    wrong: dict[str, tuple[int | None, ...]] = {}
    for name in low_precision_layers(plan, model):
        multiple, each, style = _MULTIPLE[section.linear or ""], model.modules[name], styles.get(name, "")
        size = each.in_features if "rowwise" in style else each.out_features if "colwise" in style else None
        whole = (each.out_features or 0) % multiple == (each.in_features or 0) % multiple == 0
        if size is not None and whole and size % (multiple * plan.mesh.tp):
            wrong[name] = (each.out_features, each.in_features)
    return found + _refused(wrong, section.linear, plan, model, f" over tp = {plan.mesh.tp} ranks")


def _odd(
    shapes: Mapping[str, tuple[int | None, ...]], form: str | None, plan: ParallelPlan, model: ModelOutline
) -> list[Diagnostic]:
    wrong = {
        name: shape for name, shape in shapes.items() if any((side or 0) % _MULTIPLE[form or ""] for side in shape[-2:])
    }
    return _refused(wrong, form, plan, model, "")


def _refused(
    wrong: Mapping[str, tuple[int | None, ...]], form: str | None, plan: ParallelPlan, model: ModelOutline, over: str
) -> list[Diagnostic]:
    if not wrong:
        return []
    by_shape: dict[tuple[int | None, ...], list[str]] = {}
    for name, shape in wrong.items():
        by_shape.setdefault(shape, []).append(name)
    named = "; ".join(f"{', '.join(generalise(names))} of shape {list(shape)}" for shape, names in by_shape.items())
    message = f"{named}{over} can't be multiplied in {form}, whose dims are multiples of {_MULTIPLE[form or '']}"
    fix = _adding(generalise(wrong), plan, model)
    if form == plan.precision.experts and {*wrong} >= {*low_precision_experts(plan, model)}:
        fix = "choose other sizes of the model, or leave precision.experts out"
    return [Diagnostic("precision.exclude", message, fix)]


def low_precision_layers(plan: ParallelPlan, model: ModelOutline) -> list[str]:
    """List the names of the Linear layers that multiply in eight bits, in the order of the model."""
    patterns = plan.precision.exclude
    if plan.precision.linear is None:
        return []
    usual = _usual(model) if patterns is None else ()
    return [name for name in _linear(model) if name not in usual and not matches_inside(patterns or (), name)]


def low_precision_experts(plan: ParallelPlan, model: ModelOutline) -> list[str]:
    """List the names of the experts that multiply in eight bits, in the order of the model."""
    patterns = plan.precision.exclude or ()
    return [name for name in _experts(model) if not matches_inside(patterns, name)] if plan.precision.experts else []


def _adding(patterns: list[str], plan: ParallelPlan, model: ModelOutline) -> str:
    """Say what to add to `exclude`: what is left out by default, too, as a list replaces that."""
    usual = generalise(_usual(model)) if plan.precision.exclude is None and plan.precision.linear else []
    rest = [pattern for pattern in usual if pattern not in patterns]
    beside = f" and, since a list replaces the default, {', '.join(map(repr, rest))}" if rest else ""
    return f"add {', '.join(map(repr, patterns))}{beside}"


def precision_notes(plan: ParallelPlan, model: ModelOutline) -> list[str]:
    """Name the Linear layers that stay in the dtype of the model, and experts, where others multiply in eight bits."""
    experts = _experts(model) if plan.precision.experts else []
    chosen = {*low_precision_layers(plan, model), *low_precision_experts(plan, model)}
    if not chosen:
        return []
    alike: dict[str, list[str]] = {}
    for name, each in model.modules.items():
        if (each.kind == "linear" and name and plan.precision.linear) or name in experts:
            alike.setdefault(generalise([name])[0], []).append(name)
    left_out = []
    for pattern, names in alike.items():
        staying = [name for name in names if name not in chosen]
        left_out += [pattern] if staying == names else staying
    return [f"[precision] leaves these layers in the model's own dtype: {', '.join(left_out)}"] if left_out else []


def _experts(model: ModelOutline) -> list[str]:
    return [name for name, each in model.modules.items() if each.experts is not None]


def _linear(model: ModelOutline) -> list[str]:
    experts = tuple(f"{name}." for name in _experts(model))
    return [
        name
        for name, each in model.modules.items()
        if name
        and each.kind == "linear"
        and not each.own_forward
        and not name.startswith(experts)
        and not is_of_adapter(name)
    ]


def _usual(model: ModelOutline) -> set[str]:
    """Return the names of the output layer, and of routers: layers beside experts, with an output for each or one."""
    counts = {name.rpartition(".")[0]: each.experts.count for name, each in model.modules.items() if each.experts}
    routers = {
        name
        for name, each in model.modules.items()
        if each.kind == "linear" and each.out_features in (1, counts.get(name.rpartition(".")[0]))
    }
    return {model.head, *routers}
