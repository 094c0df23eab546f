"""The sharding rules of products, framework-neutral, that are functions of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_dtensor.rules.equation import Shapes, known, rule
from hp_dtensor.rules.factors import FactorMap

__all__ = ["bias_add", "einsum", "matmul_transposed", "rows"]


def einsum(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """The argument ``equation`` is the rule; letters that an operand has twice are whole."""
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
        whole=" ".join(repeated),
        linear="each",
    )
    return line(shapes, results, arguments)


def matmul_transposed(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """A product whose operands are read transposed where ``transpose_a`` and ``transpose_b`` say so."""
    a = "... k m" if arguments["transpose_a"] else "... m k"
    b = "... n k" if arguments["transpose_b"] else "... k n"
    return rule(f"{a}, {b} -> ... m n", reduce="k", linear="0 1")(shapes, results, arguments)


def rows(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Rows of dim ``axis``: of dim 0 it is an embedding, whose rows may be sharded; another dim is whole."""
    source, index = known(shapes)
    dim = arguments["axis"]
    inner = [f"s{d}" for d in range(len(source))]
    looked = " ".join(f"i{d}" for d in range(len(index)))
    out = " ".join([*inner[:dim], looked, *inner[dim + 1 :]])
    line = f"{' '.join(inner)}, {looked} -> {out}"
    found = rule(line, whole=inner[dim]) if dim else rule(line, reduce=inner[dim])
    return found(shapes, results, arguments)


def bias_add(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """A sum, of which the bias is a part once: dim ``channel`` of the input is the bias's only one."""
    dims = " ".join(f"d{d}" for d in range(len(known(shapes)[0])))
    return rule(f"{dims}, d{arguments['channel']} -> {dims}", linear="0+1")(shapes, results, arguments)
