"""Placements: how a tensor is distributed along one mesh axis.

A placement is a frozen value whose ``repr`` is its constructor. A tensor on an n-d mesh has one placement for each mesh
axis, in the order of the axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PARTIAL_OPS = ("sum", "avg", "min", "max", "product")


@dataclass(frozen=True, slots=True)
class Placement:
    """Base of all placements."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Return True for a contiguous shard (of ``dim``, if passed)."""
        return False

    def is_replicate(self) -> bool:
        """Return True for ``Replicate``."""
        return False

    def is_partial(self, op: str | None = None) -> bool:
        """Return True for ``Partial`` (of ``op``, if passed)."""
        return False


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Each rank of the axis has one contiguous chunk of ``ceil(size / ranks)`` indices of tensor dim ``dim``.

    The last chunks may be smaller or empty. If two axes shard one dim, the second shards the chunks of the first.

    Args:
        dim: the tensor dim; a negative one counts from the end.
    """

    dim: int

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            raise TypeError(f"Shard: dim must be an int, got {self.dim!r}")

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or self.dim == dim

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard(Placement):
    """Tensor dim ``dim`` consists of ``split_factor`` equal blocks, each of which is sharded over the axis.

    It is what ``Shard(1)`` of a ``[split_factor, n]`` tensor becomes when the two dims are flattened into one.

    Args:
        dim: the tensor dim.
        split_factor: number of equal blocks; it must divide the dim's size.
    """

    dim: int
    split_factor: int

    def __repr__(self) -> str:
        return f"StridedShard(dim={self.dim}, split_factor={self.split_factor})"


@dataclass(frozen=True, slots=True)
class RaggedShard(Placement):
    """Each rank has one contiguous range of the named dims, flattened, with a length proportional to its unit.

    It applies to the shards of the other axes. The local tensor is 1-d if all dims are named.

    Args:
        dims: the tensor dims, ascending.
        units: one count per rank of the axis; the number of elements must be a multiple of their sum.
        owners: for each of ``sum(units)`` equal blocks the rank that has it, where a rank's blocks are no range; they
            ascend on the rank. With ``RaggedShard((0,), (2, 1), owners=(0, 1, 0))`` rank 0 has the outer thirds.
    """

    dims: tuple[int, ...]
    units: tuple[int, ...]
    owners: tuple[int, ...] = ()

    def __repr__(self) -> str:
        owners = f", owners={self.owners}" if self.owners else ""
        return f"RaggedShard(dims={self.dims}, units={self.units}{owners})"


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis has the same values. The gradient of a replicated tensor is replicated."""

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True, init=False)
class Partial(Placement):
    """Each rank of the axis has one term; the value is their reduction by ``reduce_op``.

    Args:
        reduce_op: ``"sum"`` (default), ``"avg"``, ``"min"``, ``"max"`` or ``"product"``.
        op: another name of ``reduce_op``.

    Raises:
        ValueError: another ``reduce_op``.
        TypeError: both names are passed.
    """

    reduce_op: str

    def __init__(self, reduce_op: str | None = None, *, op: str | None = None) -> None:
        if reduce_op is not None and op is not None:
            raise TypeError(f"Partial: reduce_op={reduce_op!r} and op={op!r} are two names of one argument; pass one")
        chosen = reduce_op if reduce_op is not None else op if op is not None else "sum"
        if chosen not in PARTIAL_OPS:
            raise ValueError(f"Partial: op must be one of {', '.join(PARTIAL_OPS)}, got {chosen!r}")
        object.__setattr__(self, "reduce_op", chosen)

    @property
    def op(self) -> str:
        """Another name of ``reduce_op``."""
        return self.reduce_op

    def is_partial(self, op: str | None = None) -> bool:
        return op is None or self.reduce_op == op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op!r})" if self.reduce_op != "sum" else "Partial()"


def kind_of(value: Any) -> str:
    """Return the qualified name of a value's type, because other libraries have classes of the same names."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
