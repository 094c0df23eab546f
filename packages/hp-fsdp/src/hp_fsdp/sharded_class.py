"""The class of a sharded module.

Note [Name of a sharded class]
    The class of a sharded module is made, but its name is read by programs that know the module's own: transformers
    writes it to ``config.json``, where others look it up to load the model, and a Trainer shifts labels only for names
    that it knows. So ``__name__`` stays; what is for the eye of a person, ``repr(type(module))``, shows
    ``__qualname__``, which tells that it is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["group_of", "groups_in", "make_sharded_class"]

_classes: dict[tuple[type, type], type] = {}


def make_sharded_class(base: type, cls: type) -> type:
    """A subclass of ``base`` and ``cls`` with the name of ``cls``; the same for each call.

    Args:
        base: the framework's ``HSDPModule``.
        cls: the module's own class.
    """
    made = _classes.get((base, cls))
    if made is None:
        around, dot, own = cls.__qualname__.rpartition(".")
        names = {"__module__": cls.__module__, "__qualname__": f"{around}{dot}HSDP{own}"}
        made = _classes[base, cls] = type(cls.__name__, (base, cls), names)
    return made


def group_of(module: Any) -> Any:
    """Get the group that `fully_shard` made of a module; None for a module that it was not called on."""
    return module.__dict__.get("_hsdp_group")


def groups_in(modules: Iterable[Any]) -> list[Any]:
    """List the groups of modules, each once, in the modules' order."""
    return list(dict.fromkeys(group for module in modules if (group := group_of(module)) is not None))
