"""Which style each module of a model gets: `styles = "auto"` looked up, patterns resolved."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hp_plan.findings import Finding, PlanError
from hp_plan.patterns import matching
from hp_plan.plan import ParallelPlan
from hp_plan.style_names import SEQUENCE_FAMILIES, TABLES, canonical, with_sequence


def style_table(plan: ParallelPlan, model: nn.Module) -> dict[str, str]:
    """Pattern -> style of the plan for this model, `"auto"` and `"auto-sequence"` looked up.

    Taken from the model's own `base_model_tp_plan` where transformers has one, else from the built-in tables.

    Raises:
        PlanError: there is no table for the model.
    """
    if isinstance(plan.styles, Mapping):
        return {pattern: canonical(style) for pattern, style in plan.styles.items()}
    base = _base_name(model)
    family = getattr(getattr(model, "config", None), "model_type", None)
    table = _own_table(model, base) or TABLES.get(str(family))
    if table is None:
        message = f"there is no tensor parallel table for {type(model).__name__} (model_type {family!r})"
        fix = f"write [styles] with one pattern = style a line; built in are {', '.join(TABLES)}"
        raise PlanError([Finding("styles", message, fix)])
    if plan.styles == "auto-sequence":
        if family not in SEQUENCE_FAMILIES:
            message = f"'auto-sequence' knows {', '.join(SEQUENCE_FAMILIES)}, not model_type {family!r}"
            fix = "write [styles] with 'sequence_gather_output' for the norms and '..._scatter_output' before them"
            raise PlanError([Finding("styles", message, fix)])
        table = with_sequence(table, base=base)
    table = {pattern: canonical(style) for pattern, style in table.items()}
    return _with_tied_embedding(table, model)


def resolve(table: Mapping[str, str], model: nn.Module) -> dict[str, list[str]]:
    """Module name -> the patterns of `table` that match it, in the order of the model."""
    names = [name for name, _ in model.named_modules() if name]
    resolved: dict[str, list[str]] = {}
    for pattern in table:
        for name in matching(pattern, names):
            resolved.setdefault(name, []).append(pattern)
    return {name: resolved[name] for name in names if name in resolved}


def tied_names(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one tensor, each list in the order of the model."""
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return [names for names in by_tensor.values() if len(names) > 1]


def _base_name(model: nn.Module) -> str:
    prefix = getattr(model, "base_model_prefix", "")
    return prefix if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""


def _own_table(model: nn.Module, base: str) -> dict[str, str] | None:
    inside = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not inside:
        return None
    prefix = f"{base}." if base else ""
    head = getattr(model, "_tp_plan", None) or {}
    own = {**{f"{prefix}{pattern}": style for pattern, style in inside.items()}, **head}
    # One table serves several models of a family: what this one doesn't have is no fault.
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    return {pattern: style for pattern, style in own.items() if matching(pattern, names)}


def _with_tied_embedding(table: dict[str, str], model: nn.Module) -> dict[str, str]:
    """An embedding that shares its weight with a sharded head is sharded with it."""
    added = dict(table)
    styled = resolve(table, model)
    for names in tied_names(model):
        modules = [name.rpartition(".")[0] for name in names]
        if any(table[styled[module][0]].startswith("colwise") for module in modules if module in styled):
            added.update(
                {
                    module: "embedding_rowwise"
                    for module in modules
                    if module not in styled and isinstance(model.get_submodule(module), nn.Embedding)
                }
            )
    return added
