"""Which parameters of a module fall to its group."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from hp_fsdp.sharded_class import group_of

__all__ = ["find_parameters", "is_copy", "mark", "owner_of"]

P = TypeVar("P")


def mark(parameter: Any, owner: str) -> None:
    """Notes on a parameter that a group has it.

    Args:
        parameter: the object that stands in the modules.
        owner: text for the error where another group finds it, too.
    """
    parameter._hsdp_owner = (id(parameter), owner)  # a copy takes attributes along, and is nobody's


def owner_of(parameter: Any) -> str | None:
    """What `mark` noted; None for a parameter that no group has."""
    key, owner = getattr(parameter, "_hsdp_owner", None) or (None, None)
    return owner if key == id(parameter) else None


def is_copy(parameter: Any) -> bool:
    """Whether a parameter is a copy (``copy.deepcopy``) of one that a group has."""
    return getattr(parameter, "_hsdp_owner", None) is not None and owner_of(parameter) is None


def find_parameters(
    modules: Sequence[Any],
    ignored: Collection[Any],
    managed: type[P],
    own: Mapping[int, P] | None = None,
) -> list[P]:
    """Find the parameters of ``modules`` that no group has, each once, in the order of registration.

    Modules inside that have groups of their own are not entered.

    Args:
        modules: the group's; names begin with their numbers where there are several.
        ignored: parameters to leave as they are.
        managed: the framework's ``ManagedParameter``, made of a name and a parameter, whose ``places`` are filled here.
            Its ``stores`` are the attributes of modules that map names to parameters and to modules.
        own: what the group has already, by the ids of the objects that may stand in the modules; places that are new
            are added to theirs.

    Raises:
        ValueError: a parameter that another group has already.
    """
    make: Any = managed
    parameters, children = make.stores
    skip = {id(parameter) for parameter in ignored}
    owned = own or {}
    found: dict[int, Any] = {}
    seen: set[int] = set()

    def visit(current: Any, prefix: str) -> None:
        if id(current) in seen:
            return
        seen.add(id(current))
        for name, parameter in getattr(current, parameters).items():
            if parameter is None or id(parameter) in skip:
                continue
            managed: Any = owned.get(id(parameter)) or found.get(id(parameter))
            if managed is None:
                owner = owner_of(parameter)
                if owner is not None:
                    raise ValueError(
                        f"fully_shard: parameter {prefix + name!r} of {type(root).__name__} is that of a group"
                        f" already: {owner}. Call fully_shard on inner modules before outer ones; where it is tied,"
                        " don't call it on either of the modules that share it, so that both fall to the group of a"
                        " module around them; on PyTorch fully_shard([one, other]) also takes both"
                    )
                managed = found[id(parameter)] = make(prefix + name, parameter)
            if not any(place is current and key == name for place, key in managed.places):
                managed.places.append((current, name))
        for name, child in getattr(current, children).items():
            if child is not None and group_of(child) is None:
                visit(child, f"{prefix}{name}.")

    for index, root in enumerate(modules):
        visit(root, "" if len(modules) == 1 else f"{index}.")
    return list(found.values())
