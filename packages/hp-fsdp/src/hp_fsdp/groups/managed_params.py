"""The parameters of a group: those of its modules, those that join later, and their places in the flat buffer.

Note [What joins later]
    A user may add a new head, adapters, or another parameter, and the group must take them in: their gradients would
    stay each rank's own otherwise. So the outermost forward checks that the model still holds the same objects: one
    pass over the dictionaries of its modules, in C, of about 50 ns a module. Only new objects cost a search.

Note [Before an optimizer's first step]
    A block can't see that the model around it was not sharded; the optimizer has the parameters of both. Parameters
    outside of groups would be trained on each rank's own gradients, and the ranks would drift apart silently. So from
    the first call of `fully_shard` on all optimizers are checked before their first step. Afterwards it costs one
    look-up a step.

Note [Name of a sharded class]
    The class of a sharded module is generated, but programs read the name of the original one: transformers writes it
    to ``config.json``, where others look it up to load the model, and a Trainer shifts labels only for known names. So
    ``__name__`` stays; ``repr(type(module))``, for people, shows ``__qualname__``, which says that it is sharded.

Note [Ragged pieces]
    The parameters lie one after the other in one buffer, which is split into equal contiguous pieces, one for each
    rank, at any element. So the gathered pieces are the buffer, and a reduce-scatter returns pieces of the buffer:
    neither needs a copy in or out. A parameter's shard is a contiguous range of its elements (a `RaggedShard`), often
    empty. In return shards are not made of rows, which does not matter to elementwise code (optimizers, norms,
    checkpoints).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil, lcm
from typing import Any, NoReturn, TypeVar

from hp_dtensor import DeviceMesh
from hp_dtensor.extend import TensorSpec

# ---- the class of a sharded module ----
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


P = TypeVar("P")


def mark(parameter: Any, owner: str) -> None:
    """Mark a parameter as one of a group's.

    Args:
        parameter: the object that stands in the modules.
        owner: text for the error if another group finds it as well.
    """
    parameter._hsdp_owner = (id(parameter), owner)  # a copy has the attributes, and belongs to no group


def owner_of(parameter: Any) -> str | None:
    """Return the group's text that `mark` stored; None for a parameter of no group."""
    key, owner = getattr(parameter, "_hsdp_owner", None) or (None, None)
    return owner if key == id(parameter) else None


def is_copy(parameter: Any) -> bool:
    """Tell whether a parameter is a copy (``copy.deepcopy``) of a group's."""
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
        modules: the group's; names begin with their numbers if there are several.
        ignored: parameters to leave as they are.
        managed: the framework's ``ManagedParameter``, made of a name and a parameter, whose ``places`` are filled here.
            Its ``stores`` are the attributes of modules that map names to parameters and to modules.
        own: the group's parameters so far, by the ids of the objects that may be registered for them; new places are
            added to theirs.

    Raises:
        ValueError: a parameter that another group has already.
    """
    make: Any = managed
    parameters, children = make.stores
    skip = {id(parameter) for parameter in ignored}
    owned = own or {}
    new: dict[int, Any] = {}
    seen: set[int] = set()
    roots = [(root, "" if len(modules) == 1 else f"{index}.") for index, root in enumerate(modules)]
    found = ((root, *inside) for root, prefix in roots for inside in _outside_groups(root, prefix, children, seen))
    for root, current, prefix in found:
        for name, parameter in getattr(current, parameters).items():
            if parameter is None or id(parameter) in skip:
                continue
            known: Any = owned.get(id(parameter)) or new.get(id(parameter))
            if known is None:
                owner = owner_of(parameter)
                if owner is not None:
                    raise ValueError(
                        f"fully_shard: parameter {prefix + name!r} of {type(root).__name__} belongs to a group"
                        f" already: {owner}. Call fully_shard on inner modules before outer ones; if it is tied,"
                        " don't call it on either of the modules that share it, so that both fall to the group of a"
                        " module around them; on PyTorch fully_shard([one, other]) also takes both"
                    )
                known = new[id(parameter)] = make(prefix + name, parameter)
            if not any(place is current and key == name for place, key in known.places):
                known.places.append((current, name))
    return list(new.values())


def _outside_groups(module: Any, prefix: str, children: str, seen: set[int]) -> Iterator[tuple[Any, str]]:
    """List a module and those inside that no group has, each once, with what their parameters' names begin with."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield module, prefix
    for name, child in getattr(module, children).items():
        if child is not None and group_of(child) is None:
            yield from _outside_groups(child, f"{prefix}{name}.", children, seen)


class Roster:
    """The modules of a model, and the objects that may be registered in them.

    Args:
        modules: all of a model.
        parameters: all objects that are registered in these modules, now or in turn.
        attributes: the modules' attributes that map names to parameters and to modules.
    """

    __slots__ = ("_known", "_members", "_stores")

    def __init__(self, modules: Iterable[Any], parameters: Iterable[Any], attributes: tuple[str, str]) -> None:
        modules = list(modules)
        self._members = [*modules, *parameters, None]  # kept, so that no other object gets their ids
        self._known = set(map(id, self._members))
        self._stores = [getattr(module, attribute) for module in modules for attribute in attributes]

    def complete(self) -> bool:
        """Tell whether the modules still hold only these."""
        return self._known.issuperset(map(id, chain.from_iterable(map(dict.values, self._stores))))


def inner_mesh(groups: Iterable[Any]) -> DeviceMesh | None:
    """Return the mesh of all parameters besides the axes of data parallelism; None if some have none.

    Args:
        groups: of a model.
    """
    inner = {None if p.inner is None else p.inner.mesh for group in groups for p in group.parameters}
    return inner.pop() if len(inner) == 1 else None


