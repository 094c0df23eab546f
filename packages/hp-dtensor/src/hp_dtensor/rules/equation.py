"""The rule language: one line of factors an operation.

    rule("... m k, ... k n -> ... m n | ... m k, k -> ... m", reduce="k", linear="0 1")
    rule("...+ -> ...+", linear="each")
    rule("* -> * - dim", reduce="dim:max", full="dim")

Operands are separated by commas, dims by blanks, and alternatives by ``|``: the first whose ranks fit is the rule of a
call, and ``whole`` at the end gathers everything where none does.

- ``...`` stands for leading dims that broadcast against each other; ``...+ -> ...+`` is any number of operands and
  results, element by element.
- ``*`` stands for all dims of the one operand, and ``dim`` for those that the argument ``dim`` names (None: all);
  ``* - dim`` is what a reduction leaves of them, with and without ``keepdim``. All results of such a line are alike.

What no line says is a function of the shapes and the arguments instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hp_dtensor.layout.placements import PARTIAL_OPS
from hp_dtensor.rules.factors import LINEAR, Dims, FactorMap

__all__ = ["Rule", "Shapes", "dims_argument", "gather_all", "known", "pointwise_factors", "rule"]

Shapes = Sequence["Sequence[int] | None"]
Rule = Callable[[Shapes, Shapes, Mapping[str, Any]], FactorMap]
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Options:
    """What a rule says beside its equation, by the names of factors."""

    reduce: tuple[tuple[str, str], ...]
    whole: tuple[str, ...]
    even: tuple[str, ...]
    full: tuple[str, ...]
    runs: tuple[str, ...]
    linear: str
    once: tuple[int, ...]
    passes: frozenset[str]
    unless: str
    dim: int | None
    forgetful: bool

    def names(self) -> set[str]:
        return {*(name for name, _ in self.reduce), *self.whole, *self.even, *self.full, *self.runs}

    def linear_in(self, operands: int, arguments: Mapping[str, Any]) -> tuple[frozenset[int], ...]:
        if (self.unless and arguments.get(self.unless)) or any(operand < operands for operand in self.once):
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
            whole=of(self.whole),
            even=of(self.even),
            full=of(self.full),
            runs=of(self.runs),
            linear=self.linear_in(len(operands), arguments),
            passes=self.passes,
            once=frozenset(self.once),
        )


def rule(
    equation: str,
    *,
    reduce: str = "",
    whole: str = "",
    even: str = "",
    full: str = "",
    runs: str = "",
    linear: str = "",
    once: str = "",
    passes: str = "",
    unless: str = "",
    dim: int | None = None,
    forgetful: bool = False,
) -> Rule:
    """Read a line of the rule language.

    Args:
        equation: factors of the operands and results (see the module).
        reduce: factors that are summed over, or ``dim:max`` for another reduction; sharding one gives partial results.
        whole: factors that must not be sharded.
        even: factors that may be sharded only in equal parts.
        full: factors of which no rank may hold an empty shard.
        runs: factors that may be sharded in runs only, not in strides: the local part knows where it begins.
        linear: operands (by number, separated by blanks) in each of which the operation is linear by itself; ``0+1``
            where it is linear in both together, ``each`` or ``all`` (together) of however many there are, ``several``
            for all together where there are two or more.
        once: operands (by number) that one rank alone adds, where a summed factor is sharded: a bias. With it the
            operation is not linear.
        passes: reductions whose parts pass through where the operation is linear, or ``any``; default sum and average.
        unless: an argument with which, where it is true, the operation is linear in nothing.
        dim: the argument ``dim`` of calls that have none.
        forgetful: the values of the operands don't matter.

    Raises:
        ValueError: the equation has no ``->``, or a factor is named that it does not have.
    """
    by_name = [
        tuple((name, op or "sum") for name, _, op in (each.partition(":") for each in reduce.split())),
        *(tuple(names.split()) for names in (whole, even, full, runs)),
    ]
    passing = frozenset(PARTIAL_OPS) if passes == "any" else frozenset(passes.split()) or LINEAR
    adding = tuple(int(i) for i in once.split())
    options = _Options(*by_name, linear, adding, passing, unless, dim, forgetful)  # type: ignore[arg-type]
    alternatives = [each for each in map(str.strip, equation.split("|")) if each != "whole"]
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


def known(shapes: Shapes) -> list[Sequence[int]]:
    """Return the shapes of the operands that are there."""
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
    """Gather everything first: the result is what a single device makes of it."""
    return FactorMap(
        operands=tuple((None,) * len(shape) for shape in known(shapes)),
        results=tuple((None,) * len(shape) if shape is not None else () for shape in results),
    )


# ---- element by element ----
def pointwise_factors(
    shapes: Shapes,
    results: Shapes,
    linear: tuple[frozenset[int], ...] = (),
    passes: frozenset[str] = LINEAR,
    forgetful: bool = False,
) -> FactorMap:
    """Let operands broadcast against each other; dim ``k`` of the result is factor ``k``."""
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
        linear=linear,
        passes=passes,
        elementwise=True,
        forgetful=forgetful,
    )


def _elementwise(
    equation: str, options: _Options, shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]
) -> FactorMap:
    count = len(known(shapes))
    if count > 1 and "+" not in equation:
        raise ValueError(f"operands of shapes {known(shapes)} do not fit {equation!r}")
    return pointwise_factors(shapes, results, options.linear_in(count, arguments), options.passes, options.forgetful)


# ---- all dims of one operand ----
def _by_position(
    result: str, options: _Options, shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]
) -> FactorMap:
    given = known(shapes)
    if len(given) > 1 and result != "*":
        raise ValueError(f"operands of shapes {[tuple(shape) for shape in given]} do not fit '* -> {result}'")
    ndim = len(given[0])
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
    """The dims of an operand or a result, and before which of them stands ``...``, if anywhere."""

    names: tuple[str, ...]
    dots: int | None

    def fits(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.names) or (self.dots is not None and len(shape) > len(self.names))

    def keys(self, ndim: int) -> tuple[Any, ...]:
        """Return the factor of each dim by name, those of ``...`` by their place from the right: -1, -2."""
        if ndim == len(self.names):
            return self.names
        return (*self.names[: self.dots], *range(len(self.names) - ndim, 0), *self.names[self.dots :])


def _read(alternative: str) -> tuple[list[_Term], list[_Term]]:
    def terms(text: str) -> list[_Term]:
        made = []
        for tokens in map(str.split, text.split(",")):
            names = tuple(token for token in tokens if token != "...")
            made.append(_Term(names, tokens.index("...") if "..." in tokens else None))
        return made

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
    given, outs = known(shapes), known(results)
    chosen = next((each for each in alternatives if _fit(each[0], given)), None)
    if chosen is None:
        if equation.endswith("whole"):
            return gather_all(shapes, results)
        raise ValueError(f"operands of shapes {[tuple(shape) for shape in given]} do not fit {equation!r}")
    left, right = chosen
    if not _fit(right, outs):
        raise ValueError(f"results of shapes {[tuple(shape) for shape in outs]} do not fit {equation!r}")
    factors: dict[Any, int] = {}
    sizes: list[int] = []
    every: list[list[tuple[int, int]]] = []
    for term, shape in zip((*left, *right), (*given, *outs), strict=True):
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
