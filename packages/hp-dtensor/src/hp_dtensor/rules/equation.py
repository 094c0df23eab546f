"""The rule language: one line of factors an operation.

    rule("... m k, ... k n -> ... m n | ... m k, k -> ... m", reduce="k", linear="0 1")
    rule("...+ -> ...+", linear="each")
    rule("* -> * - dim", reduce="dim:max", nonempty="dim")

Operands are separated by commas, dims by blanks, and alternatives by ``|``. The first alternative that fits the
operands' numbers of dims is used; ``replicate`` at the end replicates everything if none fits.

- ``...`` stands for leading dims that broadcast against each other; ``...+ -> ...+`` is any number of operands and
  results, element by element.
- ``*`` stands for all dims of the only operand, and ``dim`` for those that the argument ``dim`` names (None: all);
  ``* - dim`` are the dims that remain after a reduction, with and without ``keepdim``. All results of such a line have
  the same dims.

A rule that no line can express is a function of the shapes and the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hp_dtensor.layout.placements import PARTIAL_OPS
from hp_dtensor.rules.factors import LINEAR, Dims, FactorMap

Shapes = Sequence["Sequence[int] | None"]
Rule = Callable[[Shapes, Shapes, Mapping[str, Any]], FactorMap]
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Options:
    """The keyword arguments of a rule, with factors by name."""

    reduce: tuple[tuple[str, str], ...]
    need_replication: tuple[str, ...]
    even: tuple[str, ...]
    nonempty: tuple[str, ...]
    contiguous: tuple[str, ...]
    linear: str
    bias: tuple[int, ...]
    passes: frozenset[str]
    unless: str
    dim: int | None
    value_independent: bool

    def names(self) -> set[str]:
        return {
            *(name for name, _ in self.reduce),
            *self.need_replication,
            *self.even,
            *self.nonempty,
            *self.contiguous,
        }

    def linear_in(self, operands: int, arguments: Mapping[str, Any]) -> tuple[frozenset[int], ...]:
        if (self.unless and arguments.get(self.unless)) or any(operand < operands for operand in self.bias):
            return ()
        return _linear_sets(self.linear, operands)

    def factor_map(
        self,
        operands: tuple[Dims, ...],
        results: tuple[Dims, ...],
        factors: Mapping[Any, Iterable[int]],
        arguments: Any,
    ) -> FactorMap:
        def of(names: Sequence[str]) -> frozenset[int]:
            return frozenset([factor for name in names for factor in factors.get(name, ())]) if names else _NONE

        return FactorMap(
            operands,
            results,
            reduce={factor: op for name, op in self.reduce for factor in factors.get(name, ())},
            need_replication=of(self.need_replication),
            even=of(self.even),
            nonempty=of(self.nonempty),
            contiguous=of(self.contiguous),
            linear=self.linear_in(len(operands), arguments),
            passes=self.passes,
            bias=frozenset(self.bias),
        )


def rule(
    equation: str,
    *,
    reduce: str = "",
    need_replication: str = "",
    even: str = "",
    nonempty: str = "",
    contiguous: str = "",
    linear: str = "",
    bias: str = "",
    passes: str = "",
    unless: str = "",
    dim: int | None = None,
    value_independent: bool = False,
) -> Rule:
    """Read a line of the rule language.

    Args:
        equation: factors of the operands and results; see the module's docstring.
        reduce: factors that are summed over, or ``dim:max`` for another reduction; sharding one gives partial results.
        need_replication: factors that must not be sharded.
        even: factors that may be sharded only into equal shards.
        nonempty: factors that may be sharded only if no rank's shard is empty.
        contiguous: factors that may be sharded only into contiguous ranges, because the local operation depends on
            where the shard begins.
        linear: operands (by number, separated by blanks) in each of which the operation is linear by itself; ``0+1``
            if it is linear in both together. For any number of operands: ``each``, ``all`` (together), or ``several``
            (``all`` if there are at least two, otherwise none).
        bias: operands (by number) that only one rank adds if a summed factor is sharded. The operation is then not
            linear.
        passes: reductions that pass through where the operation is linear, or ``any``; default sum and average.
        unless: an argument that, if true, makes the operation linear in no operand.
        dim: the argument ``dim`` of calls that have none.
        value_independent: the values of the operands don't matter.

    Raises:
        ValueError: the equation has no ``->``, or lacks a factor that another argument names.
    """
    by_name = [
        tuple((name, op or "sum") for name, _, op in (each.partition(":") for each in reduce.split())),
        *(tuple(names.split()) for names in (need_replication, even, nonempty, contiguous)),
    ]
    passing = frozenset(PARTIAL_OPS) if passes == "any" else frozenset(passes.split()) or LINEAR
    biases = tuple(int(i) for i in bias.split())
    options = _Options(*by_name, linear, biases, passing, unless, dim, value_independent)  # type: ignore[arg-type]
    alternatives = [each for each in map(str.strip, equation.split("|")) if each != "replicate"]
    if any("->" not in each for each in alternatives):
        raise ValueError(f"rule {equation!r} has no '->'")
    for name in sorted(options.names()):
        if name not in equation.replace(",", " ").split() and not (name == "dim" and "*" in equation):
            raise ValueError(f"rule {equation!r} has no factor {name!r}")
    if equation.replace("->", ",").replace("...+", "...").replace(",", " ").split() == ["...", "..."]:
        return partial(_elementwise, equation, options)
    if equation.startswith("*"):
        return partial(_by_position, equation.partition("->")[2].strip(), options)
    return partial(_by_rank, equation, [_read(each) for each in alternatives], options)


@functools.cache
def _linear_sets(linear: str, operands: int) -> tuple[frozenset[int], ...]:
    if linear == "each":
        return tuple(frozenset({operand}) for operand in range(operands))
    if linear in ("all", "several"):
        return () if linear == "several" and operands == 1 else (frozenset(range(operands)),)
    return tuple(frozenset(int(operand) for operand in group.split("+")) for group in linear.split())


def present(shapes: Shapes) -> list[Sequence[int]]:
    """Return the shapes that are not None."""
    return [shape for shape in shapes if shape is not None]


def dims_argument(value: Any, ndim: int) -> tuple[int, ...]:
    """Return a ``dim`` argument (None, an int or a sequence) as non-negative dims; None and ``()`` mean all.

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


