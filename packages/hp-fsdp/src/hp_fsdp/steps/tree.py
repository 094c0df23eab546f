"""Tensors inside nested inputs and outputs: tuples, lists, mappings and dataclasses, as deep as they go."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

_PLAIN = frozenset({type(None), bool, int, float, str})


def in_dtypes(
    policy: Any,
    cast: Callable[[Any, Any], Any],
    map_tensors: Callable[..., Any],
    run: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Call ``run(args, kwargs)`` with inputs, and return its result, in the dtypes of a mixed-precision policy.

    Args:
        policy: the group's.
        cast: casts a tensor of floating point, ``(dtype, tensor)``.
        map_tensors: see `tree_functions`.
        run: the function to call.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        to_compute = functools.partial(cast, policy.param_dtype)
        args, kwargs = map_tensors(to_compute, args), map_tensors(to_compute, kwargs)
    output = run(args, kwargs)
    if policy.output_dtype is not None:
        output = map_tensors(functools.partial(cast, policy.output_dtype), output)
    return output


def tree_functions(kind: type) -> tuple[Callable[..., Any], Callable[[Any], list[Any]]]:
    """Make ``map_tensors(function, tree)`` and ``tensors(tree)`` for a framework's class of tensors.

    Args:
        kind: the class.
    """
    return functools.partial(_map_tensors, kind), functools.partial(_tensors, kind)


def _tensors(kind: type, tree: Any) -> list[Any]:
    """List every tensor in ``tree``, in order."""
    found: list[Any] = []
    _collect(kind, (tree,), found)
    return found


def _collect(kind: type, items: Iterable[Any], found: list[Any]) -> None:
    for item in items:
        if isinstance(item, kind):
            found.append(item)
        elif type(item) in _PLAIN:
            pass
        elif isinstance(item, (tuple, list)):
            _collect(kind, item, found)
        elif isinstance(item, MutableMapping):
            _collect(kind, item.values(), found)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            _collect(kind, [getattr(item, field.name, None) for field in dataclasses.fields(item)], found)


def _map_tensors(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``function`` to the tensors in ``tree``; parts without changed tensors stay the same objects.

    Containers keep their type (a ``ModelOutput`` stays one): a changed one is a shallow copy.
    """
    if isinstance(tree, kind):
        return function(tree)
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, (tuple, list)):
        items = []
        same = True
        for item in tree:
            new = function(item) if isinstance(item, kind) else _map_tensors(kind, function, item)
            same = same and new is item
            items.append(new)
        if same:
            return tree
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*items)
        return type(tree)(items)
    if isinstance(tree, MutableMapping):
        changed = {key: new for key, old in tree.items() if (new := _map_tensors(kind, function, old)) is not old}
        if not changed:
            return tree
        mapping = copy.copy(tree)
        for key, new in changed.items():
            mapping[key] = new
        return mapping
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        pairs = [(field.name, getattr(tree, field.name, None)) for field in dataclasses.fields(tree)]
        changed = {name: new for name, old in pairs if (new := _map_tensors(kind, function, old)) is not old}
        if not changed:
            return tree
        copied = copy.copy(tree)
        for name, new in changed.items():
            object.__setattr__(copied, name, new)
        return copied
    return tree
