"""Which parameters fall to a group, which join it later, and which an optimizer has beside them.

Note [What joins later]
    A new head, adapters, or a parameter set anew are the user's right, and a group that doesn't know them would leave
    their gradients each rank's own. So the outermost forward asks whether the model still holds what it held: one pass
    over the dictionaries of its modules, in C, of about 50 ns a module. Only what is new costs a search.

Note [Before an optimizer's first step]
    A block can't see that the model around it was not sharded; the optimizer has the parameters of both. Those that no
    group has would be trained on each rank's own gradients, and drift apart without a word. So from the first call of
    `fully_shard` on all optimizers are looked at before their first step. It costs one look-up a step, once the
    parameters were found in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn, TypeVar

from hp_dtensor import DeviceMesh
from hp_dtensor.extend import TensorSpec
from hp_fsdp.sharded_class import group_of

__all__ = [
    "Roster",
    "find_parameters",
    "ignore",
    "inner_mesh",
    "is_copy",
    "mark",
    "owner_of",
    "refuse_unreduced",
    "spec_of",
    "unreduced",
]

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


def ignore(parameter: Any) -> None:
    """Notes on a parameter that the user reduces its gradients themselves."""
    parameter._hsdp_ignored = True


def unreduced(parameters: Sequence[Any]) -> list[Any]:
    """The parameters of an optimizer whose gradients nobody reduces, though there are sharded ones beside them."""
    meshes = {each._spec.mesh for each in parameters if owner_of(each) is not None}
    if all(mesh.size() == 1 for mesh in meshes):
        return []
    return [each for each in parameters if owner_of(each) is None and each.requires_grad and not _settled(each, meshes)]


def refuse_unreduced(wrong: Sequence[Any], count: int, name: str) -> NoReturn:
    """Refuses a step that would let ranks drift apart.

    Args:
        wrong: some of what `unreduced` gave.
        count: number of the optimizer's parameters.
        name: its class.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"fully_shard: {len(wrong)} of the {count} parameters of {name} are in no sharded module (the first of shape"
        f" {tuple(wrong[0].shape)}), so their gradients are each rank's own and the ranks would drift apart. Call"
        " fully_shard on the model itself, too, after its blocks; if you reduce these gradients yourself, pass the"
        " parameters in ignored_params"
    )


def _settled(parameter: Any, meshes: set[Any]) -> bool:
    """True for a parameter that is reduced elsewhere: by the user, or as a DTensor over the same ranks."""
    spec = spec_of(parameter)
    return getattr(parameter, "_hsdp_ignored", False) or (spec is not None and spec.mesh in meshes)


def spec_of(tensor: object) -> TensorSpec | None:
    """The layout of a DTensor; None of a plain tensor."""
    return getattr(tensor, "_spec", None)
