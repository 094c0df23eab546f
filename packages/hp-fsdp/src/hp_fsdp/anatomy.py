"""Where a framework's modules keep their parameters and the modules inside."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Anatomy"]


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Where a framework's modules have their parts.

    Attributes:
        parameters: the attribute that maps names to parameters.
        children: the attribute that maps names to modules.
        sharded: the class of modules that `fully_shard` was called on.
        computes: whether a module has a forward of its own.
        nbytes: of a parameter, whole.
    """

    parameters: str
    children: str
    sharded: type
    computes: Callable[[Any], bool]
    nbytes: Callable[[Any], int]

    def children_of(self, module: Any) -> Iterator[Any]:
        """The modules directly inside."""
        return (child for child in getattr(module, self.children).values() if child is not None)

    def modules(self, module: Any) -> list[Any]:
        """``module`` and all inside, each once, outer before inner."""
        found: dict[int, Any] = {}
        waiting = [module]
        while waiting:
            current = waiting.pop()
            if id(current) not in found:
                found[id(current)] = current
                waiting += reversed(list(self.children_of(current)))
        return list(found.values())

    def uses(self, module: Any) -> Iterator[Any]:
        """Each parameter of ``module``, as often as it is registered."""
        for each in self.modules(module):
            yield from (parameter for parameter in getattr(each, self.parameters).values() if parameter is not None)

    def bytes_of(self, module: Any, taken: Collection[int] = ()) -> int:
        """Bytes of the parameters of a module that no group has yet.

        Args:
            module: the module.
            taken: ids of parameters to leave out.
        """
        return sum(self.nbytes(parameter) for parameter in self.free(module) if id(parameter) not in taken)

    def free(self, module: Any) -> list[Any]:
        """The parameters of a module that no group has yet, each once."""
        owned = {
            id(parameter)
            for each in self.modules(module)
            if isinstance(each, self.sharded)
            for parameter in self.uses(each)
        }
        return list({id(p): p for p in self.uses(module) if id(p) not in owned}.values())
