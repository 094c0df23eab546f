"""The table of MindSpore's kernels with their rules, and how an entry is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.mindspore.ops.plans import Binding, Call
from hp_dtensor.rules.library import RULES

__all__ = ["BINDINGS", "bind"]

BINDINGS: dict[str, Binding] = {}


def _signature(text: str) -> tuple[tuple[str, Any], ...]:
    made: list[tuple[str, Any]] = []
    for token in text.split():
        name, _, default = token.partition("=")
        value: Any = {"None": None, "True": True, "False": False, "": None}.get(default, default)
        made.append((name, int(default) if default.lstrip("-").isdigit() else value))
    return tuple(made)


def bind(
    rule_name: str,
    kernels: str,
    shape: Callable[[Call], Any],
    signature: str | None = None,
    operands: str | None = None,
    **options: Any,
) -> None:
    """Binds kernels to a rule.

    Example:
        >>> bind("whole_dims", "Softmax", shapes.same, "input dim=-1", "input")

    Args:
        rule_name: name of a rule of ``hp_dtensor.rules``, or ``"view"``.
        kernels: names of kernels, separated by blanks.
        shape: makes the results' global shapes.
        signature: parameter names in positional order, ``name=default`` where they may be absent.
        operands: the tensor parameters that the rule reads, in its order; default every tensor argument.
        options: other fields of ``Binding``.

    Raises:
        ValueError: no such rule.
    """
    if rule_name != "view" and rule_name not in RULES:
        raise ValueError(f"bind: no rule {rule_name!r}; the rules are {sorted(RULES)}")
    binding = Binding(
        rule_name,
        shape,
        None if signature is None else _signature(signature),
        None if operands is None else tuple(operands.split()),
        **options,
    )
    for name in kernels.split():
        BINDINGS[name] = binding
