"""The sharding rules of the operations, framework-neutral.

Arguments that a rule reads have the names used here; each framework folder maps its functions to these rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hp_dtensor.rules.equation import RULES, Rule, Shapes, from_equation, rule
from hp_dtensor.rules.factors import LINEAR, Dims, FactorMap

__all__ = ["dims_argument", "known", "pointwise_factors"]


def dims_argument(value: Any, ndim: int) -> tuple[int, ...]:
    """A ``dim`` argument (None, an int or a sequence) as non-negative dims; None and ``()`` mean all.

    Raises:
        IndexError: a dim is out of range.
    """
    if value is None or (isinstance(value, Sequence) and not value):
        return tuple(range(ndim))
    dims = (value,) if isinstance(value, int) else tuple(value)
    for dim in dims:
        if not -max(ndim, 1) <= dim < max(ndim, 1):
            raise IndexError(f"dim {dim} is out of range for a tensor with {ndim} dims")
    return tuple(dim % max(ndim, 1) for dim in dims) if ndim else ()


def known(shapes: Shapes) -> list[Sequence[int]]:
    """The shapes of the operands that are there."""
    return [shape for shape in shapes if shape is not None]


# ---- element by element ----
def pointwise_factors(shapes: Shapes, results: Shapes, linear: Iterable[frozenset[int]] = ()) -> FactorMap:
    """Operands broadcast against each other; dim ``k`` of the result is factor ``k``."""
    given = known(shapes)
    ndim = max(len(shape) for shape in given)
    size = [
        max((shape[k - ndim + len(shape)] for shape in given if k - ndim + len(shape) >= 0), default=1)
        for k in range(ndim)
    ]
    zero = [
        any(shape[k - ndim + len(shape)] == 0 for shape in given if k - ndim + len(shape) >= 0) for k in range(ndim)
    ]

    def dims(shape: Sequence[int]) -> Dims:
        start = ndim - len(shape)
        return tuple(
            None if s == 1 and (size[start + k] != 1 or zero[start + k]) else start + k for k, s in enumerate(shape)
        )

    return FactorMap(
        operands=tuple(dims(shape) for shape in given),
        results=tuple(dims(shape) if shape is not None else () for shape in results),
        linear=tuple(linear),
        elementwise=True,
    )


def _pointwise(linear_of: Callable[[int], Iterable[frozenset[int]]]) -> Rule:
    def build(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
        given = len(known(shapes))
        return pointwise_factors(shapes, results, () if arguments.get("rounding_mode") else linear_of(given))

    return build


rule("pointwise", _pointwise(lambda n: ()))
rule("add", _pointwise(lambda n: (frozenset(range(n)),) if n > 1 else ()))  # x + 1 is not linear in x
rule("mul", _pointwise(lambda n: tuple(frozenset({i}) for i in range(n))))
rule("div", _pointwise(lambda n: (frozenset({0}),)))
rule("linear_unary", _pointwise(lambda n: (frozenset({0}),) if n == 1 else ()))


def _to(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """To another device, and with ``cast`` to another dtype, where a sum is not one of parts that are rounded."""
    return pointwise_factors(shapes, results, () if arguments["cast"] else (frozenset({0}),))


rule("to", _to)


def _selecting(op: str) -> Rule:
    """The larger or the smaller of two, as parts of a maximum or a minimum are put together."""

    def build(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
        both = frozenset(range(len(known(shapes))))
        return dataclasses.replace(pointwise_factors(shapes, results, (both,)), passes=frozenset({op}))

    return build


rule("maximum", _selecting("max"))
rule("minimum", _selecting("min"))


def _forgetful(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    made = pointwise_factors(shapes, results)
    return FactorMap(made.operands, made.results, elementwise=True, forgetful=True)


rule("forgetful", _forgetful)


# ---- products ----
rule("linear_plain", "... k, n k -> ... n", reduce="k", linear="0 1")
rule("linear_bias", "... k, n k, n -> ... n", reduce="k", once="2")
rule("matmul", "... m k, ... k n -> ... m n", reduce="k", linear="0 1")
rule("matvec", "... m k, k -> ... m", reduce="k", linear="0 1")
rule("vecmat", "k, ... k n -> ... n", reduce="k", linear="0 1")
rule("dot", "k, k -> ", reduce="k", linear="0 1")
rule("outer", "m, n -> m n", linear="0 1")
rule("embedding", "..., v d -> ... d", reduce="v", runs="v")


def _linear(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    given = known(shapes)
    return RULES["linear_bias" if len(given) == 3 else "linear_plain"](given, results, arguments)


rule("linear", _linear)


def _grouped_matmul(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Rows in groups, each with a matrix of its own; where groups end stands in the third operand."""
    kinds, both = tuple(len(shape) for shape in known(shapes)), (frozenset({0}), frozenset({1}))
    if kinds == (2, 3, 1):
        return from_equation("t k, g k n, g -> t n", shapes, results, reduce="k", whole="tg", linear=both)
    if kinds == (3, 3):
        return from_equation("g m k, g k n -> g m n", shapes[:2], results, reduce="k", linear=both)
    return RULES["whole"](shapes, results, arguments)


