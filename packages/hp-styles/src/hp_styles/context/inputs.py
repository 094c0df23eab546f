"""The inputs and the output of a module that is passed q, k and v: where they are, and what they must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hp_styles import port
from hp_styles.context.plan import Settings

Tensor = Any


def find_input(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], settings: Settings, which: int
) -> tuple[int | str, Tensor]:
    """Find one of q, k and v: its place and its value.

    Raises:
        TypeError: it is not there, or no tensor.
    """
    index = settings.qkv_indices[which] if settings.qkv_indices else None
    name = settings.qkv_kwarg_names[which] if settings.qkv_kwarg_names else None
    where = index if index is not None and index < len(args) else name
    value = kwargs.get(name) if where is name else args[index]  # type: ignore[arg-type, index]
    if where is None or not isinstance(value, port.modules().Tensor):
        raise TypeError(
            f"ContextParallel on {type(module).__name__}: {'qkv'[which]} is looked for at position {index} and by name"
            f" {name!r}; the inputs are {[type(x).__name__ for x in args]} and"
            f" { {key: type(x).__name__ for key, x in kwargs.items()} }"
        )
    return where, value


def with_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any], places: Sequence[int | str], values: Sequence[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with other values in some places."""
    positional, named = list(args), dict(kwargs)
    for place, value in zip(places, values, strict=True):
        if isinstance(place, str):
            named[place] = value
        else:
            positional[place] = value
    return tuple(positional), named


def check_output(module: Any, shape: tuple[int, ...], heads: int, length: int, head_dim: int, seq_dim: int) -> None:
    """Check that an output has the dims of the queries, or the heads flattened into ``head_dim``.

    Raises:
        ValueError: another shape.
    """
    if max(head_dim, seq_dim) >= len(shape) or shape[seq_dim] != length or shape[head_dim] % heads:
        raise ValueError(
            f"ContextParallel on {type(module).__name__}: the output of shape {shape} must have the"
            f" sequence of length {length} in dim {seq_dim} and the {heads} heads in dim {head_dim}, as the queries"
        )
