"""Nests of tuples, lists and dicts, which MindSpore has no functions for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class Structure(NamedTuple):
    """A container without its leaves.

    Attributes:
        kind: its type.
        keys: of a dict, in its order.
        parts: the structures inside; None stands for a leaf.
    """

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Any, ...]


def flatten(tree: Any) -> tuple[list[Any], Structure | None]:
    """Return the leaves of a nest, and its structure."""
    kind = type(tree)
    if kind in (dict, OrderedDict):
        keys, children = tuple(tree), list(tree.values())
    elif kind in (tuple, list) or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        keys, children = (), list(tree)
    else:
        return [tree], None
    pairs = [flatten(child) for child in children]
    return [leaf for leaves, _ in pairs for leaf in leaves], Structure(kind, keys, tuple(part for _, part in pairs))


def unflatten(leaves: Sequence[Any], structure: Structure | None) -> Any:
    """Return the nest."""
    return _built(iter(leaves), structure)


def _built(leaves: Iterator[Any], structure: Structure | None) -> Any:
    if structure is None:
        return next(leaves)
    parts = [_built(leaves, part) for part in structure.parts]
    if structure.keys:
        return structure.kind(zip(structure.keys, parts, strict=True))
    return structure.kind(*parts) if hasattr(structure.kind, "_fields") else structure.kind(parts)
