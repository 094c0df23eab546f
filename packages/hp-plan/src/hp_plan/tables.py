"""Which style each module of a model gets: `styles = "auto"` looked up, patterns resolved."""

from __future__ import annotations

from collections.abc import Mapping

from hp_plan.findings import Finding, PlanError
from hp_plan.outline import ModelOutline
from hp_plan.patterns import matching
from hp_plan.plan import ParallelPlan
from hp_plan.style_names import SEQUENCE_FAMILIES, TABLES, with_sequence
from hp_styles.names import canonical


def style_table(plan: ParallelPlan, model: ModelOutline) -> dict[str, str]:
    """Pattern -> style of the plan for this model, `"auto"` and `"auto-sequence"` looked up.

    Taken from the model's own `base_model_tp_plan` where it has one, as those of transformers do, else from the
    built-in tables.

    Raises:
        PlanError: there is no table for the model.
    """
    if isinstance(plan.styles, Mapping):
        return {pattern: canonical(style) for pattern, style in plan.styles.items()}
    family = getattr(model.config, "model_type", None)
    table = _own_table(model) or TABLES.get(str(family))
    if table is None:
        message = f"there is no tensor parallel table for {model.type_name} (model_type {family!r})"
        fix = f"write [styles] with one pattern = style a line; built in are {', '.join(TABLES)}"
        raise PlanError([Finding("styles", message, fix)])
    if plan.styles == "auto-sequence":
        if family not in SEQUENCE_FAMILIES:
            message = f"'auto-sequence' knows {', '.join(SEQUENCE_FAMILIES)}, not model_type {family!r}"
            fix = "write [styles] with 'sequence_gather_output' for the norms and '..._scatter_output' before them"
            raise PlanError([Finding("styles", message, fix)])
        table = with_sequence(table, base=model.base)
    table = {pattern: canonical(style) for pattern, style in table.items()}
    return _with_tied_embedding(table, model)


def resolve(table: Mapping[str, str], model: ModelOutline) -> dict[str, list[str]]:
    """Module name -> the patterns of `table` that match it, in the order of the model."""
    resolved: dict[str, list[str]] = {}
    for pattern in table:
        for name in matching(pattern, model.names):
            resolved.setdefault(name, []).append(pattern)
    return {name: resolved[name] for name in model.names if name in resolved}


def _own_table(model: ModelOutline) -> dict[str, str] | None:
    inside = getattr(model.config, "base_model_tp_plan", None)
    if not inside:
        return None
    prefix = f"{model.base}." if model.base else ""
    own = {**{f"{prefix}{pattern}": style for pattern, style in inside.items()}, **model.head_table}
    # One table serves several models of a family: what this one doesn't have is no fault.
    names = [*model.modules, *model.parameters]
    return {pattern: style for pattern, style in own.items() if matching(pattern, names)}


def _with_tied_embedding(table: dict[str, str], model: ModelOutline) -> dict[str, str]:
    """An embedding that shares its weight with a sharded head is sharded with it."""
    added = dict(table)
    styled = resolve(table, model)
    for names in model.tied:
        modules = [name.rpartition(".")[0] for name in names]
        if any(table[styled[module][0]].startswith("colwise") for module in modules if module in styled):
            added.update(
                {
                    module: "embedding_rowwise"
                    for module in modules
                    if module not in styled and model.modules[module].kind == "embedding"
                }
            )
    return added
