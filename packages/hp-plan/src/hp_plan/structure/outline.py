"""Outline of a model: its names, kinds and shapes, without the model itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hp_dtensor.extend import matches
from hp_plan.reading.diagnostics import Diagnostic, PlanError, near_misses

__all__ = [
    "ExpertsOutline",
    "ModelOutline",
    "ModuleOutline",
    "declared_table",
    "generalise",
    "matches",
    "matching",
    "named_by",
]


@dataclass(frozen=True)
class ExpertsOutline:
    """Layout of the weights of a module of experts, as transformers' experts describe it.

    Attributes:
        count: number of experts.
        features: of an expert between its two products.
        transposed: a weight is `[experts, in, out]`, else `[experts, out, in]`.
        interleaved: gate and up alternate in `gate_up_proj`, else one follows the other.
        gated: there is a gate.
        normed: results pass a norm with parameters of its own.
    """

    count: int = 0
    features: int = 0
    transposed: bool = False
    interleaved: bool = False
    gated: bool = True
    normed: bool = False


@dataclass(frozen=True)
class ModuleOutline:
    """One module of a model.

    Attributes:
        type_name: its class.
        kind: the kind for styles; a container holds modules and is never called, a transposed one is a linear layer
            whose weight is `[in, out]`.
        out_features: of a linear layer.
        head_dim: its attribute of that name, or of a like one, where it is a number: of an attention.
        in_features: of a linear layer.
        shapes: of the parameters that it holds itself.
        experts: layout of its experts; None if it has none.
        own_forward: a linear layer whose class computes something of its own.
        attention: it calls attention and takes a mask, as those of transformers.
        convolution: a convolution, which mixes neighbours.
    """

    type_name: str
    kind: Literal["linear", "transposed", "embedding", "container", "other"] = "other"
    out_features: int | None = None
    head_dim: int | None = None
    in_features: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    experts: ExpertsOutline | None = None
    own_forward: bool = False
    attention: bool = False
    convolution: bool = False

    @property
    def is_linear(self) -> bool:
        """True for a matrix product with features in the last dim."""
        return self.kind in ("linear", "transposed")

    @property
    def is_norm(self) -> bool:
        """True if the class's name says so."""
        return "norm" in self.type_name.lower()


@dataclass(frozen=True)
class ModelOutline:
    """A model by its names, kinds and shapes.

    Attributes:
        modules: name -> outline, in the order of the model, which itself is `""`.
        parameters: their names, each tensor once.
        elements: their total number of elements.
        trained: number of elements that get gradients.
        tied: names of parameters that are one tensor, each group in the order of the model.
        base: name of the base model inside the model (`model`), empty where it is the model.
        config: the model's configuration, None where it has none.
        own_table: the tensor parallel styles that the model itself declares, parts' own among them: `declared_table`.
        own_expert_table: the expert parallel styles that it declares.
        embedding: name of the token embedding, which `get_input_embeddings()` returns; empty without that method.
        head: name of the layer that predicts tokens, which `get_output_embeddings()` returns; empty without it.
        balances: it can add a load balancing loss that `hp_moe.global_auxiliary_loss` knows.
        counts_tokens: its loss is a function that can be given shifted labels and the number of tokens, as those of
            transformers' causal language models.
    """

    modules: Mapping[str, ModuleOutline]
    parameters: tuple[str, ...] = ()
    elements: int = 0
    trained: int = 0
    tied: tuple[tuple[str, ...], ...] = ()
    base: str = ""
    config: Any = None
    own_table: Mapping[str, str] = field(default_factory=dict)
    own_expert_table: Mapping[str, str] = field(default_factory=dict)
    embedding: str = ""
    head: str = ""
    counts_tokens: bool = False
    balances: bool = False

    @property
    def type_name(self) -> str:
        """Name of the model's class."""
        return self.modules[""].type_name

    @property
    def names(self) -> list[str]:
        """Names of the modules inside."""
        return [name for name in self.modules if name]


