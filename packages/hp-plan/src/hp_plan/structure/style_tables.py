"""Styles of a model's modules: `styles = "auto"` looked up or derived, and patterns resolved.

Note [What a derived table may claim]
Activations are DTensors, so no table can make a result wrong: an operation on a layout that doesn't suit it moves the
data first. A table decides how much is sharded and how little moves. So a part gets styles only where its names say
which layer feeds which and its shapes agree, and stays whole on every rank otherwise. Parts with parameters that are
neither a matrix product's, an embedding's nor a norm's (state spaces, convolutions, routers) run on plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hp_plan.features.adapters import base_name
from hp_plan.features.experts import DISPATCHED, EXPERT_STYLES, expert_table, with_experts
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.structure.outline import ModelOutline, ModuleOutline, generalise, matching
from hp_styles.extend import canonical, sequence_parallel_plan

_QUERY_KEY_VALUE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
)
_FUSED = ("c_attn", "query_key_value", "qkv_proj", "qkv", "Wqkv")
_ATTENTION_OUTPUTS = ("o_proj", "out_proj", "o", "dense", "out_lin", "c_proj", "proj", "Wo")
_MLP = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("w1", "w3"), "w2"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("lin1",), "lin2"),
    (("linear_fc1",), "linear_fc2"),
    (("intermediate.dense",), "output.dense"),
)

# Activations that are an autograd function of their own, which no operation of a DTensor is.
_ELEMENT_BY_ELEMENT = ("BloomGelu",)


def derived_table(model: ModelOutline, tp: int, *, styled: Iterable[str] = ()) -> dict[str, str]:
    """Derive pattern -> style for all parts outside of `styled`.

    Args:
        model: names, kinds and shapes.
        tp: number of tensor parallel ranks.
        styled: modules and parameters that have a style already, and whose neighbours are left alone.
    """
    reading = _Reading(model, tp, set(styled))
    for name, module in model.modules.items():
        if module.is_linear or module.kind == "embedding":
            continue
        reading.attention(name, module)
        reading.mlp(name)
        reading.experts(name, module)
        if module.type_name in _ELEMENT_BY_ELEMENT:
            reading.styles[name] = "pointwise"
    reading.ends()
    reading.plain_parts()
    return _as_patterns(reading.styles, model)


class _Reading:
    """The styles of one model, module by module."""

    def __init__(self, model: ModelOutline, tp: int, styled: set[str]) -> None:
        self._model, self._tp, self._before = model, tp, styled
        self.styles: dict[str, str] = {}
        self._children: dict[str, dict[str, str]] = {}
        for name in model.names:
            parent, _, own = name.rpartition(".")
            self._children.setdefault(parent, {})[own] = name

    def _linear(self, owner: str, path: str) -> str | None:
        """Return the full name of a linear layer inside a module; None if it is not one or already has a style."""
        name = f"{owner}.{path}" if owner else path
        module = self._model.modules.get(name)
        free = name not in self.styles and name not in self._before
        return name if module is not None and module.is_linear and free else None

    def _sides(self, name: str) -> tuple[int | None, int | None]:
        module = self._model.modules[name]
        return module.in_features, module.out_features

    def attention(self, owner: str, module: ModuleOutline) -> None:
        """Shard attention: its heads if they are separate and divide over the ranks, else its matrices alone."""
        output = self._attention_output(owner)
        if output is None:
            return
        for names in _QUERY_KEY_VALUE:
            parts = [self._linear(owner, name) for name in names]
            if None not in parts:
                self._heads([part for part in parts if part], output, module.head_dim)
                return
        for name in _FUSED:
            fused = self._linear(owner, name)
            if fused is not None:
                self._fused(fused, output, module.head_dim)
                return

    def _attention_output(self, owner: str) -> str | None:
        for name in _ATTENTION_OUTPUTS:
            output = self._linear(owner, name)
            if output is not None:
                return output
        parent, _, own = owner.rpartition(".")
        return self._linear(parent, "output.dense") if own == "self" else None  # bert's

    def _heads(self, parts: list[str], output: str, head_dim: int | None) -> None:
        query, value = self._sides(parts[0])[1], self._sides(parts[2])[1]
        incoming = self._sides(output)[0]
        if incoming != query or query is None or value is None or head_dim is None or query % head_dim:
            return
        if query // head_dim % self._tp:
            self.styles.update(dict.fromkeys(parts, "colwise_gather_output"))
            self.styles[output] = "rowwise_split_input"
            return
        # Keys and values of fewer heads than ranks stay whole: they are small.
        divided = [part for part in parts if (self._sides(part)[1] or 0) % (head_dim * self._tp) == 0]
        self.styles.update(dict.fromkeys(divided, "colwise"))
        self.styles[output] = "rowwise"

    def _fused(self, fused: str, output: str, head_dim: int | None) -> None:
        """Shard a fused projection. Code splits its output into q, k and v: gather it, unless head follows head."""
        width, incoming = self._sides(fused)[1], self._sides(output)[0]
        if width is None or incoming is None or width < incoming:
            return
        by_head = fused.endswith("query_key_value") and width == 3 * incoming and head_dim is not None
        if by_head and incoming % (head_dim or 1) == 0 and incoming // (head_dim or 1) % self._tp == 0:
            self.styles.update({fused: "colwise", output: "rowwise"})
        else:
            self.styles.update({fused: "colwise_gather_output", output: "rowwise_split_input"})

    def mlp(self, owner: str) -> None:
        """Shard the inner features of an MLP."""
        for before, after in _MLP:
            ups, down = [self._linear(owner, name) for name in before], self._linear(owner, after)
            if down is None or None in ups:
                continue
            sides = {self._sides(up) for up in ups if up}
            if len(sides) == 1 and next(iter(sides))[1] == self._sides(down)[0]:
                self.styles.update({up: "colwise" for up in ups if up})
                self.styles[down] = "rowwise"
            return

    def experts(self, name: str, module: ModuleOutline) -> None:
        """Shard the inner features of all experts."""
        layout, called = module.experts, base_name(name)
        own = {called, *(f"{name}.{key}" for key in module.shapes)}
        if layout is None or own & self._before:
            return
        up = "gate_up_proj" if layout.gated else "up_proj"
        if not {up, "down_proj"} <= module.shapes.keys():
            return
        if not {f"{name}.{up}", f"{name}.down_proj"} <= {*self._model.parameters}:
            return  # they are inside of an adapter, whose styles are those of the module there
        inner = -2 if layout.transposed else -1  # of down_proj
        if module.shapes["down_proj"][inner] % self._tp:
            return
        packed = "packed_" if layout.gated and not layout.interleaved else ""
        wide, narrow = ("rowwise", "colwise") if layout.transposed else ("colwise", "rowwise")
        self.styles[f"{name}.{up}"] = packed + wide
        self.styles[f"{name}.down_proj"] = narrow
        if f"{up}_bias" in module.shapes:
            self.styles[f"{name}.{up}_bias"] = f"{packed}rowwise"  # [experts, out]
        self.styles[called] = "moe_tp_experts"

    def ends(self) -> None:
        """Shard the vocabulary of the token embedding and of the head."""
        embedding, head = self._model.embedding, self._model.head
        if embedding and self._model.modules[embedding].kind == "embedding":
            self.styles[embedding] = "embedding_rowwise"
        if head and self._model.modules[head].kind == "linear":
            self.styles[head] = "colwise_gather_output"
        for name in (embedding, head):
            if name in self._before:
                self.styles.pop(name, None)

    def plain_parts(self) -> None:
        """Run the largest unstyled parts around parameters of unknown kinds on plain tensors."""
        styled = {*self.styles, *self._before}
        holding = {"", *(name[:at] for name in styled for at, letter in enumerate(name) if letter == "."), *styled}
        for name, module in self._model.modules.items():
            unknown = module.own_forward or (module.kind == "other" and module.shapes and not module.is_norm)
            if not unknown or {name, base_name(name)} & holding:
                continue
            top = name
            while (parent := top.rpartition(".")[0]) not in holding and not self._is_container(parent):
                top = parent
            self.styles[top] = "plain"
            holding.update(other for other in self._model.names if other == top or other.startswith(f"{top}."))

    def _is_container(self, name: str) -> bool:
        return self._model.modules[name].kind == "container"


def _as_patterns(styles: Mapping[str, str], model: ModelOutline) -> dict[str, str]:
    """Replace numbers in names by `*` where all modules that the pattern matches have one style."""
    everything = [*model.names, *model.parameters]
    styles_of: dict[str, set[str]] = {}
    for name in everything:
        styles_of.setdefault(generalise([name])[0], set()).add(styles.get(name, ""))
    table: dict[str, str] = {}
    for name, style in styles.items():
        pattern = generalise([name])[0]
        table[pattern if styles_of[pattern] == {style} else name] = style
    return table


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
