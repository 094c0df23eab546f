"""A tensor parallel table read off a model's structure, where the model has none of its own.

Note [What a derived table may claim]
Activations are DTensors, so no table can make a result wrong: an operation on a layout that doesn't suit it moves the
data first. A table decides how much is sharded and how little moves. So a part gets styles only where its names say
which layer feeds which and its shapes agree, and stays whole on every rank otherwise. Parts with parameters that are
neither a matrix product's, an embedding's nor a norm's (state spaces, convolutions, routers) run on plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hp_plan.features.adapters import base_name
from hp_plan.structure.outline import ModelOutline, ModuleOutline, generalise

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
