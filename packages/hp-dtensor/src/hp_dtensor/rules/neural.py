"""The sharding rules of convolutions, pools, normalisations: images, with batch and channel dims before the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_dtensor.rules.equation import Shapes, rule
from hp_dtensor.rules.factors import Dims, FactorMap

__all__ = ["convolution"]


def _leading(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """All but the last ``trailing`` dims of every operand and result are shared; no shard may be empty."""
    given = [shape for shape in shapes if shape is not None]
    kept = len(given[0]) - arguments["trailing"]

    def dims(count: int) -> Dims:
        return tuple(d if d < kept else None for d in range(count))

    return FactorMap(
        operands=tuple(dims(len(shape)) for shape in given),
        results=tuple(dims(len(shape)) for shape in results if shape is not None),
        full=frozenset(range(max(kept, 0))),
    )


rule("leading", _leading)  # pools, interpolation


def convolution(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """``n i ..., o i ..., o -> n o ...`` (transposed: ``i o ...``); with groups the channels are whole.

    Args:
        shapes: of the image (with or without ``n``), the weight and the bias.
        results: of the result.
        arguments: ``groups``, ``transposed``.
    """
    image, weight, bias = (*shapes, None)[:3]
    assert image is not None and weight is not None
    n, i, o = 0, 1, 2
    lead: Dims = (n,) if len(image) == len(weight) else ()  # else an image alone
    rest: Dims = (None,) * (len(weight) - 2)
    inner, outer = (i, o) if arguments["groups"] == 1 else (None, None)
    operands: list[Dims] = [
        (*lead, inner, *rest),
        (inner, outer, *rest) if arguments["transposed"] else (outer, inner, *rest),
    ]
    if bias is not None:
        operands.append((outer,))
    return FactorMap(
        operands=tuple(operands),
        results=((*lead, outer, *rest),),
        reduce={i: "sum"},
        full=frozenset({n, i, o}),
        linear=() if bias is not None else (frozenset({0}), frozenset({1})),
        once=frozenset({2}) if bias is not None else frozenset(),
    )


rule("convolution", convolution)


def _channels(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """``n c ..., c, c -> n c ...`` of which the dims ``free`` may be sharded."""
    image, *vectors = (shape for shape in shapes if shape is not None)
    free = arguments["free"]
    dims: Dims = tuple(d if d in free else None for d in range(len(image)))
    channel = 1 if 1 in free else None
    return FactorMap(
        operands=(dims, *((channel,) for _ in vectors)),
        results=(dims,),
        full=frozenset(free),
    )


rule("channels", _channels)  # group_norm, instance_norm, batch_norm that only reads its statistics