def gather_all(shapes: Shapes, results: Shapes) -> FactorMap:
    """Replicate everything: the local operation is that of a single device."""
    return FactorMap(
        operands=tuple((None,) * len(shape) for shape in present(shapes)),
        results=tuple((None,) * len(shape) if shape is not None else () for shape in results),
    )


# ---- element by element ----
def pointwise_factors(
    shapes: Shapes,
    results: Shapes,
    linear: tuple[frozenset[int], ...] = (),
    passes: frozenset[str] = LINEAR,
    value_independent: bool = False,
) -> FactorMap:
    """Let operands broadcast against each other; dim ``k`` of the result is factor ``k``."""
    operands = present(shapes)
    ndim = max(len(shape) for shape in operands)
    size = [
        max((shape[k - ndim + len(shape)] for shape in operands if k - ndim + len(shape) >= 0), default=1)
        for k in range(ndim)
    ]
    zero = [
        any(shape[k - ndim + len(shape)] == 0 for shape in operands if k - ndim + len(shape) >= 0) for k in range(ndim)
    ]

    def dims(shape: Sequence[int]) -> Dims:
        start = ndim - len(shape)
        return tuple(
            None if s == 1 and (size[start + k] != 1 or zero[start + k]) else start + k for k, s in enumerate(shape)
        )

    return FactorMap(
        operands=tuple(dims(shape) for shape in operands),
        results=tuple(dims(shape) if shape is not None else () for shape in results),
        linear=linear,
        passes=passes,
        elementwise=True,
        value_independent=value_independent,
    )


