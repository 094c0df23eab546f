"""The sharding rules of normalisations, attention, losses, convolutions and pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_dtensor.rules.equation import Shapes, gather_all, pointwise_factors, present
from hp_dtensor.rules.factors import Dims, FactorMap


def norm(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """layer_norm, rms_norm: the trailing dims need replication; weight and bias carry them."""
    operands = present(shapes)
    ndim = len(operands[0])
    tail = len(arguments["normalized_shape"])
    factors = tuple(range(ndim))
    return FactorMap(
        operands=(factors, *(factors[ndim - len(shape) :] for shape in operands[1:])),
        results=(factors,),
        need_replication=frozenset(factors[ndim - tail :]),
    )


def layer_norm(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """As ``norm``, with mean and variance, whose normalized dims are of size one."""
    operands = present(shapes)
    dims = tuple(range(len(operands[0])))
    first = arguments["begin_norm_axis"] % len(dims)
    statistics = tuple(d if d < first else None for d in dims)
    tails = tuple(dims[len(dims) - len(shape) :] for shape in operands[1:])
    return FactorMap((dims, *tails), (dims, statistics, statistics), need_replication=frozenset(dims[first:]))


def attention(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Query, key, value, mask as ``... h q d``: batch and heads may be sharded, heads evenly (grouped queries)."""
    q, k, v, *rest = shapes
    mask = rest[0] if rest else None
    assert q is not None and k is not None and v is not None
    batch = len(q) - 3
    names = {"h": batch, "q": batch + 1, "d": batch + 2, "s": batch + 3, "e": batch + 4}
    lead = tuple(range(batch))
    operands: list[Dims] = [
        (*lead, names["h"], names["q"], names["d"]),
        (*lead, names["h"], names["s"], names["d"]),
        (*lead, names["h"], names["s"], names["e"]),
    ]
    if len(q) < 3 or any(len(shape) != len(q) for shape in (k, v)):
        return gather_all(shapes, results)
    if mask is not None:
        scores: Dims = (*lead, names["h"], names["q"], names["s"])
        tail = scores[len(scores) - len(mask) :]
        operands.append(tuple(None if size == 1 else factor for size, factor in zip(mask, tail, strict=True)))
    return FactorMap(
        operands=tuple(operands),
        results=((*lead, names["h"], names["q"], names["e"]),),
        need_replication=frozenset({names["q"], names["d"], names["s"], names["e"]}),
        even=frozenset({names["h"]}),
    )


def cross_entropy(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Logits ``n c ...``, target ``n ...``: rows may be sharded, their sum is then partial; classes may not."""
    logits, target, *weight = shapes
    assert logits is not None and target is not None
    dims = tuple(range(len(logits)))
    classes = 1 if len(logits) > 1 else 0
    rows = tuple(d for d in dims if d != classes)
    none = arguments.get("reduction", "mean") == "none"
    probabilities = len(target) == len(logits)
    return FactorMap(
        operands=(dims, dims if probabilities else rows, *((classes,) for w in weight if w is not None)),
        results=(rows if none else (),),
        reduce={} if none else dict.fromkeys(rows, "sum"),
        need_replication=frozenset({classes}),
    )


def loss(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Describe an elementwise loss, and its sum if the result is a scalar."""
    pointwise = pointwise_factors(shapes, [shapes[0]])
    if arguments["reduction"] == "none":
        return pointwise
    dims = range(len(pointwise.results[0]))
    return FactorMap(pointwise.operands, ((),), reduce=dict.fromkeys(dims, "sum"), nonempty=frozenset(dims))


def prelu(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """``n c ..., c``, or one weight for all channels."""
    image, weight = present(shapes)
    dims: Dims = tuple(range(len(image)))
    shared = weight[0] != 1 or image[1:2] == (1,)
    return FactorMap((dims, (1,) if shared and len(dims) > 1 else (None,)), (dims,), nonempty=frozenset(dims))


def rows_loss(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Rows may be sharded, classes not. Results: the loss of each row with a gradient, or the mean of the losses."""
    operands = tuple((0,) if len(shape) == 1 else (0, 1) for shape in present(shapes))
    if len(results) == 2:
        return FactorMap(operands, ((0,), (0, 1)), need_replication=frozenset({1}), nonempty=frozenset({0}))
    return FactorMap(operands, ((),), reduce={0: "sum"}, need_replication=frozenset({1}), nonempty=frozenset({0}))


def images(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Images may be sharded along the batch dim, which other operands lack and all results but vectors have."""
    image, *vectors = present(shapes)
    rest: Dims = (None,) * (len(image) - 1)
    outs = tuple((None,) if len(shape or ()) == 1 else (0, *(None,) * (len(shape or ()) - 1)) for shape in results)
    return FactorMap(((0, *rest), *((None,) * len(v) for v in vectors)), outs, nonempty=frozenset({0}))


def leading(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """All but the last ``trailing`` dims of every operand and result are shared; no shard may be empty."""
    operands = [shape for shape in shapes if shape is not None]
    shared = len(operands[0]) - arguments["trailing"]

    def dims(count: int) -> Dims:
        return tuple(d if d < shared else None for d in range(count))

    return FactorMap(
        operands=tuple(dims(len(shape)) for shape in operands),
        results=tuple(dims(len(shape)) for shape in results if shape is not None),
        nonempty=frozenset(range(max(shared, 0))),
    )


def convolution(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """``n i ..., o i ..., o -> n o ...`` (transposed: ``i o ...``); with groups the channels need replication.

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
        nonempty=frozenset({n, i, o}),
        linear=() if bias is not None else (frozenset({0}), frozenset({1})),
        bias=frozenset({2}) if bias is not None else frozenset(),
    )


def channels(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """``n c ..., c, c -> n c ...`` of which the dims ``free`` may be sharded."""
    image, *vectors = (shape for shape in shapes if shape is not None)
    free = arguments["free"]
    dims: Dims = tuple(d if d in free else None for d in range(len(image)))
    channel = 1 if 1 in free else None
    return FactorMap(
        operands=(dims, *((channel,) for _ in vectors)),
        results=(dims,),
        nonempty=frozenset(free),
    )


def batch_norm(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Images may be sharded if the statistics are arguments; a batch's own statistics need the complete batch."""
    by_image = images(shapes, results, arguments)
    if not arguments["training"]:
        return by_image
    bare = tuple((None,) * len(dims) for dims in by_image.operands)
    return FactorMap(bare, tuple((None,) * len(dims) for dims in by_image.results))
