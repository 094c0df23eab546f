"""The layouts of an autograd function of a user's own, by the rule that it names."""

from __future__ import annotations

from collections.abc import Sequence

from hp_dtensor.rules.factors import Solution, solve
from hp_dtensor.rules.library import RULES
from hp_dtensor.spec import TensorSpec

__all__ = ["plan_function"]


def plan_function(name: str, specs: Sequence[TensorSpec], itemsizes: Sequence[int]) -> tuple[Solution, TensorSpec]:
    """Where the operands must be, and the layout of the one result, whose shape the rule's factors give.

    Args:
        name: the rule.
        specs: the operands' layouts.
        itemsizes: bytes an element of each operand.

    Raises:
        ValueError: no such rule, or operands on different meshes.
    """
    if name not in RULES:
        raise ValueError(f"_op_name is {name!r}, the rules are {sorted(RULES)}")
    mesh = specs[0].mesh
    if any(spec.mesh != mesh for spec in specs):
        raise ValueError(f"{name}: operands are on different meshes; redistribute them to one mesh first")
    shapes = [spec.shape for spec in specs]
    factors = RULES[name](shapes, [shapes[0]], {})
    sizes: dict[int, int] = {}
    for dims, shape in zip(factors.operands, shapes, strict=True):
        for factor, size in zip(dims, shape, strict=True):
            if factor is not None:
                sizes[factor] = max(size, sizes.get(factor, 0))
    result = tuple(1 if factor is None else sizes[factor] for factor in factors.results[0])
    found = solve(factors, shapes, [spec.placements for spec in specs], mesh.shape, itemsizes, [result])
    return found, TensorSpec.of(mesh, found.results[0], result)