def ignore(parameter: Any) -> None:
    """Mark a parameter whose gradients the user reduces."""
    parameter._hsdp_ignored = True


def unreduced(parameters: Sequence[Any]) -> list[Any]:
    """Return the parameters of an optimizer whose gradients nobody reduces, while others beside them are sharded."""
    meshes = {each._spec.mesh for each in parameters if owner_of(each) is not None}
    if all(mesh.size() == 1 for mesh in meshes):
        return []
    return [each for each in parameters if owner_of(each) is None and each.requires_grad and not _settled(each, meshes)]


def refuse_unreduced(wrong: Sequence[Any], count: int, name: str) -> NoReturn:
    """Refuse a step that would let ranks drift apart.

    Args:
        wrong: some of the result of `unreduced`.
        count: number of the optimizer's parameters.
        name: its class.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"fully_shard: {len(wrong)} of the {count} parameters of {name} are in no sharded module (the first of shape"
        f" {tuple(wrong[0].shape)}), so their gradients are each rank's own and the ranks would drift apart. Call"
        " fully_shard on the model itself as well, after its blocks; if you reduce these gradients yourself, pass the"
        " parameters in ignored_params"
    )


def _settled(parameter: Any, meshes: set[Any]) -> bool:
    """Tell whether a parameter is reduced elsewhere: by the user, or as a DTensor over the same ranks."""
    spec = spec_of(parameter)
    return getattr(parameter, "_hsdp_ignored", False) or (spec is not None and spec.mesh in meshes)


def spec_of(tensor: object) -> TensorSpec | None:
    """Return the layout of a DTensor; None for a plain tensor."""
    return getattr(tensor, "_spec", None)


LARGE = 4096
"""Elements from which on a parameter is cut where states of eight bits can be: `GroupOptions.alignment_of_large`."""


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Parameters in one flat buffer that ``ranks`` ranks own in equal contiguous pieces, made by ``FlatLayout.of``.

    Example:
        >>> layout = FlatLayout.of([6, 3], ranks=2, align=4)
        >>> layout.offsets, layout.piece, layout.total      # 2 and 5 elements of padding
        ((0, 8), 8, 16)
        >>> layout.units(0), layout.units(1)
        ((6, 0), (0, 3))

    Attributes:
        numels: number of elements of each parameter.
        ranks: number of ranks.
        offsets: start of each parameter in the buffer.
        piece: number of elements that each rank owns.
    """

    numels: tuple[int, ...]
    ranks: int
    offsets: tuple[int, ...]
    piece: int

    @staticmethod
    def of(numels: Sequence[int], ranks: int, *, align: int = 1, align_large: int = 1) -> FlatLayout:
        """Lay the parameters out in order.

        Args:
            numels: number of elements of each parameter.
            ranks: number of ranks.
            align: parameters and pieces start at multiples of this number of elements.
            align_large: the same of parameters of `LARGE` elements or more, and of pieces where there are such.

        Raises:
            ValueError: ``ranks`` or ``align`` below one.
        """
        if ranks < 1 or align < 1:
            raise ValueError(f"FlatLayout: ranks and align must be at least 1, got ranks={ranks}, align={align}")
        large = lcm(align, align_large)
        offsets = []
        end = 0
        for numel in numels:
            step = large if numel >= LARGE else align
            start = ceil(end / step) * step
            offsets.append(start)
            end = start + ceil(numel / align) * align
        step = large if max(numels, default=0) >= LARGE else align
        piece = ceil(end / (ranks * step)) * step
        return FlatLayout(tuple(numels), ranks, tuple(offsets), piece)

    @property
    def total(self) -> int:
        """Number of elements of the buffer, padding included."""
        return self.piece * self.ranks

    def part(self, index: int, rank: int) -> tuple[int, int]:
        """Return the elements of parameter ``index`` on ``rank``: start and stop in the flattened parameter."""
        offset, numel = self.offsets[index], self.numels[index]
        start = min(max(rank * self.piece - offset, 0), numel)
        stop = min(max((rank + 1) * self.piece - offset, 0), numel)
        return start, stop

    def place(self, index: int, rank: int) -> tuple[int, int]:
        """Return the same elements as start and stop in the rank's piece; ``(0, 0)`` if it has none."""
        start, stop = self.part(index, rank)
        if start == stop:
            return 0, 0
        shift = self.offsets[index] - rank * self.piece
        return start + shift, stop + shift

    def units(self, index: int) -> tuple[int, ...]:
        """Return the number of elements of parameter ``index`` on each rank."""
        lengths, first, numel = [0] * self.ranks, self.offsets[index], self.numels[index]
        if numel:
            for rank in range(first // self.piece, (first + numel - 1) // self.piece + 1):
                start, stop = self.part(index, rank)
                lengths[rank] = stop - start
        return tuple(lengths)

    def splits(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return sizes that split the rank's piece into ranges, and for each parameter the index of its range.

        Gaps of padding are ranges as well; a parameter of which the rank owns nothing has an empty range.

        Example:
            >>> FlatLayout.of([6, 3], ranks=2, align=4).splits(0)
            ((6, 0, 2), (0, 1))
        """
        sizes: list[int] = []
        indices: list[int] = []
        end = 0
        for index in range(len(self.numels)):
            start, stop = self.place(index, rank)
            if start > end:
                sizes.append(start - end)
            indices.append(len(sizes))
            sizes.append(stop - start)
            end = max(end, stop)
        if end < self.piece:
            sizes.append(self.piece - end)
        return tuple(sizes), tuple(indices)


BLOCK = 1024
"""Deterministic mode shards parameters between blocks of this many elements; norms are sums over blocks."""
