"""Plan of a call: its operands, the placements that its rule finds, also through a view, and what has to move.

Through a view, the dims before a sharded dim form ``outer`` blocks, each of which has its ``size`` indices sharded over
the axis. In the new shape the same blocks are either a complete dim (Shard) or part of one (StridedShard).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hp_dtensor.layout.placements import Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.rules.factors import NoLegalPlacement, Solution, solve
from hp_dtensor.rules.library import RULES


def view_placements(
    shape: Sequence[int], result: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Return the placements that the operand of a view must have, and those of the result.

    Example:
        >>> view_placements((4, 6), (4, 3, 2), (Shard(1),), (3,))
        ((Shard(1),), (Shard(1),))
        >>> view_placements((2, 6, 5), (12, 5), (Shard(1),), (3,))
        ((Shard(1),), (StridedShard(dim=0, split_factor=2),))
        >>> view_placements((4, 6), (4, 2, 3), (Shard(1),), (3,))   # neither new dim contains whole shards
        ((Replicate(),), (Replicate(),))

    Returns:
        The operand's placements (``Replicate`` where a shard does not survive the view) and the result's.
    """
    operand: list[Placement] = []
    out: list[Placement] = []
    shards: dict[Placement, int] = {}
    for placement, ranks in zip(placements, mesh_shape, strict=True):
        if isinstance(placement, (Shard, StridedShard)):
            shards[placement] = shards.get(placement, 1) * ranks
    cut_dims = [p.dim for p in shards if isinstance(p, (Shard, StridedShard))]
    moved: dict[Placement, Placement | None] = {}
    for placement, count in shards.items():
        assert isinstance(placement, (Shard, StridedShard))
        alone = cut_dims.count(placement.dim) == 1
        moved[placement] = _move(shape, result, placement, count) if alone else None
        if not alone and tuple(shape) == tuple(result):
            moved[placement] = placement
    result_dims = [p.dim for p in moved.values() if isinstance(p, (Shard, StridedShard))]
    for placement in placements:
        if isinstance(placement, (Shard, StridedShard)):
            target = moved[placement]
            if isinstance(target, (Shard, StridedShard)) and result_dims.count(target.dim) > 1 and target != placement:
                target = None  # two axes would shard one dim of the result
            operand.append(placement if target is not None else Replicate())
            out.append(target if target is not None else Replicate())
        elif isinstance(placement, RaggedShard):  # ranges of all elements in order are the same in any shape
            covers_all = placement.dims == tuple(range(len(shape))) and len(result) > 0
            operand.append(placement if covers_all else Replicate())
            out.append(replace(placement, dims=tuple(range(len(result)))) if covers_all else Replicate())
        else:
            operand.append(placement)
            out.append(placement)
    return tuple(operand), tuple(out)


def _move(
    shape: Sequence[int], result: Sequence[int], placement: Shard | StridedShard, shards: int
) -> Placement | None:
    outer = math.prod(shape[: placement.dim])
    size = shape[placement.dim]
    if isinstance(placement, StridedShard):
        outer *= placement.split_factor
        size //= placement.split_factor
    if size == 0 or math.prod(shape) == 0:
        return None
    if size == 1 and isinstance(placement, Shard):  # one rank has the only index, wherever the dim goes
        ones = [d for d, length in enumerate(result) if length == 1 and math.prod(result[:d]) == outer]
        return Shard(ones[0]) if ones else None
    before = 1
    for dim, length in enumerate(result):
        if before <= outer < before * length and outer % before == 0:
            split = outer // before
            if length % split:
                return None
            block = length // split
            same = block == size and math.prod(result[dim + 1 :]) == math.prod(shape[placement.dim + 1 :])
            if not same and (size % shards or block % shards):
                return None
            if split == 1:
                return Shard(dim)
            return StridedShard(dim, split) if block % shards == 0 else None
        before *= length
    return None


Shape = tuple[int, ...]
Fix = tuple[tuple[Any, ...], TensorSpec, tuple[bool, ...] | None]
"""Where an operand stands, the layout that it is read in, and the axes where its reader's result varies."""


