"""The class of a sharded module, and groups of several modules, ``fully_shard([one, other])``.

Note [Name of a sharded class]
    The class of a sharded module is generated, but programs read the name of the original one: transformers writes it
    to ``config.json``, where others look it up to load the model, and a Trainer shifts labels only for known names. So
    ``__name__`` stays; ``repr(type(module))``, for people, shows ``__qualname__``, which says that it is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["check_inside", "group_of", "groups_in", "make_sharded_class", "roots_of", "several_outermost"]

_classes: dict[tuple[type, type], type] = {}


def make_sharded_class(base: type, cls: type) -> type:
    """Return a subclass of ``base`` and ``cls`` with the name of ``cls``; the same for each call.

    Args:
        base: the framework's ``HSDPModule``.
        cls: the module's own class.
    """
    sharded = _classes.get((base, cls))
    if sharded is None:
        around, dot, own = cls.__qualname__.rpartition(".")
        names = {"__module__": cls.__module__, "__qualname__": f"{around}{dot}HSDP{own}"}
        sharded = _classes[base, cls] = type(cls.__name__, (base, cls), names)
    return sharded


def group_of(module: Any) -> Any:
    """Get the group that `fully_shard` made of a module; None for a module that it was not called on."""
    return module.__dict__.get("_hsdp_group")


def groups_in(modules: Iterable[Any]) -> list[Any]:
    """List the groups of modules, each once, in the modules' order."""
    return list(dict.fromkeys(group for module in modules if (group := group_of(module)) is not None))


def roots_of(module: Any, cls: type, inside: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Read the modules that `fully_shard` is called on.

    Args:
        module: a module, or several.
        cls: the class of modules.
        inside: yields a module and the modules inside it.

    Returns:
        The modules, each once, without those that are inside others of them.

    Raises:
        TypeError: another object.
        ValueError: no modules.
    """
    if isinstance(module, cls):
        return [module]
    name = f"{cls.__module__.partition('.')[0]}.nn.{cls.__name__}"
    if not isinstance(module, (list, tuple)):
        raise TypeError(f"fully_shard: expected a {name} or a list of them, got {type(module).__name__}")
    for index, each in enumerate(module):
        if not isinstance(each, cls):
            raise TypeError(f"fully_shard: expected a list of {name}, number {index} is a {type(each).__name__}")
    if not module:
        raise ValueError("fully_shard: expected at least one module, got an empty list")
    inner = {id(child) for each in module for child in inside(each) if child is not each}
    return [each for each in dict.fromkeys(module) if id(each) not in inner]


def several_outermost(classes: Sequence[str]) -> str:
    """Return the error's text for a group of several modules that runs with no sharded module around them."""
    return (
        f"fully_shard: one of the group [{', '.join(classes)}] runs, and no sharded module around them ran before. Call"
        " fully_shard on the module that holds them as well, and run its forward first"
    )


def check_inside(members: Iterable[Any], names: Mapping[int, str], root: str) -> None:
    """Raise RuntimeError if a group has modules outside of the outermost sharded module.

    Args:
        members: the group's modules.
        names: of all modules inside the outermost one, by their ids.
        root: the outermost module's class.
    """
    outside = [type(each).__name__ for each in members if id(each) not in names]
    if outside:
        raise RuntimeError(
            f"fully_shard: {', '.join(outside)} is in one group with modules of {root}, but not in {root}, which is the"
            " outermost sharded module that runs. Call fully_shard on a module that holds all of them, and run that"
        )
