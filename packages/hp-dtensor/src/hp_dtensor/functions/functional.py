"""Custom autograd functions on DTensors: the operands' layouts follow from the rule that the function names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor import port
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.rules.factors import Solution, solve
from hp_dtensor.rules.library import RULES


def apply_function(function: Any, apply: Callable[..., Any], args: Sequence[Any], tensor: type) -> Any:
    """Run a `DFunction` on Tensors or DTensors.

    Args:
        function: the class; its ``_op_name`` names the rule.
        apply: the framework's own ``apply`` of it, which sees local tensors.
        args: its arguments.
        tensor: the framework's tensor class.

    Raises:
        ValueError: ``_op_name`` names no rule, Tensors and DTensors are mixed, or DTensors are on different meshes.
    """
    f, convert = port.tensors(), port.gradients().convert
    tensors = [value for value in args if isinstance(value, tensor)]
    dtensors = [value for value in tensors if isinstance(value, f.DTensor)]
    if not dtensors:
        return apply(*args)
    if len(dtensors) != len(tensors):
        raise ValueError(f"{function.__name__}: plain tensors and DTensors are mixed; distribute the plain ones")
    itemsizes = [f.local_view(value).itemsize for value in dtensors]
    if not function._op_name:
        raise ValueError(
            f"{function.__name__} is a DFunction without a rule: set its class attribute _op_name to one of"
            f" {sorted(RULES)}, by which layouts of its result and operands follow from each other"
        )
    solution, spec = _solve(function._op_name, [value._spec for value in dtensors], itemsizes)
    layouts = iter(zip(solution.operands, solution.vary, strict=True))
    local = []
    for value in args:
        if isinstance(value, f.DTensor):
            placements, vary = next(layouts)
            axes = tuple(v and p.is_replicate() for v, p in zip(vary, placements, strict=True))
            target = value._spec.with_placements(placements)
            value = f.local_of(convert(value, target, axes if any(axes) else None))
        local.append(value)
    return f.wrap(apply(*local), spec)


def _solve(name: str, specs: Sequence[TensorSpec], itemsizes: Sequence[int]) -> tuple[Solution, TensorSpec]:
    """Return the operands' placements and the layout of the one result, whose shape follows from the rule's factors.

    Args:
        name: the rule.
        specs: the operands' layouts.
        itemsizes: bytes per element of each operand.
    """
    if name not in RULES:
        raise ValueError(f"Unknown rule {name!r} in _op_name; expected one of {sorted(RULES)}")
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
    solution = solve(factors, shapes, [spec.placements for spec in specs], mesh.shape, itemsizes, [result])
    return solution, TensorSpec.of(mesh, solution.results[0], result)