@dataclass(frozen=True, slots=True)
class Binding:
    """How a function of a framework is an operation of the rules.

    Attributes:
        rule: the rule's name, or ``"view"``.
        signature: parameter names in positional order, with defaults; None where only tensors matter.
        operands: names of the tensor parameters that the rule reads, in its order; None: every tensor argument in
            order.
        shapes: makes the results' global shapes from the call. None, or a call for which it returns None: torch runs
            the function on meta tensors; MindSpore has none.
        arguments: makes the rule's arguments from the bound call; default: the bound parameters themselves.
        local: makes the local function of a planned call; None runs the function itself, with its own arguments.
        in_place: the first operand is written to.
        solve: finds the placements in the rule's place, from the call and the results' shapes.
        like: the result has the first operand's shape, and the function can't run on meta tensors.
        hot: plans may be found by the short key, in which ``True`` and ``1`` are one.
    """

    rule: str
    signature: tuple[tuple[str, Any], ...] | None = None
    operands: tuple[str, ...] | None = None
    shapes: Callable[[Call], Sequence[Shape] | None] | None = None
    arguments: Callable[[Call], dict[str, Any]] | None = None
    local: Callable[[Call], Any] | None = None
    in_place: bool = False
    solve: Callable[[Call, Sequence[Shape]], Solution] | None = None
    like: bool = False
    hot: bool = True


@dataclass(slots=True)
class Call:
    """One call while it is planned.

    Attributes:
        func: the torch function; on MindSpore what calls the kernel, ``func(positional values, keyword values)``.
        args, kwargs: the arguments, every tensor a DTensor.
        name: the function's, for errors; the kernel's.
        attributes: what a primitive of MindSpore that is a class was made with, by name.
        bound: parameter name -> value, where the binding has a signature.
        paths: where each operand stands: ``(position,)``, ``(position, index in the list)`` or ``(name,)``.
        tensors: the operands; None for an optional one that is absent.
        specs: each operand's layout; ``targets``: the layout it is read in.
        results: each result's layout.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    bound: dict[str, Any] = field(default_factory=dict)
    paths: list[tuple[Any, ...]] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    targets: list[TensorSpec] = field(default_factory=list)
    results: list[TensorSpec] = field(default_factory=list)

    @property
    def given(self) -> list[Any]:
        """The operands that are present."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def shape(self) -> Shape:
        """The first operand's global shape."""
        return self.specs[0].shape


def binding_of(rule: str, signature: str | None = None, operands: str | None = None, **options: Any) -> Binding:
    """Read a binding's texts.

    Args:
        rule: name of a rule of ``hp_dtensor.rules``, or ``"view"``.
        signature: parameter names in positional order, ``name=default`` where they may be absent; needed where the rule
            reads arguments.
        operands: the tensor parameters that the rule reads, in its order; default every tensor argument.
        options: other fields of ``Binding``.

    Raises:
        ValueError: no such rule.
    """
    if rule != "view" and rule not in RULES:
        raise ValueError(f"bind: no rule {rule!r}; the rules are {sorted(RULES)}")
    parameters = None if signature is None else tuple(map(_parameter, signature.split()))
    return Binding(rule, parameters, None if operands is None else tuple(operands.split()), **options)


def _parameter(text: str) -> tuple[str, Any]:
    name, _, default = text.partition("=")
    if default.lstrip("-").isdigit():
        return name, int(default)
    return name, {"None": None, "True": True, "False": False, "": None}.get(default, default)


def mesh_of(name: str, operands: Sequence[Any]) -> DeviceMesh:
    """Return the mesh of the operands of a call, DTensors.

    Raises:
        ValueError: they are on several.
    """
    meshes = list(dict.fromkeys(operand._spec.mesh for operand in operands))
    if len(meshes) > 1:
        numbers = all(not operand._spec.shape for operand in operands)
        advice = "add their full_tensor(), plain numbers" if numbers else "redistribute one to the other's mesh first"
        raise ValueError(f"{name}: operands are on different meshes, {meshes[0]} and {meshes[1]}; {advice}")
    return meshes[0]