def positions(config: Any) -> int | None:
    """Return how many tokens of a sequence a model of a configuration knows the places of; None if it does not say."""
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def declared_table(model: Any, key: str, names: Iterable[str]) -> Mapping[str, str]:
    """Return the styles that a model declares as an attribute, such as `tp_plan`, from pattern to style.

    What a model of transformers has under `_tp_plan` serves several models of a family: what matches no name is left
    out.

    Args:
        model: the model.
        key: `tp_plan` or `ep_plan`.
        names: of its modules and parameters.

    Raises:
        PlanError: the attribute is not a table, or one of its patterns matches no name.
    """
    names = list(names)
    if hasattr(model, f"_{key}"):
        return {each: style for each, style in (getattr(model, f"_{key}") or {}).items() if matching(each, names)}
    own = getattr(model, key, None) or {}
    if not isinstance(own, Mapping) or not all(isinstance(text, str) for pair in own.items() for text in pair):
        message = f"{type(model).__name__}.{key} is not a table of pattern = style, but {own!r}"
        raise PlanError([Diagnostic("styles", message, "give it names of modules, such as 'blocks.*.query', as keys")])
    wrong = [pattern for pattern in own if not matching(pattern, names)]
    if wrong:
        raise PlanError([matches_nothing(f"{type(model).__name__}.{key}", pattern, names) for pattern in wrong])
    return own


def named_by(model: Any, method: str, modules: Iterable[tuple[str, Any]]) -> str:
    """Return the name of the module that a method of the model returns, such as `get_input_embeddings`.

    Args:
        model: the model.
        method: its name.
        modules: of the model, by name.

    Returns:
        The name; empty where the model has no such method.
    """
    try:
        target = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return ""
    return next((name for name, module in modules if module is target), "")


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """List the names that `pattern` matches, in their order."""
    return [name for name in names if matches(pattern, name)]


def matched_by(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return the names that some of the patterns match."""
    names = list(names)
    return {name for pattern in patterns for name in matching(pattern, names)}


def generalise(names: Iterable[str]) -> list[str]:
    """Replace numbers in names by `*` and list each result once, to look for near misses in.

    >>> generalise(["layers.0.mlp", "layers.1.mlp", "norm"])
    ['layers.*.mlp', 'norm']
    """
    dotted = (".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return list(dict.fromkeys(name for name in dotted if name))


def block_lists(model: ModelOutline) -> tuple[str, ...]:
    """Return the patterns of the model's lists of several modules, those inside other lists left out.

    >>> outline = ModelOutline({name: ModuleOutline("M", "container") for name in ("layers", "layers.0", "layers.1")})
    >>> block_lists(outline)
    ('layers.*',)
    """
    lists: list[str] = []
    for name, module in model.modules.items():
        several = name and module.kind == "container" and f"{name}.1" in model.modules
        if several and not any(name.startswith(f"{outer}.") for outer in lists):
            lists.append(name)
    return tuple(f"{name}.*" for name in lists)


def matches_inside(patterns: Iterable[str], name: str) -> bool:
    """Tell whether a pattern matches a module or parameter, or a module that it is inside of."""
    parts = name.split(".")
    above = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return any(matches(pattern, each) for each in above for pattern in patterns)


def matches_nothing(key: str, pattern: str, names: Iterable[str], *, what: str = "module") -> Diagnostic:
    """Return what is wrong with a pattern that matches none of the names.

    Args:
        key: of the pattern in the plan.
        pattern: the pattern.
        names: those that it could match.
        what: they are names of.
    """
    return Diagnostic(key, f"'{pattern}' matches no {what}", near_misses(pattern, generalise(names)))


def never_called(key: str, pattern: str, name: str, model: ModelOutline, *, verb: str = "name") -> Diagnostic | None:
    """Return what is wrong with a pattern that matches a module which holds others and is never called.

    Args:
        key: of the pattern in the plan.
        pattern: the pattern.
        name: of the module that it matches.
        model: that has the module.
        verb: what to do with its members.
    """
    module = model.modules[name]
    if module.kind != "container":
        return None
    message = f"'{pattern}' matches {name}, a {module.type_name}, which is never called"
    return Diagnostic(key, message, f"{verb} its members: '{name}.*'")
