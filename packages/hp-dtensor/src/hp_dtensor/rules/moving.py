"""The rules of operations that only move, copy or select elements: every partial value passes through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hp_dtensor.layout.placements import PARTIAL_OPS
from hp_dtensor.rules.equation import Shapes, dims_argument, gather_all, pointwise_factors, present
from hp_dtensor.rules.factors import FactorMap

ANY = frozenset(PARTIAL_OPS)


def pad(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Require replication of the padded dims (``dim``, a tuple).

    ``linear``: the padding is zero, or comes from the operand; ``full``: the kernel takes no empty shard.
    """
    (shape,) = present(shapes)
    pointwise = pointwise_factors([shape], [shape])
    return FactorMap(
        pointwise.operands,
        pointwise.results,
        need_replication=frozenset(arguments["dim"]),
        nonempty=frozenset(range(len(shape))) if arguments.get("full") else frozenset(),
        linear=(frozenset({0}),) if arguments["linear"] else (),
    )


def pairs(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Complex numbers as pairs along a last dim, which needs replication."""
    (shape,), (result,) = present(shapes), present(results)
    shared = min(len(shape), len(result))
    dims = [tuple(d if d < shared else None for d in range(len(each))) for each in (shape, result)]
    return FactorMap((dims[0],), (dims[1],), linear=(frozenset({0}),))


def permute(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Dim ``k`` of the result is dim ``order[k]`` of the operand."""
    (shape,) = present(shapes)
    order = arguments["order"]
    return FactorMap((tuple(range(len(shape))),), (tuple(order),), linear=(frozenset({0}),), passes=ANY)


def expand(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Dims that keep their size may be sharded; expanded and new ones need replication."""
    shape = present(shapes)[0]
    (result,) = present(results)
    lead = len(result) - len(shape)
    unchanged = [size == result[lead + d] for d, size in enumerate(shape)]
    return FactorMap(
        operands=(tuple(d if keep else None for d, keep in enumerate(unchanged)),),
        results=((None,) * lead + tuple(d if keep else None for d, keep in enumerate(unchanged)),),
        linear=(frozenset({0}),),
        passes=ANY,
    )


def cat(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """All dims but ``dim`` may be sharded."""
    operands = present(shapes)
    dims = tuple(range(max(len(shape) for shape in operands)))
    (dim,) = dims_argument(arguments.get("dim", 0), len(dims))
    return FactorMap(
        # torch ignores an empty 1-d tensor
        operands=tuple(dims if len(shape) == len(dims) else (None,) for shape in operands),
        results=(dims,),
        need_replication=frozenset({dim}),
        linear=(frozenset(range(len(operands))),),
        passes=ANY,
    )


def stack(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """All dims may be sharded but the result's new ``dim``."""
    operands = present(shapes)
    dims = tuple(range(len(operands[0])))
    (at,) = dims_argument(arguments.get("dim", 0), len(dims) + 1)
    return FactorMap(
        operands=(dims,) * len(operands),
        results=((*dims[:at], None, *dims[at:]),),
        linear=(frozenset(range(len(operands))),),
        passes=ANY,
    )


def index(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Indexing: ``kept`` lists, for each dim of the result, the operand's dim that it is a full slice of, or None."""
    shape = present(shapes)[0]
    kept = arguments["kept"]
    return FactorMap(
        operands=(
            tuple(d if d in kept else None for d in range(len(shape))),
            *((None,) * len(other) for other in present(shapes)[1:]),
        ),
        results=(tuple(kept),),
        linear=(frozenset({0}),),
        passes=ANY,
    )


def gather(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Dims may be sharded where operand and index have equal sizes; the index also along the gathered dim.

    Args:
        shapes: of the operand and the index.
        results: of the result, which is the index's.
        arguments: ``dim``.
    """
    operands = present(shapes)
    if arguments["dim"] is None:  # take_along_dim of the flattened operand
        return gather_all(shapes, results)
    ndim = len(operands[0])
    (dim,) = dims_argument(arguments["dim"], ndim) or (0,)
    same = [d != dim and all(shape[d] == operands[0][d] for shape in operands) for d in range(ndim)]
    operand = tuple(d if keep else None for d, keep in enumerate(same))
    index = tuple(ndim if d == dim else factor for d, factor in enumerate(operand))
    return FactorMap((operand, index), (index,) * len(results), linear=(frozenset({0}),), passes=ANY)


def masked_gather(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """As gather; if the operand is sharded along the gathered dim, each rank yields its elements, zeros elsewhere."""
    factors = gather(shapes, results, arguments)
    if arguments["dim"] is None or not factors.operands[0]:
        return factors
    ndim = len(factors.operands[0])
    (dim,) = dims_argument(arguments["dim"], ndim)
    operand = tuple(ndim + 1 if d == dim else factor for d, factor in enumerate(factors.operands[0]))
    return dataclasses.replace(
        factors, operands=(operand, factors.operands[1]), reduce={ndim + 1: "sum"}, contiguous=frozenset({ndim + 1})
    )
