"""The rules of operations that only move, copy or choose elements: parts of every reduction pass through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hp_dtensor.layout.placements import PARTIAL_OPS
from hp_dtensor.rules.equation import Shapes, dims_argument, gather_all, known, pointwise_factors
from hp_dtensor.rules.factors import FactorMap

__all__ = ["cat", "expand", "gather", "index", "masked_gather", "pad", "pairs", "permute", "stack"]

ANY = frozenset(PARTIAL_OPS)


def pad(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Require replication of the padded dims (``dim``, a tuple).

    ``linear``: what is added is zero, or comes from the operand; ``full``: the kernel takes no empty shard.
    """
    (shape,) = known(shapes)
    made = pointwise_factors([shape], [shape])
    return FactorMap(
        made.operands,
        made.results,
        whole=frozenset(arguments["dim"]),
        full=frozenset(range(len(shape))) if arguments.get("full") else frozenset(),
        linear=(frozenset({0}),) if arguments["linear"] else (),
    )


def pairs(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Complex numbers as pairs along a last dim, which is whole."""
    (shape,), (result,) = known(shapes), known(results)
    shared = min(len(shape), len(result))
    dims = [tuple(d if d < shared else None for d in range(len(each))) for each in (shape, result)]
    return FactorMap((dims[0],), (dims[1],), linear=(frozenset({0}),))


def permute(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Dim ``k`` of the result is dim ``order[k]`` of the operand."""
    (shape,) = known(shapes)
    order = arguments["order"]
    return FactorMap((tuple(range(len(shape))),), (tuple(order),), linear=(frozenset({0}),), passes=ANY)


def expand(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Dims that keep their size are shared; others, and those that are new, are whole."""
    shape = known(shapes)[0]
    (result,) = known(results)
    lead = len(result) - len(shape)
    kept = [size == result[lead + d] for d, size in enumerate(shape)]
    return FactorMap(
        operands=(tuple(d if keep else None for d, keep in enumerate(kept)),),
        results=((None,) * lead + tuple(d if keep else None for d, keep in enumerate(kept)),),
        linear=(frozenset({0}),),
        passes=ANY,
    )


def cat(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """All dims are shared, and ``dim`` is whole."""
    given = known(shapes)
    dims = tuple(range(max(len(shape) for shape in given)))
    (dim,) = dims_argument(arguments.get("dim", 0), len(dims))
    return FactorMap(
        # an empty 1-d tensor is passed over
        operands=tuple(dims if len(shape) == len(dims) else (None,) for shape in given),
        results=(dims,),
        whole=frozenset({dim}),
        linear=(frozenset(range(len(given))),),
        passes=ANY,
    )


def stack(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """All dims are shared, and the results' ``dim`` is new."""
    given = known(shapes)
    dims = tuple(range(len(given[0])))
    (at,) = dims_argument(arguments.get("dim", 0), len(dims) + 1)
    return FactorMap(
        operands=(dims,) * len(given),
        results=((*dims[:at], None, *dims[at:]),),
        linear=(frozenset(range(len(given))),),
        passes=ANY,
    )


def index(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Indexing: ``kept`` lists, for each dim of the result, the dim of the operand that it is in full, or None."""
    shape = known(shapes)[0]
    kept = arguments["kept"]
    return FactorMap(
        operands=(
            tuple(d if d in kept else None for d in range(len(shape))),
            *((None,) * len(other) for other in known(shapes)[1:]),
        ),
        results=(tuple(kept),),
        linear=(frozenset({0}),),
        passes=ANY,
    )


def gather(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Dims where operand and index have one size are shared; the index may be cut along the gathered dim, too.

    Args:
        shapes: of the operand and the index.
        results: of the result, which is the index's.
        arguments: ``dim``.
    """
    given = known(shapes)
    if arguments["dim"] is None:  # take_along_dim of the flattened operand
        return gather_all(shapes, results)
    ndim = len(given[0])
    (dim,) = dims_argument(arguments["dim"], ndim) or (0,)
    same = [d != dim and all(shape[d] == given[0][d] for shape in given) for d in range(ndim)]
    operand = tuple(d if keep else None for d, keep in enumerate(same))
    index = tuple(ndim if d == dim else factor for d, factor in enumerate(operand))
    return FactorMap((operand, index), (index,) * len(results), linear=(frozenset({0}),), passes=ANY)


def masked_gather(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """As gather; where the operand is cut along the gathered dim, each rank gives what it has, and zeros elsewhere."""
    made = gather(shapes, results, arguments)
    if arguments["dim"] is None or not made.operands[0]:
        return made
    ndim = len(made.operands[0])
    (dim,) = dims_argument(arguments["dim"], ndim)
    operand = tuple(ndim + 1 if d == dim else factor for d, factor in enumerate(made.operands[0]))
    return dataclasses.replace(
        made, operands=(operand, made.operands[1]), reduce={ndim + 1: "sum"}, runs=frozenset({ndim + 1})
    )
