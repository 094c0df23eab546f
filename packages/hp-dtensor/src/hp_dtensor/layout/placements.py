"""Placements: what one mesh axis does to a tensor.

A placement is a frozen value whose ``repr`` is its constructor. A tensor on an n-d mesh has one placement for each mesh
axis, in the order of the axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PARTIAL_OPS", "Partial", "Placement", "RaggedShard", "Replicate", "Shard", "StridedShard", "kind_of"]

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
    """Tensor dim ``dim`` is cut over the axis in contiguous chunks of ``ceil(size / ranks)``.

    The last chunks may be smaller or empty.
    Two axes that shard one dim cut it one after the other: the earlier axis is the outer one.

    Args:
        dim: the tensor dim; negative counts from the end and is normalised where a shape is known.
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
    """Tensor dim ``dim`` is cut in ``split_factor`` equal blocks, and each block is cut over the axis.

    It is what remains of ``Shard(1)`` on a ``[split_factor, n]`` tensor when the two dims are flattened into one.

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
    """The named dims, flattened into one run of elements, are cut in contiguous pieces in proportion to ``units``.

    It applies to what the other axes' placements leave, and its local tensor is 1-d where all dims are named.

    Args:
        dims: the tensor dims, ascending.
        units: one count a rank of the axis; the number of elements is a multiple of their sum.
    """

    dims: tuple[int, ...]
    units: tuple[int, ...]

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, units={self.units})"


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Each rank of the axis holds the same values. The gradient of a replicated tensor is replicated."""

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True, init=False)
class Partial(Placement):
    """The value is the reduction by ``reduce_op`` of what the ranks of the axis hold.

    Args:
        reduce_op: ``"sum"`` (default), ``"avg"``, ``"min"``, ``"max"`` or ``"product"``.
        op: another name of ``reduce_op``.

    Raises:
        ValueError: for another ``reduce_op``.
        TypeError: both names are given.
    """

    reduce_op: str

    def __init__(self, reduce_op: str | None = None, *, op: str | None = None) -> None:
        if reduce_op is not None and op is not None:
            raise TypeError(f"Partial: reduce_op={reduce_op!r} and op={op!r} are two names of one argument; give one")
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
