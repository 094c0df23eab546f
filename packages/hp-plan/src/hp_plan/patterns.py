"""Patterns of dotted names: fnmatch in each part, so that `layers.*` is the layers and not what is inside them."""

from __future__ import annotations

from collections.abc import Iterable

from hp_dtensor.extend import matches

__all__ = ["generalise", "matches", "matching"]


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that `pattern` matches, in their order."""
    return [name for name in names if matches(pattern, name)]


def generalise(names: Iterable[str]) -> list[str]:
    """The names with numbers replaced by `*`, each once: what a near miss is looked for in.

    >>> generalise(["layers.0.mlp", "layers.1.mlp", "norm"])
    ['layers.*.mlp', 'norm']
    """
    dotted = (".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return list(dict.fromkeys(name for name in dotted if name))
