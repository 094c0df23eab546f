"""What one rank of a plan does in a step: its memory, operations and messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Count:
    """Collectives of one kind.

    Attributes:
        calls: how many.
        bytes: of all of them.
    """

    calls: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A rank's step.

    Attributes:
        live: the most live bytes of the device at each operation of a step, in order.
        peak: the most of them.
        flops: of matrix products and attention.
        operations: their number.
        collectives: (kind, bytes of one call, axes of the mesh), such as `("all_gather", 4096, ("dp_shard",))` -> how
            many, and the bytes of all.
        kernels: key of a distinct kernel (operator, shapes, strides and dtypes as text) -> calls in a step.
        optimizer_from: index in `live` at which the optimizer's step begins.
    """

    live: tuple[int, ...]
    peak: int
    flops: int
    operations: int
    collectives: Mapping[tuple[str, int, tuple[str, ...]], Count]
    kernels: Mapping[str, int]
    optimizer_from: int
