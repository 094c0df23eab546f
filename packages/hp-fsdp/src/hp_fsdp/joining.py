"""Roster: the modules and parameters that a model is known to have, to notice at little cost what joins it later.

Note [What joins later]
    A new head, adapters, or a parameter set anew are the user's right, and a group that doesn't know them would leave
    their gradients each rank's own. So the outermost forward asks whether the model still holds what it held: one pass
    over the dictionaries of its modules, in C, of about 50 ns a module. Only what is new costs a search.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from hp_dtensor import DeviceMesh

__all__ = ["Roster", "inner_mesh"]


class Roster:
    """Modules, and what may stand in them.

    Args:
        modules: all of a model.
        parameters: all objects that stand in these modules, now or in turn.
        attributes: the modules' attributes that map names to parameters and to modules.
    """

    __slots__ = ("_known", "_members", "_stores")

    def __init__(self, modules: Iterable[Any], parameters: Iterable[Any], attributes: tuple[str, str]) -> None:
        modules = list(modules)
        self._members = [*modules, *parameters, None]  # kept, so that no other object gets their ids
        self._known = set(map(id, self._members))
        self._stores = [getattr(module, attribute) for module in modules for attribute in attributes]

    def complete(self) -> bool:
        """True while nothing else stands in the modules."""
        return self._known.issuperset(map(id, chain.from_iterable(map(dict.values, self._stores))))


def inner_mesh(groups: Iterable[Any]) -> DeviceMesh | None:
    """The mesh that all parameters are on besides the axes of data parallelism; None where some are on none.

    Args:
        groups: of a model.
    """
    inner = {None if p.inner is None else p.inner.mesh for group in groups for p in group.parameters}
    return inner.pop() if len(inner) == 1 else None