def collect(call: Call, binding: Binding, dtensor: type) -> None:
    """Find the operands of a call and bind its parameters.

    Args:
        call: with the arguments.
        binding: the function's.
        dtensor: the framework's class of DTensors.

    Raises:
        TypeError: more arguments than the binding's signature has, or a list of DTensors passed by name.
    """
    names = [name for name, _ in binding.signature or ()]
    if binding.signature is not None:
        if len(call.args) > len(names):
            raise TypeError(
                f"{call.name}: {len(call.args)} positional arguments, at most {len(names)} are known: {names}; leave"
                " the others out, or gather the operands first with full_tensor()"
            )
        call.bound = {**dict(binding.signature), **dict(zip(names, call.args, strict=False)), **call.kwargs}
    if binding.operands is None:
        given: list[tuple[Any, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    else:
        at = {name: place for place, name in enumerate(names[: len(call.args)]) if name not in call.kwargs}
        given = [(at.get(name, name), call.bound[name]) for name in binding.operands]
    for place, value in given:
        values = {(place,): value}
        if isinstance(value, (list, tuple)) and any(isinstance(item, dtensor) for item in value):
            if isinstance(place, str):
                raise TypeError(f"{call.name}: pass the list {place!r} by position")
            values = {(place, index): item for index, item in enumerate(value)}
        for path, item in values.items():
            if isinstance(item, dtensor) or binding.operands is not None:
                call.paths.append(path)
                call.tensors.append(item if isinstance(item, dtensor) else None)
    call.specs = [tensor._spec for tensor in call.given]


def refuse_others(call: Call, binding: Binding, dtensor: type) -> None:
    """Check that all DTensors among the arguments of a call are operands of its rule.

    Args:
        call: with its operands.
        binding: the function's.
        dtensor: the framework's class of DTensors.

    Raises:
        NotImplementedError: one is not.
    """
    collected = {id(tensor) for tensor in call.tensors}
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, dtensor) and id(value) not in collected:
            raise NotImplementedError(
                f"{call.name}: a DTensor of shape {tuple(value.shape)} where rule {binding.rule!r} expects none; pass a"
                " number (item()) or a plain tensor (full_tensor()) there"
            )


def place(call: Call, binding: Binding, shapes: Sequence[Shape], itemsizes: Sequence[int]) -> list[Fix]:
    """Set the layouts that the operands are read in and those of the results; return what has to move.

    Args:
        call: with its operands.
        binding: the function's.
        shapes: the results'.
        itemsizes: bytes an element of each operand.

    Raises:
        NoLegalPlacement: what is written would have to be moved first.
    """
    mesh = call.specs[0].mesh
    found = _solution(call, binding, shapes, itemsizes)
    call.targets = [spec.with_placements(p) for spec, p in zip(call.specs, found.operands, strict=True)]
    call.results = [TensorSpec.of(mesh, p, shape) for p, shape in zip(found.results, shapes, strict=True)]
    if binding.in_place and (call.targets[0] is not call.specs[0] or call.results[0] is not call.specs[0]):
        raise NoLegalPlacement(f"written in place, {call.specs[0]} would become {call.results[0]}")
    fixes: list[Fix] = []
    paths = [path for path, tensor in zip(call.paths, call.tensors, strict=True) if tensor is not None]
    for path, spec, target, vary in zip(paths, call.specs, call.targets, found.vary, strict=True):
        varies = tuple(v and p.is_replicate() for v, p in zip(vary, target.placements, strict=True))
        if target is not spec or any(varies):
            fixes.append((path, target, varies if any(varies) else None))
    return fixes


def _solution(call: Call, binding: Binding, shapes: Sequence[Shape], itemsizes: Sequence[int]) -> Solution:
    specs = call.specs
    if binding.solve is not None:
        return binding.solve(call, shapes)
    if binding.rule == "view":
        mesh = specs[0].mesh
        operand, result = view_placements(specs[0].shape, shapes[0], specs[0].placements, mesh.shape)
        return Solution((operand,), ((False,) * mesh.ndim,), (result,))
    arguments = binding.arguments(call) if binding.arguments is not None else call.bound
    operands = [tensor._spec.shape if tensor is not None else None for tensor in call.tensors]
    return solve(
        RULES[binding.rule](operands, shapes, arguments),
        [spec.shape for spec in specs],
        [spec.placements for spec in specs],
        specs[0].mesh.shape,
        itemsizes,
        shapes,
        0 if binding.in_place else None,
    )


def moved(
    fixes: Sequence[Fix], args: Sequence[Any], kwargs: Any, convert: Callable[[Any, TensorSpec, Any], Any]
) -> tuple[list[Any], Any]:
    """Return a call's arguments with the operands that have to move as local tensors in their new layouts.

    Args:
        fixes: what has to move.
        args: the positional arguments.
        kwargs: the keyword arguments.
        convert: moves an operand to a layout.
    """
    args = list(args)
    for path, target, vary in fixes:
        at = path[0]
        if len(path) == 1:
            if type(at) is int:
                args[at] = convert(args[at], target, vary)
            else:
                kwargs = {**kwargs, at: convert(kwargs[at], target, vary)}
        else:
            items = list(args[at])
            items[path[1]] = convert(items[path[1]], target, vary)
            args[at] = items
    return args, kwargs
