"""get_hyper_optimizer: parameters to Muon or AdamW by patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from hp_optim.chained import ChainedOptimizer
from hp_optim.port import port

Entry = str | Mapping[str, Any]

EMBEDDING_PATTERNS = (
    *("*embed*", "*wte.*", "*wpe.*", "*lm_head.*", "lm_head.*", "*output_head.*", "head.weight", "*.head.weight"),
    *("*classifier.*", "*score.weight", "*shared.weight"),
)
"""Names of embeddings and output layers, whose rows are no directions of a matrix: they belong to AdamW."""


def get_hyper_optimizer(
    model: Any,
    muon_params: Sequence[Entry],
    adamw_params: Sequence[Entry],
    muon_kwargs: Mapping[str, Any] | None = None,
    adamw_kwargs: Mapping[str, Any] | None = None,
) -> ChainedOptimizer:
    """Make Muon and AdamW of the parameters whose names match.

    Example:
        >>> optimizer = get_hyper_optimizer(
        ...     model,
        ...     muon_params=["layers.*.weight"],
        ...     adamw_params=["embed.*", {"params": ["*.bias", "norm.*"], "weight_decay": 0.0}],
        ...     muon_kwargs={"lr": 2e-3},
        ... )

    Args:
        model: its parameters, or pairs of names and parameters.
        muon_params: names or fnmatch patterns, whose ``*`` also matches dots, or groups: mappings with such a list as
            ``"params"`` and hyperparameters of their own. An empty list leaves Muon out.
        adamw_params: the same for AdamW.
        muon_kwargs: arguments of `Muon`; a prefix ``muon_`` of their names is dropped.
        adamw_kwargs: arguments of `AdamW`; a prefix ``adamw_`` is dropped.

    Returns:
        A ChainedOptimizer, with ``optimizers["muon"]`` and ``optimizers["adamw"]``.

    Raises:
        ValueError: both lists are empty; a pattern without a match; a parameter that two patterns match, or that is
            trained and that none matches; see also `Muon` and `AdamW`.
    """
    named = dict(port().named_parameters(model))
    lists = {"muon": muon_params, "adamw": adamw_params}
    options = {"muon": muon_kwargs, "adamw": adamw_kwargs}
    for kind, entries in lists.items():
        if isinstance(entries, (str, Mapping)):
            raise TypeError(f"get_hyper_optimizer: {kind}_params must be a list of patterns, got {entries!r}")
    if not any(lists.values()):
        raise ValueError("get_hyper_optimizer: muon_params and adamw_params are empty; one of them needs patterns")
    chosen = _matched(named, lists)
    left = [name for name, parameter in named.items() if name not in chosen and port().trains(parameter)]
    if left:
        raise ValueError(
            f"get_hyper_optimizer: {len(left)} parameters are trained and match no pattern ({', '.join(left[:5])})."
            f"{_nearest(left[0], lists)} Add patterns, or freeze them"
        )
    optimizers = {
        kind: port().make(kind, _groups(kind, entries, chosen, named), _stripped(kind, options[kind] or {}))
        for kind, entries in lists.items()
        if entries
    }
    return ChainedOptimizer(model, optimizers)


def default_patterns(model: Any) -> tuple[list[str], list[str]]:
    """Divide a model's parameters: hidden matrices to Muon; embeddings, output layers, norms, biases to AdamW.

    Args:
        model: its parameters, or pairs of names and parameters.

    Returns:
        Names for Muon and for AdamW, those of trained parameters.
    """
    muon: list[str] = []
    adamw: list[str] = []
    for name, parameter in port().named_parameters(model):
        if port().trains(parameter):
            (muon if is_hidden_matrix(name, parameter.ndim) else adamw).append(name)
    return muon, adamw


def is_hidden_matrix(name: str, dims: int) -> bool:
    """Tell whether a parameter is a matrix, or a stack of them, between embeddings and output layers.

    Args:
        name: of the parameter.
        dims: how many it has.
    """
    return dims > 1 and not any(fnmatchcase(name, pattern) for pattern in EMBEDDING_PATTERNS)


def _patterns(entry: Entry, kind: str) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    patterns = entry.get("params") if isinstance(entry, Mapping) else None
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(each, str) for each in patterns):
        raise TypeError(
            f"get_hyper_optimizer: {kind}_params has {entry!r}; expected a name, a pattern, or a mapping with a list of"
            ' them as "params"'
        )
    if not patterns:
        raise ValueError(f"get_hyper_optimizer: a group of {kind}_params has no patterns: {dict(entry)}")
    return list(patterns)


def _matched(named: Mapping[str, Any], lists: Mapping[str, Sequence[Entry]]) -> dict[str, tuple[str, int]]:
    """Return for each matched name its optimizer, and the number of the entry, -1 for those without a group."""
    chosen: dict[str, tuple[str, int]] = {}
    by: dict[str, str] = {}
    for kind, entries in lists.items():
        for number, entry in enumerate(entries):
            for pattern in _patterns(entry, kind):
                matches = [pattern] if pattern in named else [name for name in named if fnmatchcase(name, pattern)]
                if not matches:
                    near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.5) or list(named)[:3]
                    raise ValueError(
                        f"get_hyper_optimizer: {pattern!r} of {kind}_params matches no parameter; near it are"
                        f" {', '.join(near)}"
                    )
                place = (kind, number if isinstance(entry, Mapping) else -1)
                for name in matches:
                    if chosen.setdefault(name, place) != place:
                        raise ValueError(
                            f"get_hyper_optimizer: parameter {name!r} is matched by {by[name]!r} of"
                            f" {chosen[name][0]}_params and by {pattern!r} of {kind}_params; make one of them narrower"
                        )
                    by.setdefault(name, pattern)
    return chosen


def _nearest(name: str, lists: Mapping[str, Sequence[Entry]]) -> str:
    patterns = {pattern: kind for kind, each in lists.items() for entry in each for pattern in _patterns(entry, kind)}
    near = difflib.get_close_matches(name, patterns, n=1, cutoff=0.5)
    return f" Nearest to {name!r} is {near[0]!r} of {patterns[near[0]]}_params." if near else ""


def _groups(
    kind: str, entries: Sequence[Entry], chosen: Mapping[str, tuple[str, int]], named: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the groups: one of all plain patterns, and one for each mapping."""
    groups = []
    for number in (-1, *(at for at, entry in enumerate(entries) if isinstance(entry, Mapping))):
        own = [(name, named[name]) for name in named if chosen.get(name) == (kind, number)]
        if own:
            entry = entries[number] if number >= 0 else {}
            assert isinstance(entry, Mapping)
            groups.append({**_stripped(kind, {k: v for k, v in entry.items() if k != "params"}), "params": own})
    return groups


def _stripped(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(f"{kind}_"): value for key, value in options.items()}
