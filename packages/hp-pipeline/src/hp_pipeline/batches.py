"""A batch, cut into micro-batches, and their sequences into slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hp_pipeline.port import port

__all__ = ["BATCH", "SEQUENCE", "BatchDimSpec", "Dim", "cut"]


class BatchDimSpec:
    """The dim along which an input is cut into micro-batches.

    Args:
        batch_dim: the dim; -1 leaves the input whole, so that every micro-batch gets all of it.
    """

    def __init__(self, batch_dim: int) -> None:
        if not isinstance(batch_dim, int) or batch_dim < -1:
            raise ValueError(
                f"BatchDimSpec: batch_dim must be a dim from 0, or -1 for an input not cut; got {batch_dim}."
            )
        self.batch_dim = batch_dim

    def __repr__(self) -> str:
        """Write the constructor."""
        return f"BatchDimSpec({self.batch_dim})"

    @classmethod
    def from_tuple(cls, dims: Sequence[int]) -> tuple[BatchDimSpec, ...]:
        """Return the dims of positional inputs."""
        return tuple(map(cls, dims))

    @classmethod
    def from_dict(cls, dims: Mapping[str, int]) -> dict[str, BatchDimSpec]:
        """Return the dims of keyword inputs."""
        return {name: cls(dim) for name, dim in dims.items()}


Dim = BatchDimSpec | int


class Kind(NamedTuple):
    """A way to cut inputs, and how errors speak of it."""

    option: str
    dim: int
    parts: str
    size: str


BATCH = Kind("batch_dim", 0, "micro-batches", "rows")
SEQUENCE = Kind("seq_dim", 1, "slices", "tokens")


def cut(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parts: int,
    args_dims: Sequence[Dim] | None,
    kwargs_dims: Mapping[str, Dim] | None,
    kind: Kind = BATCH,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Cut a batch into micro-batches, or sequences into slices.

    Tensors, also those in lists, tuples and dictionaries, are cut along ``kind.dim`` unless ``args_dims`` or
    ``kwargs_dims`` say otherwise; what is no tensor, or has no dims, is every part's.

    Raises:
        ValueError: a size that does not divide, a dim that a tensor has not, an object that holds tensors, or a name
            that no input has.
    """
    dims = list(args_dims or ())
    if len(dims) > len(args):
        raise ValueError(f"args_{kind.option} names {len(dims)} inputs, but {len(args)} positional ones were given.")
    unknown = set(kwargs_dims or ()) - set(kwargs)
    if unknown:
        raise ValueError(f"kwargs_{kind.option} names {sorted(unknown)}, but the keyword inputs are {sorted(kwargs)}.")
    dims += [kind.dim] * (len(args) - len(dims))
    columns = [_pieces(f"input {place}", value, dim, parts, kind) for place, (value, dim) in enumerate(zip(args, dims))]
    named = {
        name: _pieces(f"input {name!r}", value, (kwargs_dims or {}).get(name, kind.dim), parts, kind)
        for name, value in kwargs.items()
    }
    return [
        (tuple(column[part] for column in columns), {name: column[part] for name, column in named.items()})
        for part in range(parts)
    ]


def _pieces(what: str, value: Any, dim: Dim, parts: int, kind: Kind) -> list[Any]:
    place = (dim if isinstance(dim, BatchDimSpec) else BatchDimSpec(dim)).batch_dim
    if place >= 0 and not port().is_tensor(value):
        leaves, structure = port().flatten(value)
        if len(leaves) != 1 or leaves[0] is not value:  # a nest
            pieces = [_pieces(f"{what}, in its leaf {at},", leaf, dim, parts, kind) for at, leaf in enumerate(leaves)]
            return [port().unflatten([each[part] for each in pieces], structure) for part in range(parts)]
        held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        if any(map(port().is_tensor, held.values())):
            raise ValueError(
                f"{what} is a {type(value).__name__} that holds tensors, which are not cut into {kind.parts}: pass a"
                f" dictionary, list or tuple of them, or leave it whole by a {kind.option} of -1."
            )
    shape = port().shape(value) if port().is_tensor(value) else ()
    if place < 0 or not shape:
        return [value] * parts
    if place >= len(shape):
        raise ValueError(f"{what} has shape {shape} and no dim {place} to cut; name its dim, or -1 to leave it whole.")
    if shape[place] % parts:
        raise ValueError(
            f"{what} has {shape[place]} {kind.size} along dim {place}, which {parts} {kind.parts} do not divide; its"
            f" shape is {shape}."
        )
    return port().cut(value, place, parts)
