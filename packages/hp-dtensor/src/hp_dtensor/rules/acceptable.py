"""Choosing among the placements that a registered sharding function accepts, by bytes moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from hp_dtensor.layout.placements import Placement
from hp_dtensor.layout.spec import TensorSpec, normalize
from hp_dtensor.redistribution.planner import cheapest
from hp_dtensor.rules.factors import Solution

Pair = tuple[Sequence[Any], Sequence[Any]]


def choose(
    name: str,
    acceptable: Sequence[Pair],
    specs: Sequence[TensorSpec],
    itemsizes: Sequence[int],
    results: Sequence[Sequence[int]],
) -> Solution:
    """Choose the acceptable placements that move the fewest bytes; of equal ones the first.

    As with every rule, a replicated operand whose results are sharded or partial on an axis has a partial gradient
    there.

    Args:
        name: the operation's, for errors.
        acceptable: pairs of placements of the results and of the operands, on one axis; None stands for an argument
            that is no tensor.
        specs: where each operand is.
        itemsizes: bytes an element of each operand.
        results: global shape of each result.

    Raises:
        TypeError: something that is no such pair.
        ValueError: no pair, another number of placements than of operands or results, or a dim out of range.
    """
    mesh = specs[0].mesh
    read = [_pair(name, pair, specs, results) for pair in acceptable]
    if not read:
        raise ValueError(f"{name}: its sharding function accepts nothing; accept at least Replicate() for all")
    choices = [*itertools.product(read, repeat=mesh.ndim)]
    targets_of_choices = [[*zip(*(want for _, want in choice), strict=True)] for choice in choices]
    sources, shapes = [spec.placements for spec in specs], [spec.shape for spec in specs]
    chosen = cheapest(choices, targets_of_choices, sources, shapes, mesh.shape, itemsizes)
    outs = [out for out, _ in chosen]
    targets = [want for _, want in chosen]
    varies = [any(not placement.is_replicate() for placement in out) for out in outs]
    operands = tuple(zip(*targets, strict=True))
    vary = tuple(
        tuple(v and placement.is_replicate() for v, placement in zip(varies, of, strict=True)) for of in operands
    )
    return Solution(operands, vary, tuple(zip(*outs, strict=True)))


def _flat(values: Any) -> list[Any]:
    """Placements in order; lists stand for lists of tensors."""
    flat: list[Any] = []
    for value in values:
        flat.extend(_flat(value) if isinstance(value, (list, tuple)) else [value] if value is not None else [])
    return flat


def _pair(
    name: str, pair: Any, specs: Sequence[TensorSpec], results: Sequence[Sequence[int]]
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(p, (list, tuple)) for p in pair)):
        raise TypeError(
            f"{name}: its sharding function must return pairs ([placements of the results], [placements of the"
            f" arguments]), got {pair!r}"
        )
    out, want = _flat(pair[0]), _flat(pair[1])
    for what, placements, count in (("results", out, len(results)), ("tensor arguments", want, len(specs))):
        if len(placements) != count:
            raise ValueError(
                f"{name}: {len(placements)} placements {placements} for {count} {what}; its sharding function must give"
                " one for each, and None for an argument that is not a tensor"
            )
    shapes = [*results, *(spec.shape for spec in specs)]
    mesh = specs[0].mesh
    normalized = [
        normalize([placement] * mesh.ndim, mesh, len(shape), name)[0]
        for placement, shape in zip([*out, *want], shapes, strict=True)
    ]
    return tuple(normalized[: len(out)]), tuple(normalized[len(out) :])


def check_results(name: str, what: str, shapes: Iterable[tuple[int, ...]], layouts: Sequence[TensorSpec]) -> None:
    """Check that the local shapes of results are those that a registered rule implies.

    Args:
        name: the operation's.
        what: ``"operation"`` or ``"kernel"``, for the error.
        shapes: the local shape of each result.
        layouts: the layout of each result by the rule.

    Raises:
        RuntimeError: a shape differs.
    """
    for index, (shape, spec) in enumerate(zip(shapes, layouts, strict=True)):
        if tuple(shape) != spec.local_shape:
            raise RuntimeError(
                f"{name}: by the registered rule result {index} of global shape {spec.shape} is {spec.placements},"
                f" which is {spec.local_shape} on this rank; the {what} returned {tuple(shape)}. The rule accepts"
                f" placements for which the {what} is not right"
            )
