"""The sharding rules of the operations, for every framework: one entry each, a line wherever the language suffices.

Each framework binds its functions to these rules, and passes a rule's arguments under the names used here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hp_dtensor.layout.placements import PARTIAL_OPS
from hp_dtensor.rules.equation import Rule, Shapes, dims_argument, gather_all, pointwise_factors, present, rule
from hp_dtensor.rules.factors import Dims, FactorMap

__all__ = ["RULES", "dims_argument"]


# ---- products whose equation depends on their arguments ----
def einsum(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Read the argument ``equation`` as the rule; letters that an operand has twice need replication."""
    text = arguments["equation"].replace(" ", "")
    if "->" not in text:
        letters = text.replace(",", "").replace("...", "")
        text += (
            "->" + ("..." if "..." in text else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
        )
    left, right = text.split("->")
    spaced = [" ".join(term.replace("...", ".")).replace(".", "...") for term in [*left.split(","), right]]
    summed = [letter for letter in dict.fromkeys(left.replace(",", "").replace(".", "")) if letter not in right]
    repeated = [letter for term in left.split(",") for letter in term if letter != "." and term.count(letter) > 1]
    line = rule(
        ", ".join(spaced[:-1]) + " -> " + spaced[-1],
        reduce=" ".join(letter for letter in summed if letter not in repeated),
        need_replication=" ".join(repeated),
        linear="each",
    )
    return line(shapes, results, arguments)


def matmul_transposed(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Describe a product whose operands are transposed if ``transpose_a`` and ``transpose_b`` say so."""
    a = "... k m" if arguments["transpose_a"] else "... m k"
    b = "... n k" if arguments["transpose_b"] else "... k n"
    return rule(f"{a}, {b} -> ... m n", reduce="k", linear="0 1")(shapes, results, arguments)


def cross(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Multiply vectors along ``dim``, which needs replication; other dims broadcast."""
    dims = pointwise_factors(shapes, results)
    (along,) = dims_argument(arguments["dim"], len(dims.results[0]))
    return FactorMap(
        dims.operands,
        dims.results,
        need_replication=frozenset({along}),
        linear=(frozenset({0}), frozenset({1})),
    )


def rows(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Look up rows along dim ``axis``: dim 0 may be sharded, as in an embedding; any other needs replication."""
    source, index = present(shapes)
    dim = arguments["axis"]
    inner = [f"s{d}" for d in range(len(source))]
    looked = " ".join(f"i{d}" for d in range(len(index)))
    out = " ".join([*inner[:dim], looked, *inner[dim + 1 :]])
    line = f"{' '.join(inner)}, {looked} -> {out}"
    line_rule = rule(line, need_replication=inner[dim]) if dim else rule(line, reduce=inner[dim])
    return line_rule(shapes, results, arguments)


def bias_add(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Describe a sum to which one rank adds the bias: the bias's only dim is dim ``channel`` of the input."""
    dims = " ".join(f"d{d}" for d in range(len(present(shapes)[0])))
    return rule(f"{dims}, d{arguments['channel']} -> {dims}", linear="0+1")(shapes, results, arguments)


ANY = frozenset(PARTIAL_OPS)


def pad(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Require replication of the padded dims (``dim``, a tuple).

    ``linear``: the padding is zero, or comes from the operand; ``full``: the kernel takes no empty shard.
    """
    (shape,) = present(shapes)
    # of the operand alone, since the padded dims have other sizes in the result; not taken over as it is, since
    # padding is not element by element
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


RULES: dict[str, Rule] = {
    # ---- element by element ----
    "pointwise": rule("...+ -> ...+"),
    "add": rule("...+ -> ...+", linear="several"),  # x + 1 is not linear in x
    "mul": rule("...+ -> ...+", linear="each"),
    "div": rule("...+ -> ...+", linear="0", unless="rounding_mode"),
    "linear_unary": rule("... -> ...", linear="0"),
    "to": rule("...+ -> ...+", linear="0", unless="cast"),  # rounding the terms of a sum is not rounding the sum
    "copy": rule("...+ -> ...+", linear="all", passes="any"),  # clone, and copies into another tensor
    "maximum": rule("...+ -> ...+", linear="all", passes="max"),  # of two tensors
    "minimum": rule("...+ -> ...+", linear="all", passes="min"),
    "value_independent": rule("...+ -> ...+", value_independent=True),
    # ---- products ----
    "linear": rule("... k, n k -> ... n | ... k, n k, n -> ... n", reduce="k", linear="0 1", bias="2"),
    "matmul": rule(
        "... m k, ... k n -> ... m n | ... m k, k -> ... m | k, ... k n -> ... n | k, k -> ",
        reduce="k",
        linear="0 1",
    ),
    "outer": rule("m, n -> m n", linear="0 1"),
    "cross": cross,
    "embedding": rule("..., v d -> ... d", reduce="v", contiguous="v"),
    "embedding_of": rule("..., v d -> ... d", need_replication="v"),
    # groups of rows, each with its own matrix; the third operand has the ends of the groups
    "grouped_matmul": rule(
        "t k, e k n, e -> t n | g m k, g k n -> g m n | replicate", reduce="k", need_replication="t e", linear="0 1"
    ),
    "einsum": einsum,
    "matmul_transposed": matmul_transposed,
    "rows": rows,
    "bias_add": bias_add,
    # ---- reductions ----
    "sum": rule("* -> * - dim", reduce="dim", linear="0"),
    "mean": rule("* -> * - dim", reduce="dim", linear="0"),
    "max": rule("* -> * - dim", reduce="dim:max", nonempty="dim"),  # any
    "min": rule("* -> * - dim", reduce="dim:min", nonempty="dim"),  # all
    "amax": rule("* -> * - dim", reduce="dim:max", nonempty="dim", linear="0", passes="max"),
    "amin": rule("* -> * - dim", reduce="dim:min", nonempty="dim", linear="0", passes="min"),
    "product": rule("* -> * - dim", reduce="dim:product"),
    "histogram": rule("* -> bins", reduce="*"),  # counts between the bounds are sums over all elements
    "whole_reduction": rule("* -> * - dim", need_replication="dim"),  # argmax, norm: gather the reduced dims
    "statistics": rule(
        "* -> * - dim", need_replication="dim", nonempty="*"
    ),  # var, std: torch warns about empty shards
    # ---- along a dim ----
    "replicated_dim": rule("* -> *", need_replication="dim"),  # softmax, topk, sort; ``dim`` may change its size
    "linear_whole_dims": rule("* -> *", need_replication="dim", linear="0"),  # cumsum, tril
    # flip, roll, narrow, split
    "moved_replicated_dim": rule("* -> *", need_replication="dim", linear="0", passes="any"),
    "unbind": rule("* -> * - dim", dim=0, need_replication="dim", linear="0", passes="any"),
    "pad": pad,
    # ---- moves ----
    "pairs": pairs,
    "permute": permute,
    "expand": expand,
    "cat": cat,
    "stack": stack,
    "index": index,
    "gather": gather,
    "masked_gather": masked_gather,
    # ---- networks ----
    "norm": norm,
    "layer_norm": layer_norm,
    "batch_norm": batch_norm,
    "attention": attention,
    "cross_entropy": cross_entropy,
    "loss": loss,
    "rows_loss": rows_loss,
    "prelu": prelu,
    "convolution": convolution,
    "leading": leading,  # pools, interpolation
    "channels": channels,  # group_norm, instance_norm, and batch_norm in evaluation
    "images": images,
    "whole": rule("replicate"),
}
"""The rule of each operation, by name."""
