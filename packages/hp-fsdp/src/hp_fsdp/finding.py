"""Which parameters of a module fall to its group."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

__all__ = ["find_parameters"]

P = TypeVar("P")


def find_parameters(
    module: Any,
    ignored: Collection[Any],
    stop: type,
    make: Callable[[str, Any], P],
    *,
    parameters: str,
    children: str,
) -> list[P]:
    """The parameters of ``module`` that no inner group has, each once, in the order of registration.

    Args:
        module: the group's module.
        ignored: parameters to leave as they are.
        stop: submodules of this class are groups themselves and are not entered.
        make: makes a managed parameter of a name and a parameter; its ``places`` list is filled here.
        parameters: the attribute of modules that maps names to parameters.
        children: the attribute that maps names to modules.

    Raises:
        ValueError: a parameter that another group has already.
    """
    skip = {id(parameter) for parameter in ignored}
    found: dict[int, Any] = {}
    seen: set[int] = set()

    def visit(current: Any, prefix: str) -> None:
        if id(current) in seen:
            return
        seen.add(id(current))
        for name, parameter in getattr(current, parameters).items():
            if parameter is None or id(parameter) in skip:
                continue
            managed: Any = found.get(id(parameter))
            if managed is None:
                owner = getattr(parameter, "_hsdp_owner", None)
                if owner is not None:
                    raise ValueError(
                        f"fully_shard: parameter {prefix + name!r} of {type(module).__name__} is that of a group"
                        f" already: {owner}. Call fully_shard on inner modules before outer ones; where it is tied,"
                        " don't call it on either of the modules that share it, so that both fall to the group of a"
                        " module around them"
                    )
                managed = found[id(parameter)] = make(prefix + name, parameter)
            managed.places.append((current, name))
        for name, child in getattr(current, children).items():
            if child is not None and not isinstance(child, stop):
                visit(child, f"{prefix}{name}.")

    visit(module, "")
    return list(found.values())