def _elementwise(
    equation: str, options: _Options, shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]
) -> FactorMap:
    count = len(present(shapes))
    if count > 1 and "+" not in equation:
        raise ValueError(f"operands of shapes {present(shapes)} do not fit {equation!r}")
    return pointwise_factors(
        shapes, results, options.linear_in(count, arguments), options.passes, options.value_independent
    )


# ---- all dims of one operand ----
def _by_position(
    result: str, options: _Options, shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]
) -> FactorMap:
    operands = present(shapes)
    if len(operands) > 1 and result != "*":
        raise ValueError(f"operands of shapes {[tuple(shape) for shape in operands]} do not fit '* -> {result}'")
    ndim = len(operands[0])
    every = tuple(range(ndim))
    named = dims_argument(arguments.get("dim", options.dim), ndim)
    out: Dims = every
    if result == "* - dim":
        keep = bool(arguments.get("keepdim"))
        out = tuple(None if d in named else d for d in every if keep or d not in named)
    elif result != "*":
        out = (None,) * len(result.split())
    return options.factor_map((every,), (out,) * len(results), {"*": every, "dim": named}, arguments)


# ---- by the operands' ranks ----
@dataclass(frozen=True, slots=True)
class _Term:
    """The dims of an operand or a result, and the index of the one after ``...``, or None without ``...``."""

    names: tuple[str, ...]
    dots: int | None

    def fits(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.names) or (self.dots is not None and len(shape) > len(self.names))

    def keys(self, ndim: int) -> tuple[Any, ...]:
        """Return the factor of each dim by name, those of ``...`` by their position from the right: -1, -2."""
        if ndim == len(self.names):
            return self.names
        return (*self.names[: self.dots], *range(len(self.names) - ndim, 0), *self.names[self.dots :])


def _read(alternative: str) -> tuple[list[_Term], list[_Term]]:
    def terms(text: str) -> list[_Term]:
        read_terms = []
        for tokens in map(str.split, text.split(",")):
            names = tuple(token for token in tokens if token != "...")
            read_terms.append(_Term(names, tokens.index("...") if "..." in tokens else None))
        return read_terms

    left, right = alternative.split("->")
    return terms(left), terms(right)


def _fit(terms: Sequence[_Term], shapes: Sequence[Sequence[int]]) -> bool:
    return len(terms) == len(shapes) and all(term.fits(shape) for term, shape in zip(terms, shapes, strict=True))


def _by_rank(
    equation: str,
    alternatives: Sequence[tuple[list[_Term], list[_Term]]],
    options: _Options,
    shapes: Shapes,
    results: Shapes,
    arguments: Mapping[str, Any],
) -> FactorMap:
    operands, outs = present(shapes), present(results)
    chosen = next((each for each in alternatives if _fit(each[0], operands)), None)
    if chosen is None:
        if equation.endswith("replicate"):
            return gather_all(shapes, results)
        raise ValueError(f"operands of shapes {[tuple(shape) for shape in operands]} do not fit {equation!r}")
    left, right = chosen
    if not _fit(right, outs):
        raise ValueError(f"results of shapes {[tuple(shape) for shape in outs]} do not fit {equation!r}")
    factors: dict[Any, int] = {}
    sizes: list[int] = []
    every: list[list[tuple[int, int]]] = []
    for term, shape in zip((*left, *right), (*operands, *outs), strict=True):
        dims = []
        for key, size in zip(term.keys(len(shape)), shape, strict=True):
            factor = factors.setdefault(key, len(sizes))
            if factor == len(sizes):
                sizes.append(size)
            elif size > sizes[factor]:
                sizes[factor] = size
            dims.append((factor, size))
        every.append(dims)
    broadcast = [tuple(None if size == 1 and sizes[factor] != 1 else factor for factor, size in dims) for dims in every]
    return options.factor_map(
        tuple(broadcast[: len(left)]),
        tuple(broadcast[len(left) :]),
        {name: (factor,) for name, factor in factors.items()},
        arguments,
    )
