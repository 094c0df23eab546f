"""Checks of a plan's styles against the kinds and shapes of its model's modules."""

from __future__ import annotations

from collections.abc import Iterable

from hp_plan.features.experts import EXPERT_STYLES
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, near_misses
from hp_plan.structure.outline import ModelOutline, ModuleOutline, generalise, matches_nothing, matching
from hp_plan.structure.style_tables import StyleChoice, packed_experts
from hp_styles.extend import ALIASES, STYLES

_WRITTEN = {"linear": "a Linear", "embedding": "an Embedding"}


def check_styles(plan: ParallelPlan, choice: StyleChoice, model: ModelOutline) -> list[Diagnostic]:
    """Check that each style is one, names something that it is for, and leaves whole heads and tied tensors alike.

    Args:
        plan: the plan, with `tp`, experts or styles of its own.
        choice: the styles.
        model: the model.
    """
    return [*_check_patterns(choice, model), *_check_heads(plan, choice, model), *_check_tied(choice, model)]


def _check_patterns(choice: StyleChoice, model: ModelOutline) -> list[Diagnostic]:
    diagnostics = []
    names, table = model.names, choice.table
    for pattern, style in table.items():
        key = f'styles."{pattern}"'
        matched = matching(pattern, names)
        parameters = [] if matched else matching(pattern, model.parameters)
        known = style in STYLES or style in EXPERT_STYLES
        if not known:
            names_of_styles = [*STYLES, *EXPERT_STYLES, *ALIASES]
            diagnostics.append(Diagnostic(key, f"there is no style '{style}'", near_misses(style, names_of_styles)))
        elif not matched and (not parameters or not STYLES[style].parameters):
            diagnostics.append(_nothing_matches(key, pattern, style, names, parameters))
        for shown, modules in _by_kind(matched if known else [], model):
            problem = _unsuited(style, modules[0])
            if problem:
                diagnostics.append(Diagnostic(key, f"'{style}' on {shown}, which is a {modules[0].type_name}", problem))
    for pattern, style in packed_experts(table, model).items():
        message = f"'{table[pattern]}' on a matrix that holds a gate's features and then those of up"
        diagnostics.append(Diagnostic(f'styles."{pattern}"', message, f"write '{style}', which shards each of the two"))
    doubled: dict[tuple[str, ...], list[str]] = {}
    for name, patterns in choice.matches.items():
        if len(patterns) > 1:
            doubled.setdefault(tuple(patterns), []).append(name)
    for patterns, modules in doubled.items():
        which = " and ".join(f"'{pattern}' = '{table[pattern]}'" for pattern in patterns)
        message = f"{len(patterns)} styles on {_some(modules)}: {which}"
        diagnostics.append(
            Diagnostic(f'styles."{patterns[-1]}"', message, "make the patterns exclude each other, or remove one")
        )
    return diagnostics


def _nothing_matches(key: str, pattern: str, style: str, names: list[str], parameters: Iterable[str]) -> Diagnostic:
    if parameters:
        suited = ", ".join(name for name, each in STYLES.items() if each.parameters)
        fix = f"leave the last part off, or take a style for parameters: {suited}"
        return Diagnostic(key, f"'{pattern}' matches a parameter, but '{style}' is for a module", fix)
    return matches_nothing(key, pattern, names)


def _by_kind(names: Iterable[str], model: ModelOutline) -> list[tuple[str, list[ModuleOutline]]]:
    """Group modules by class, each with a name to show: a pattern wrong for one layer is wrong for all alike."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name in names:
        module = model.modules[name]
        kinds.setdefault((module.type_name, module.kind), []).append(name)
    return [(_some(named), [model.modules[name] for name in named]) for named in kinds.values()]


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _unsuited(name: str, module: ModuleOutline) -> str | None:
    """Say what to do about a style that is not for such a module; None if it is."""
    style = STYLES.get(name)
    if style is None:
        return None  # of experts
    if not style.on_modules:
        return "it is for a parameter: name it, as in 'mlp.experts.gate_up_proj'"
    kind = "linear" if module.is_linear else module.kind
    if not style.accepts or kind in style.accepts:
        return None
    if kind in _WRITTEN:
        return f"use '{style.counterpart}' for {_WRITTEN[kind]}"
    return f"it is for {_WRITTEN[style.accepts[0]]}"


def _check_heads(plan: ParallelPlan, choice: StyleChoice, model: ModelOutline) -> list[Diagnostic]:
    """Attention splits the features of q, k and v into heads: ranks must hold whole ones."""
    diagnostics: dict[str, Diagnostic] = {}
    tp = plan.mesh.tp
    for name, style in choice.by_name.items():
        if name not in model.modules:
            continue  # A parameter.
        module, size = model.modules[name], model.modules[name.rpartition(".")[0]].head_dim
        if style != "colwise" or module.out_features is None or size is None:
            continue
        heads = module.out_features // size
        if heads % tp:
            shown = generalise([name])[0]
            divisors = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
            message = f"{shown} has {heads} heads of size {size}, which tp = {tp} does not divide"
            fix = f"make mesh.tp one of {divisors}, or the number of heads a multiple of {tp}"
            diagnostics.setdefault(shown, Diagnostic("mesh.tp", message, fix))
    return list(diagnostics.values())


def _check_tied(choice: StyleChoice, model: ModelOutline) -> list[Diagnostic]:
    diagnostics = []
    styled = choice.by_name
    for names in model.tied:
        modules = [name.rpartition(".")[0] for name in names]
        # One without a style that only holds the parameter takes it as it becomes.
        modules = [module for module in modules if module in styled or model.modules[module].kind != "other"]
        if len({repr(STYLES[styled.get(module, "replicate")].weight) for module in modules}) > 1:
            message = f"{' and '.join(names)} are one tensor with " + " and ".join(
                f"'{styled.get(module, 'replicate')}'" for module in modules
            )
            fix = "give them styles that shard the same dim, such as 'embedding_rowwise' and 'colwise_gather_output'"
            diagnostics.append(Diagnostic(f'styles."{modules[0]}"', message, fix))
    return diagnostics
