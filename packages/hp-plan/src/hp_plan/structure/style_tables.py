"""Styles of a model's modules: `styles = "auto"` looked up or derived, and patterns resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hp_plan.features.adapters import base_name
from hp_plan.features.experts import DISPATCHED, EXPERT_STYLES, expert_table, with_experts
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.structure.inferred_styles import derived_table
from hp_plan.structure.outline import ModelOutline, generalise, matching
from hp_styles.extend import canonical, sequence_parallel_plan

_BLOCK = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
_HEADS_NORMALISED = {
    "model.layers.*.self_attn.q_norm": "replicate",
    "model.layers.*.self_attn.k_norm": "replicate",
}
_ENDS = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}

# By transformers' `config.model_type`.
TABLES: dict[str, dict[str, str]] = {
    "llama": {**_ENDS, **_BLOCK},
    "mistral": {**_ENDS, **_BLOCK},
    "qwen3": {**_ENDS, **_BLOCK, **_HEADS_NORMALISED},
}

# What sits on the residual stream between the blocks' matrices, relative to the base model.
_SEQUENCE_NORMS = ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm")
SEQUENCE_FAMILIES = ("llama", "mistral", "qwen3")


def with_sequence(table: Mapping[str, str], *, base: str) -> dict[str, str]:
    """Add sequence parallelism between the blocks to a tensor parallel table.

    Args:
        table: pattern -> style.
        base: name of the base model inside the model (`model`), empty when it is the model.
    """
    prefix = f"{base}." if base else ""
    norms = [f"{prefix}{norm}" for norm in _SEQUENCE_NORMS]
    others = {pattern: style for pattern, style in table.items() if pattern not in norms}
    return sequence_parallel_plan(others, norms=norms, embedding=f"{prefix}embed_tokens")


def scattered(table: Mapping[str, str], model: ModelOutline) -> dict[str, str]:
    """Scatter the sums of a tensor parallel table along the sequence, where tokens are embedded and processed.

    Norms need no style: they run on what they are given, and what reads one takes the full sequence.

    Args:
        table: pattern -> style.
        model: its token embedding, and those tied with it, tell which parts process tokens.
    """
    shared = {model.embedding}
    for names in model.tied:
        modules = [name.rpartition(".")[0] for name in names]
        if model.embedding in modules:
            shared.update(module for module in modules if model.modules[module].kind == "embedding")
    inside = tuple({name.rpartition(".")[0] for name in shared if name})
    tokens = {
        pattern: style
        for pattern, style in table.items()
        if pattern.startswith(inside) and matching(pattern, model.names)
    }
    return {**table, **sequence_parallel_plan(tokens, norms=())}


@dataclass(frozen=True)
class StyleChoice:
    """Styles that a plan gives a model, and their origin.

    Attributes:
        table: pattern -> style.
        matches: name of a module or parameter -> the patterns that match it, in the order of the model.
        origin: `"plan"`, `"model"` (its own table) or `"structure"` (derived); `"model and structure"` where parts that
            the model's own table leaves out have styles by their structure.
        whole: patterns of the linear layers and embeddings that are replicated.
    """

    table: Mapping[str, str]
    matches: Mapping[str, list[str]]
    origin: str
    whole: tuple[str, ...]

    @property
    def by_name(self) -> dict[str, str]:
        """Name of a module or parameter -> its style."""
        return {name: self.table[patterns[0]] for name, patterns in self.matches.items()}


def style_notes(plan: ParallelPlan, model: ModelOutline) -> list[str]:
    """Describe the styles derived from a model's structure where it has no table, and the layers left replicated."""
    if plan.mesh.tp == 1 or not isinstance(plan.styles, str):
        return []
    try:
        choice = choose_styles(plan, model)
    except PlanError:
        return []  # `check_model` reports it.
    if "structure" not in choice.origin:
        return []
    shown = ", ".join(f"{pattern} = {style}" for pattern, style in choice.table.items())
    notes = [f"styles = {plan.styles!r} come from the {choice.origin}: {shown}"]
    if choice.whole:
        notes.append(f"replicated on all {plan.mesh.tp} tensor parallel ranks: {', '.join(choice.whole)}")
    return notes


def choose_styles(plan: ParallelPlan, model: ModelOutline) -> StyleChoice:
    """Choose the styles of a plan for a model, with `"auto"` and `"auto-sequence"` looked up.

    Raises:
        PlanError: there is no table for the model, and none can be derived.
    """
    if isinstance(plan.styles, Mapping):
        table, origin = _written_table(plan, model), "plan"
    else:
        table, origin = _automatic_table(plan, model)
    matches = resolve(table, model)
    regions = tuple(f"{name}." for name, patterns in matches.items() if table[patterns[0]] == "plain")
    whole = [
        name
        for name, module in model.modules.items()
        if (module.is_linear or module.kind == "embedding") and (name not in matches or name.startswith(regions))
    ]
    return StyleChoice(table, matches, origin, tuple(generalise(whole)))


