"""The table of MindSpore's kernels with their rules, and how an entry is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.rules.planning import Binding, Call, binding_of

BINDINGS: dict[str, Binding] = {}


def bind(
    rule: str,
    kernels: str,
    shapes: Callable[[Call], Any],
    signature: str | None = None,
    operands: str | None = None,
    **options: Any,
) -> None:
    """Bind kernels to a rule.

    Example:
        >>> bind("whole_dims", "Softmax", shapes.same, "input dim=-1", "input")

    Args:
        rule: name of a rule of ``hp_dtensor.rules``, or ``"view"``.
        kernels: names of kernels, separated by blanks.
        shapes: makes the results' global shapes.
        signature: see ``binding_of``.
        operands: see ``binding_of``.
        options: other fields of ``Binding``.

    Raises:
        ValueError: no such rule.
    """
    for name in kernels.split():
        BINDINGS[name] = binding_of(rule, signature, operands, shapes=shapes, **options)
