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
    section, key = plan.precision, "precision.linear"
    if section.linear is None:
        given = [item.name for item in fields(section) if getattr(section, item.name) != getattr(_NONE, item.name)]
        message = f"{', '.join(given)} would have no effect: there are no products in eight bits"
        fix = 'write linear = "float8-tensorwise", or leave [precision] out'
        return [Diagnostic("precision", message, fix)] if given else []
    got = f"got {section.linear!r}"
    lack = models().lacks_products(section.linear, section.kernels)
    if lack is not None:
        return [Diagnostic(key, f"{got}, but {lack[0]}", lack[1])]
    diagnostics = []
    if plan.adapter.kind is not None:
        message = f"{got} with an adapter, whose layers add their own product to one of weights that are not trained"
        diagnostics.append(Diagnostic(key, message, "leave [precision] out, or [adapter]"))
    if plan.communication.async_tensor_parallel != "off":
        message = f"{got} with communication.async_tensor_parallel, whose product is in the dtype of the model"
        diagnostics.append(Diagnostic(key, message, "leave the one or the other out"))
    rows = plan.data.batch_size * plan.data.width // plan.mesh.data_parallel
    parts = (plan.pipeline.micro_batches or rows) if plan.mesh.pp > 1 else plan.run.accumulate
    tokens = rows // parts * plan.data.sequence_length
    tokens //= plan.mesh.cp
    if plan.optimizer.name == "adamw8bit":
        message = f"{got} with adamw8bit, whose states are cut in blocks of 256 elements: verify can't compare the two"
        diagnostics.append(Diagnostic("optimizer.name", message, "make it 'adamw', or leave [precision] out"))
    if plan.memory.budget is not None:
        message = f"{got} with memory.budget, whose plan of what is computed again knows no tensors of eight bits"
        diagnostics.append(Diagnostic("memory.budget", message, "write memory.recompute or swap in its place"))
    multiple = _MULTIPLE[section.linear]
    if tokens % multiple:
        message = f"a rank multiplies {tokens} tokens at a time, and {section.linear} needs a multiple of {multiple}"
        fix = f"make data.sequence_length a multiple of {multiple * plan.mesh.cp}"
        diagnostics.append(Diagnostic("data.sequence_length", message, fix))
    return [*diagnostics, *_check_gather(plan)]


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
    if section.linear is None:
        return []
    for index, pattern in enumerate(section.exclude or ()):
        key, matched = f"precision.exclude[{index}]", [name for name in model.names if matches(pattern, name)]
        if not matched:
            diagnostics.append(matches_nothing(key, pattern, model.names))
        elif not any(matches_inside([pattern], name) for name in _linear(model)):
            message = f"'{pattern}' matches {matched[0]}, and no Linear layer that {section.linear} could multiply"
            diagnostics.append(Diagnostic(key, message, "leave it out"))
    names = low_precision_layers(plan, model)
    if not names and not diagnostics:
        message = f"got {section.linear!r}, but all Linear layers are left out"
        return [Diagnostic("precision.linear", message, "leave [precision] out, or make precision.exclude less")]
    multiple = _MULTIPLE[section.linear]
    wrong: dict[str, tuple[int, int]] = {}
    for name in names:
        each = model.modules[name]
        assert each.out_features is not None and each.in_features is not None
        if each.out_features % multiple or each.in_features % multiple:
            wrong[name] = (each.out_features, each.in_features)
    diagnostics += _odd(wrong, plan, model, "")
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
    if plan.precision.linear is None or plan.mesh.tp == 1:
        return []
    multiple, wrong = _MULTIPLE[plan.precision.linear], {}
    for name in low_precision_layers(plan, model):
        each, style = model.modules[name], styles.get(name, "")
        size = each.in_features if "rowwise" in style else each.out_features if "colwise" in style else None
        whole = (each.out_features or 0) % multiple == (each.in_features or 0) % multiple == 0
        if size is not None and whole and size % (multiple * plan.mesh.tp):
            wrong[name] = (each.out_features, each.in_features)
    return _odd(wrong, plan, model, f" over tp = {plan.mesh.tp} ranks")


def _odd(
    wrong: Mapping[str, tuple[int | None, int | None]], plan: ParallelPlan, model: ModelOutline, over: str
) -> list[Diagnostic]:
    linear = plan.precision.linear
    assert linear is not None
    by_shape: dict[tuple[int | None, int | None], list[str]] = {}
    for name, shape in wrong.items():
        by_shape.setdefault(shape, []).append(name)
    found = []
    for shape, names in by_shape.items():
        patterns = generalise(names)
        message = (
            f"{', '.join(patterns)} of shape {list(shape)}{over} can't be multiplied in {linear}, whose dims are"
            f" multiples of {_MULTIPLE[linear]}"
        )
        found.append(Diagnostic("precision.exclude", message, _adding(patterns, plan, model)))
    return found


def low_precision_layers(plan: ParallelPlan, model: ModelOutline) -> list[str]:
    """List the names of the layers that multiply in eight bits, in the order of the model."""
    if plan.precision.linear is None:
        return []
    patterns = plan.precision.exclude
    if patterns is None:
        usual = _usual(model)
        return [name for name in _linear(model) if name not in usual]
    return [name for name in _linear(model) if not matches_inside(patterns, name)]


def _adding(patterns: list[str], plan: ParallelPlan, model: ModelOutline) -> str:
    """Say what to add to `exclude`: what is left out by default, too, as a list replaces that."""
    usual = generalise(_usual(model)) if plan.precision.exclude is None else []
    rest = [pattern for pattern in usual if pattern not in patterns]
    beside = f" and, since a list replaces the default, {', '.join(map(repr, rest))}" if rest else ""
    return f"add {', '.join(map(repr, patterns))}{beside}"


def precision_notes(plan: ParallelPlan, model: ModelOutline) -> list[str]:
    """Name the Linear layers that stay in the dtype of the model, where others multiply in eight bits."""
    chosen = set(low_precision_layers(plan, model))
    if not chosen:
        return []
    alike: dict[str, list[str]] = {}
    for name, each in model.modules.items():
        if each.kind == "linear" and name:
            alike.setdefault(generalise([name])[0], []).append(name)
    left_out = []
    for pattern, names in alike.items():
        staying = [name for name in names if name not in chosen]
        left_out += [pattern] if staying == names else staying
    return [f"[precision] leaves these layers in the model's own dtype: {', '.join(left_out)}"] if left_out else []


def _linear(model: ModelOutline) -> list[str]:
    experts = tuple(f"{name}." for name, each in model.modules.items() if each.experts is not None)
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