def _written_table(plan: ParallelPlan, model: ModelOutline) -> dict[str, str]:
    """Return the styles that the plan writes down, under their names here."""
    assert isinstance(plan.styles, Mapping)
    styles = _inside_adapters(plan.styles, model)
    if plan.mesh.ep == 1:
        return {pattern: canonical(style) for pattern, style in styles.items()}
    own = {pattern: "expert_parallel" if style == DISPATCHED else style for pattern, style in styles.items()}
    experts = {pattern: style for pattern, style in own.items() if style in EXPERT_STYLES}
    # As transformers writes it, beside the style of their module.
    grouped = {pattern: style for pattern, style in own.items() if style == "grouped_gemm"}
    marked = grouped.keys() - with_experts(grouped, experts, model).keys()
    return {pattern: canonical(style) for pattern, style in own.items() if pattern not in marked}


def _automatic_table(plan: ParallelPlan, model: ModelOutline) -> tuple[dict[str, str], str]:
    family = str(getattr(model.config, "model_type", None))
    experts = expert_table(plan, model) if plan.mesh.ep > 1 else {}
    if plan.mesh.tp == 1 and experts:
        return experts, "model"
    own = _own_table(model) or TABLES.get(family) or {}
    own = {**own, **packed_experts(own, model)}  # a table may forget that gate and up are in one
    own = with_experts({pattern: canonical(style) for pattern, style in own.items()}, experts, model)
    own = _with_tied_embedding(own, model)
    everything = [*model.names, *model.parameters]
    styled = [name for name in everything if any(matching(pattern, [name]) for pattern in own)]
    more = derived_table(model, plan.mesh.tp, styled=styled)
    if not any(style != "plain" for style in (*own.values(), *more.values())):
        name = f"{model.type_name} (model_type {getattr(model.config, 'model_type', None)!r})"
        message = f"there is no tensor parallel table for {name}, and none can be derived from its structure"
        fix = "write [styles] with one pattern = style per line, or give the model such a table as `tp_plan`"
        raise PlanError([Diagnostic("styles", message, fix)])
    table = _with_tied_embedding({**own, **more}, model)
    if plan.styles == "auto-sequence":
        table = with_sequence(table, base=model.base) if family in SEQUENCE_FAMILIES else scattered(table, model)
    origin = " and ".join(name for name, part in (("model", own), ("structure", more)) if part)
    return table, origin


def resolve(table: Mapping[str, str], model: ModelOutline) -> dict[str, list[str]]:
    """Map each module or parameter to the patterns of `table` that match it, in the order of the model.

    A pattern that matches a module is for modules alone.
    """
    resolved: dict[str, list[str]] = {}
    for pattern in table:
        for name in matching(pattern, model.names) or matching(pattern, model.parameters):
            resolved.setdefault(name, []).append(pattern)
    return {name: resolved[name] for name in (*model.names, *model.parameters) if name in resolved}


def packed_experts(table: Mapping[str, str], model: ModelOutline) -> dict[str, str]:
    """Find what a table shards as one matrix though it holds the gate's features and then those of up.

    A rank's part of experts runs by itself, and takes the first half of its features for the gate.

    Returns:
        pattern -> the style that shards each of the two.
    """
    found = {}
    for pattern, style in table.items():
        for name in matching(pattern, model.parameters) if style in ("colwise", "rowwise") else ():
            module, _, key = name.rpartition(".")
            outline = model.modules.get(module)
            layout = None if outline is None else outline.experts
            if layout is None or not layout.gated or layout.interleaved or key != "gate_up_proj":
                continue
            if style == ("rowwise" if layout.transposed else "colwise"):
                found[pattern] = f"packed_{style}"
    return found


def _inside_adapters(table: Mapping[str, str], model: ModelOutline) -> dict[str, str]:
    """Name the parameters of experts as they are called inside of adapters."""
    experts = [name for name in model.parameters if model.modules[name.rpartition(".")[0]].experts is not None]
    inside = {base_name(name): name for name in experts if base_name(name) != name}
    named: dict[str, str] = {}
    for pattern, style in table.items():
        found = [inside[name] for name in matching(pattern, inside)]
        named.update(dict.fromkeys(found or [pattern], style))
    return named


def _own_table(model: ModelOutline) -> dict[str, str]:
    inside = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = f"{model.base}." if model.base else ""
    own = {**{f"{prefix}{pattern}": style for pattern, style in inside.items()}, **model.own_table}
    own = _inside_adapters(own, model)
    # One table serves several models of a family: leave out what this one lacks.
    names = [*model.modules, *model.parameters]
    return {pattern: style for pattern, style in own.items() if matching(pattern, names)}


def _with_tied_embedding(table: dict[str, str], model: ModelOutline) -> dict[str, str]:
    """Shard the embeddings that share their weight with a sharded head or embedding."""
    added = dict(table)
    styled = resolve(table, model)
    for names in model.tied:
        modules = [name.rpartition(".")[0] for name in names]
        sharded = ("colwise", "embedding_rowwise")
        if not any(table[styled[module][0]].startswith(sharded) for module in modules if module in styled):
            continue
        for module in modules:
            if module not in styled and model.modules[module].kind == "embedding":
                added[module] = "embedding_rowwise"
            elif module not in styled and model.modules[module].kind == "linear":
                added[module] = "colwise_gather_output"
    return added
