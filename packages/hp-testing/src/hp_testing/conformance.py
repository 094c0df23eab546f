"""Tell whether a framework's module supplies what a protocol declares."""

from __future__ import annotations

import inspect
from typing import Any


def mismatches(protocol: type, implementation: Any) -> list[str]:
    """Compare the members of a protocol with those of what implements it, a module or a class.

    Args:
        protocol: its functions are compared by the names and kinds of their parameters; the implementation
            may take more that have defaults. Properties and annotated attributes have to be there.
        implementation: of `hp_x.torch` or `hp_x.mindspore`.

    Returns:
        A line for each member that is missing or takes other arguments.
    """
    found = []
    for name in sorted(_members(protocol)):
        declared = getattr(protocol, name, None)
        actual = getattr(implementation, name, None)
        if actual is None:
            found.append(f"{name}: missing")
        elif inspect.isfunction(declared):
            expected, names = _parameters(declared)[1:], _parameters(actual)
            same = [each[:2] for each in names[: len(expected)]] == [each[:2] for each in expected]
            if not same or not all(optional for *_, optional in names[len(expected) :]):
                found.append(f"{name}: takes {_names(names)}, the protocol says {_names(expected)}")
    return found


def _members(protocol: type) -> set[str]:
    own = {name for name in vars(protocol) if not name.startswith("_")}
    return own | {name for name in getattr(protocol, "__annotations__", {}) if not name.startswith("_")}


def _parameters(function: Any) -> list[tuple[str, Any, bool]]:
    signature = inspect.signature(function)
    return [(each.name, each.kind, each.default is not each.empty) for each in signature.parameters.values()]


def _names(parameters: list[tuple[str, Any, bool]]) -> str:
    return f"({', '.join(name for name, *_ in parameters)})"
