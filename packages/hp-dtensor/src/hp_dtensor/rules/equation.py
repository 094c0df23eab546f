"""The rule language: one line of factors an operation.

    rule("matmul",    "... m k, ... k n -> ... m n", reduce="k", linear="0 1")
    rule("embedding", "..., v d -> ... d",           reduce="v")

Operands are separated by commas, dims by blanks, and ``...`` stands for leading dims that broadcast against each other.
A rule that depends on arguments (``sum`` over ``dim``) is a function of the shapes and the arguments instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hp_dtensor.rules.factors import Dims, FactorMap

__all__ = ["RULES", "Rule", "from_equation", "rule"]

Shapes = Sequence["Sequence[int] | None"]
Rule = Callable[[Shapes, Shapes, Mapping[str, Any]], FactorMap]

RULES: dict[str, Rule] = {}


def rule(
    name: str,
    equation: str | Rule,
    *,
    reduce: str = "",
    whole: str = "",
    even: str = "",
    linear: str = "",
    once: str = "",
    runs: str = "",
) -> None:
    """Defines the sharding rule of an operation.

    Args:
        name: the operation.
        equation: factors of the operands and results (see the module), or a function
            ``(operand shapes, result shapes, arguments) -> FactorMap``.
        reduce: factors that are summed over; sharding one gives partial results.
        whole: factors that must not be sharded.
        even: factors that may be sharded only in equal parts.
        linear: operands (by number, separated by blanks) in each of which the operation is linear by itself; ``0+1``
            where it is linear in both together.
        once: operands (by number) that one rank alone adds, where a summed factor is sharded: a bias.
        runs: factors that may be sharded in runs only, not in strides: the local part knows where it begins.

    Raises:
        ValueError: the name is taken, or a factor is named that the equation does not have.
    """
    if name in RULES:
        raise ValueError(f"rule {name!r} exists already")
    if callable(equation):
        RULES[name] = equation
        return
    if "->" not in equation:
        raise ValueError(f"rule {name!r}: the equation {equation!r} has no '->'")
    for factor in f"{reduce} {whole} {even} {runs}".split():
        if factor not in equation.replace(",", " ").split():
            raise ValueError(f"rule {name!r}: factor {factor!r} is not in {equation!r}")
    options = {
        "reduce": tuple(reduce.split()),
        "whole": tuple(whole.split()),
        "even": tuple(even.split()),
        "runs": tuple(runs.split()),
        "linear": tuple(frozenset(int(i) for i in group.split("+")) for group in linear.split()),
        "once": tuple(int(i) for i in once.split()),
    }
    RULES[name] = partial(_from_rule, equation, options)


def _from_rule(
    equation: str, options: Mapping[str, Any], shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]
) -> FactorMap:
    return from_equation(equation, shapes, results, **options)


def from_equation(
    equation: str,
    shapes: Shapes,
    results: Shapes,
    reduce: Sequence[str] = (),
    whole: Sequence[str] = (),
    even: Sequence[str] = (),
    linear: Sequence[frozenset[int]] = (),
    once: Sequence[int] = (),
    runs: Sequence[str] = (),
) -> FactorMap:
    """The FactorMap of an equation for given shapes; absent operands are None.

    Raises:
        ValueError: a shape has not the number of dims that the equation says.
    """
    left, right = equation.split("->")
    names: dict[Any, int] = {}
    sizes: dict[int, int] = {}

    def dims_of(tokens: list[str], shape: Sequence[int]) -> list[tuple[int, int]]:
        fixed = [token for token in tokens if token != "..."]
        batch = len(shape) - len(fixed)
        if batch < 0 or (batch > 0 and "..." not in tokens):
            raise ValueError(f"shape {tuple(shape)} does not fit {' '.join(tokens)!r} of {equation!r}")
        keys: list[Any] = []
        for token in tokens:
            keys.extend([("...", back) for back in range(batch, 0, -1)] if token == "..." else [token])
        made = []
        for key, size in zip(keys, shape, strict=True):
            factor = names.setdefault(key, len(names))
            sizes[factor] = max(sizes.get(factor, size), size)
            made.append((factor, size))
        return made

    def parse(text: str, given: Shapes) -> list[list[tuple[int, int]]]:
        terms = [term.split() for term in text.split(",")]
        return [dims_of(term, shape) for term, shape in zip(terms, given, strict=True) if shape is not None]

    operands, outs = parse(left, shapes), parse(right, results)

    def broadcast(term: list[tuple[int, int]]) -> Dims:
        return tuple(None if size == 1 and sizes[factor] != 1 else factor for factor, size in term)

    return FactorMap(
        operands=tuple(broadcast(term) for term in operands),
        results=tuple(broadcast(term) for term in outs),
        reduce={names[name]: "sum" for name in reduce if name in names},
        whole=frozenset(names[name] for name in whole if name in names),
        even=frozenset(names[name] for name in even if name in names),
        linear=tuple(linear),
        once=frozenset(once),
        runs=frozenset(names[name] for name in runs if name in names),
    )
