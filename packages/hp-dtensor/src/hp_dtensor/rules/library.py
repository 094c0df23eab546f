"""The sharding rules of the operations, framework-neutral.

Arguments that a rule reads have the names used here; each framework folder maps its functions to these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hp_dtensor.rules.equation import RULES, Rule, Shapes, from_equation, rule
from hp_dtensor.rules.factors import Dims, FactorMap

__all__ = ["dims_argument"]


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


def _known(shapes: Shapes) -> list[Sequence[int]]:
    return [shape for shape in shapes if shape is not None]


# ---- element by element ----
def pointwise_factors(shapes: Shapes, results: Shapes, linear: Iterable[frozenset[int]] = ()) -> FactorMap:
    """Operands broadcast against each other; dim ``k`` of the result is factor ``k``."""
    given = _known(shapes)
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
        given = len(_known(shapes))
        return pointwise_factors(shapes, results, () if arguments.get("rounding_mode") else linear_of(given))

    return build


rule("pointwise", _pointwise(lambda n: ()))
rule("add", _pointwise(lambda n: (frozenset(range(n)),) if n > 1 else ()))  # x + 1 is not linear in x
rule("mul", _pointwise(lambda n: tuple(frozenset({i}) for i in range(n))))
rule("div", _pointwise(lambda n: (frozenset({0}),)))
rule("linear_unary", _pointwise(lambda n: (frozenset({0}),) if n == 1 else ()))


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
rule("embedding", "..., v d -> ... d", reduce="v")


def _linear(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    given = _known(shapes)
    return RULES["linear_bias" if len(given) == 3 else "linear_plain"](given, results, arguments)


rule("linear", _linear)


def _any_matmul(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    a, b = (len(shape) for shape in _known(shapes))
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
        linear=[frozenset({i}) for i in range(len(_known(shapes)))],
    )


rule("einsum", _einsum)


# ---- reductions ----
def _reduction(op: str, linear: bool = False) -> Rule:
    def build(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
        (shape,) = _known(shapes)
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
        )

    return build


rule("sum", _reduction("sum", linear=True))
rule("mean", _reduction("sum", linear=True))
rule("max", _reduction("max"))
rule("min", _reduction("min"))
rule("product", _reduction("product"))
rule("whole_reduction", _reduction(""))  # argmax, var, norm: the reduced dims are gathered first


def _whole_dims(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Results have the operand's dims (sizes of the whole ones may differ): softmax, cumsum, topk, sort."""
    given = _known(shapes)
    made = pointwise_factors(given[:1], [given[0]] * len(results))
    whole = dims_argument(arguments.get("dim"), len(given[0]))
    return FactorMap(made.operands, made.results, whole=frozenset(whole))


rule("whole_dims", _whole_dims)


def _linear_whole_dims(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    made = _whole_dims(shapes, results, arguments)
    return FactorMap(made.operands, made.results, whole=made.whole, linear=(frozenset({0}),))


rule("linear_whole_dims", _linear_whole_dims)  # cumsum, flip, roll, tril, narrow


def _pad(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Padded dims (``dim``, a tuple) are whole.

    ``linear``: what is added is zero, or comes from the operand; ``full``: the kernel takes no empty shard.
    """
    (shape,) = _known(shapes)
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
    given = _known(shapes)
    return FactorMap(
        operands=tuple((None,) * len(shape) for shape in given),
        results=tuple((None,) * len(shape) if shape is not None else () for shape in results),
    )


rule("whole", _whole_all)


def _norm(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """layer_norm, rms_norm: the trailing dims are whole; weight and bias carry them."""
    given = _known(shapes)
    ndim = len(given[0])
    tail = len(arguments["normalized_shape"])
    factors = tuple(range(ndim))
    return FactorMap(
        operands=(factors, *(factors[ndim - len(shape) :] for shape in given[1:])),
        results=(factors,),
        whole=frozenset(factors[ndim - tail :]),
    )


rule("norm", _norm)


# ---- moving dims ----
def _permute(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    (shape,) = _known(shapes)
    order = arguments["order"]
    return FactorMap((tuple(range(len(shape))),), (tuple(order),), linear=(frozenset({0}),))


rule("permute", _permute)


def _expand(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    shape = _known(shapes)[0]
    (result,) = _known(results)
    lead = len(result) - len(shape)
    kept = [size == result[lead + d] for d, size in enumerate(shape)]
    return FactorMap(
        operands=(tuple(d if keep else None for d, keep in enumerate(kept)),),
        results=((None,) * lead + tuple(d if keep else None for d, keep in enumerate(kept)),),
        linear=(frozenset({0}),),
    )


rule("expand", _expand)


def _cat(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    given = _known(shapes)
    dims = tuple(range(max(len(shape) for shape in given)))
    (dim,) = dims_argument(arguments.get("dim", 0), len(dims))
    return FactorMap(
        # an empty 1-d tensor is passed over
        operands=tuple(dims if len(shape) == len(dims) else (None,) for shape in given),
        results=(dims,),
        whole=frozenset({dim}),
        linear=(frozenset(range(len(given))),),
    )


rule("cat", _cat)


def _stack(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    given = _known(shapes)
    dims = tuple(range(len(given[0])))
    (at,) = dims_argument(arguments.get("dim", 0), len(dims) + 1)
    return FactorMap(
        operands=(dims,) * len(given), results=((*dims[:at], None, *dims[at:]),), linear=(frozenset(range(len(given))),)
    )


rule("stack", _stack)


def _index(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Indexing: ``kept`` lists, for each dim of the result, the dim of the operand that it is in full, or None."""
    shape = _known(shapes)[0]
    kept = arguments["kept"]
    return FactorMap(
        operands=(
            tuple(d if d in kept else None for d in range(len(shape))),
            *((None,) * len(other) for other in _known(shapes)[1:]),
        ),
        results=(tuple(kept),),
        linear=(frozenset({0}),),
    )


rule("index", _index)


def _unbind(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    (shape,) = _known(shapes)
    (dim,) = dims_argument(arguments.get("dim", 0), len(shape))
    kept = tuple(d for d in range(len(shape)) if d != dim)
    return FactorMap(
        (tuple(d if d != dim else None for d in range(len(shape))),), (kept,) * len(results), linear=(frozenset({0}),)
    )


rule("unbind", _unbind)


def _gather(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """gather: dims where operand and index have one size are shared; the gathered dim and the others are whole."""
    given = _known(shapes)
    if arguments["dim"] is None:  # take_along_dim of the flattened operand
        return _whole_all(shapes, results, arguments)
    (dim,) = dims_argument(arguments["dim"], len(given[0])) or (0,)
    same = [d != dim and all(shape[d] == given[0][d] for shape in given) for d in range(len(given[0]))]
    dims = tuple(d if keep else None for d, keep in enumerate(same))
    return FactorMap((dims,) * len(given), (dims,) * len(results))


rule("gather", _gather)


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