rule("grouped_matmul", _grouped_matmul)


def _any_matmul(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    a, b = (len(shape) for shape in known(shapes))
    if a == 1 and b == 1:
        equation = "k, k -> "
    elif b == 1:
        equation = "... m k, k -> ... m"
    elif a == 1:
        equation = "k, ... k n -> ... n"
    else:
        equation = "... m k, ... k n -> ... m n"
    return from_equation(equation, shapes, results, reduce="k", linear=(frozenset({0}), frozenset({1})))


rule("any_matmul", _any_matmul)


def _einsum(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
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
    return from_equation(
        ", ".join(spaced[:-1]) + " -> " + spaced[-1],
        shapes,
        results,
        reduce=[letter for letter in summed if letter not in repeated],
        whole=repeated,
        linear=[frozenset({i}) for i in range(len(known(shapes)))],
    )


rule("einsum", _einsum)


# ---- reductions ----
def _reduction(op: str, linear: bool = False, passes: frozenset[str] = LINEAR) -> Rule:
    def build(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
        (shape,) = known(shapes)
        ndim = len(shape)
        reduced = dims_argument(arguments.get("dim"), ndim)
        keep = bool(arguments.get("keepdim"))
        result = tuple(None if d in reduced else d for d in range(ndim) if keep or d not in reduced)
        return FactorMap(
            operands=(tuple(range(ndim)),),
            results=tuple(result for _ in results),
            reduce=dict.fromkeys(reduced, op) if op else {},
            whole=frozenset() if op else frozenset(reduced),
            full=frozenset(reduced) if op in ("max", "min") else frozenset(),
            linear=(frozenset({0}),) if linear else (),
            passes=passes,
        )

    return build


def _histogram(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Counts between given bounds are sums over all elements."""
    dims = tuple(range(len(known(shapes)[0])))
    return FactorMap((dims,), ((None,),), reduce=dict.fromkeys(dims, "sum"))


rule("histogram", _histogram)
rule("sum", _reduction("sum", linear=True))
rule("mean", _reduction("sum", linear=True))
rule("max", _reduction("max"))  # any
rule("min", _reduction("min"))  # all
rule("amax", _reduction("max", linear=True, passes=frozenset({"max"})))
rule("amin", _reduction("min", linear=True, passes=frozenset({"min"})))
rule("product", _reduction("product"))


def _statistics(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """var, std: as above, but torch warns of parts that are empty."""
    made = _reduction("")(shapes, results, arguments)
    return dataclasses.replace(made, full=frozenset(made.operands[0]) - {None})  # type: ignore[arg-type]


rule("statistics", _statistics)
rule("whole_reduction", _reduction(""))  # argmax, var, norm: the reduced dims are gathered first


def _whole_dims(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Results have the operand's dims (sizes of the whole ones may differ): softmax, cumsum, topk, sort."""
    given = known(shapes)
    made = pointwise_factors(given[:1], [given[0]] * len(results))
    whole = dims_argument(arguments.get("dim"), len(given[0]))
    return FactorMap(made.operands, made.results, whole=frozenset(whole))


rule("whole_dims", _whole_dims)


def _linear_whole_dims(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    made = _whole_dims(shapes, results, arguments)
    return FactorMap(made.operands, made.results, whole=made.whole, linear=(frozenset({0}),))


rule("linear_whole_dims", _linear_whole_dims)  # cumsum, tril


def _pad(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Padded dims (``dim``, a tuple) are whole.

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


rule("pad", _pad)


def _whole_all(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Everything is gathered first: the result is what a single device makes of it."""
    given = known(shapes)
    return FactorMap(
        operands=tuple((None,) * len(shape) for shape in given),
        results=tuple((None,) * len(shape) if shape is not None else () for shape in results),
    )


rule("whole", _whole_all)


def _norm(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """layer_norm, rms_norm: the trailing dims are whole; weight and bias carry them."""
    given = known(shapes)
    ndim = len(given[0])
    tail = len(arguments["normalized_shape"])
    factors = tuple(range(ndim))
    return FactorMap(
        operands=(factors, *(factors[ndim - len(shape) :] for shape in given[1:])),
        results=(factors,),
        whole=frozenset(factors[ndim - tail :]),
    )


rule("norm", _norm)


# ---- attention and losses ----
def _attention(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
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
        return _whole_all(shapes, results, arguments)
    if mask is not None:
        full: Dims = (*lead, names["h"], names["q"], names["s"])
        tail = full[len(full) - len(mask) :]
        operands.append(tuple(None if size == 1 else factor for size, factor in zip(mask, tail, strict=True)))
    return FactorMap(
        operands=tuple(operands),
        results=((*lead, names["h"], names["q"], names["e"]),),
        whole=frozenset({names["q"], names["d"], names["s"], names["e"]}),
        even=frozenset({names["h"]}),
    )


rule("attention", _attention)


def _cross_entropy(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Logits ``n c ...``, target ``n ...``: classes are whole; rows may be sharded, their sum is then partial."""
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
        whole=frozenset({classes}),
    )


rule("cross_entropy", _cross_entropy)
