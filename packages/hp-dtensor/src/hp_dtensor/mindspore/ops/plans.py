"""Plans: what a kernel's call does with its operands' local tensors, and what its results are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspore import Tensor
from mindspore._c_expression import TensorPy  # type: ignore[attr-defined]

from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mindspore.backward.autograd import convert, local_mode
from hp_dtensor.mindspore.dtensor import DTensor, wrap
from hp_dtensor.mindspore.ops.views import VIEWS, before_write, note_view
from hp_dtensor.rules.factors import NoLegalPlacement, Solution, solve
from hp_dtensor.rules.library import RULES
from hp_dtensor.rules.views import view_placements
from hp_platform import get_platform

__all__ = ["Binding", "Call", "Plan", "make_plan"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """How a kernel is an operation of the rules.

    Attributes:
        rule: the rule's name, or ``"view"``.
        shapes: makes the results' global shapes from the call; there is no meta device to ask.
        signature: parameter names in positional order, with defaults; None where only tensors matter.
        operands: names of the tensor parameters that the rule reads, in its order; None: every tensor in order.
        arguments: makes the rule's arguments from the bound call; default: the bound parameters themselves.
        local: makes the local function of a planned call: ``(positional values, keyword values) -> result``; None runs
            the kernel itself with its own arguments.
        in_place: the first operand is written to.
        solve: finds the placements in the rule's place.
    """

    rule: str
    shapes: Callable[[Call], Sequence[Shape]]
    signature: tuple[tuple[str, Any], ...] | None = None
    operands: tuple[str, ...] | None = None
    arguments: Callable[[Call], dict[str, Any]] | None = None
    local: Callable[[Call], Any] | None = None
    in_place: bool = False
    solve: Callable[[Call, Sequence[Shape]], Solution] | None = None


@dataclass(slots=True)
class Call:
    """One call while it is planned.

    Attributes:
        name: the kernel's name.
        run: calls the kernel: ``run(positional values, keyword values)``.
        args, kwargs: as given, every tensor a DTensor.
        attributes: what a primitive that is a class was made with, by name.
        bound: parameter name -> value, where the binding has a signature.
        paths: where each operand stands: ``(position,)``, ``(position, index in the list)`` or ``(name,)``.
        specs: each operand's layout; ``targets``: the layout it is read in.
        results: each result's layout.
    """

    name: str
    run: Callable[[Sequence[Any], dict[str, Any]], Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    bound: dict[str, Any] = field(default_factory=dict)
    paths: list[tuple[Any, ...]] = field(default_factory=list)
    tensors: list[DTensor | None] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    targets: list[TensorSpec] = field(default_factory=list)
    results: list[TensorSpec] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        """The first operand's global shape."""
        return self.tensors[0]._spec.shape  # type: ignore[union-attr]


@dataclass(slots=True)
class Plan:
    """A planned call: moves, the local function, the results' layouts."""

    fixes: list[tuple[tuple[Any, ...], TensorSpec, tuple[bool, ...] | None]]
    outs: list[TensorSpec]
    local: Any
    in_place: bool
    view: bool
    name: str

    def run(self, run: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the call on operands with the layouts for which the plan was made."""
        if self.in_place:
            before_write(args[0], self.name)
        values, named = list(args), kwargs
        for path, target, vary in self.fixes:
            place = path[0]
            if isinstance(place, str):
                named = {**named, place: convert(named[place], target, vary)}
            elif len(path) == 1:
                values[place] = convert(values[place], target, vary)
            else:
                items = list(values[place])
                items[path[1]] = convert(items[path[1]], target, vary)
                values[place] = items
        with local_mode():
            out = (self.local or run)(values, named)
            if self.in_place and get_platform().devices.kind == "cpu":
                # On the CPU only a copy is in place: MindSpore's add_ and its kin leave what they are called on as it
                # was, and return the new values.
                TensorPy.copy_(args[0], out)
        if self.in_place:
            return args[0]
        if isinstance(out, Tensor):
            made = wrap(out, self.outs[0])
            if self.view:
                note_view(args[0], (made,), self.name, copied=bool(self.fixes))
            return made
        flat = [value for value in out if isinstance(value, Tensor)]
        for value, spec in zip(flat, self.outs, strict=True):
            wrap(value, spec)
        if self.view:
            note_view(args[0], flat, self.name, copied=bool(self.fixes))
        return out


def _collect(call: Call, binding: Binding) -> None:
    """Find the operands of a call."""

    def add(path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, DTensor):
            call.paths.append(path)
            call.tensors.append(value)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, DTensor) for v in value):
            for index, item in enumerate(value):
                add((*path, index), item)
        elif binding.operands is not None:
            call.paths.append(path)
            call.tensors.append(None)

    if binding.signature is not None:
        names = [name for name, _ in binding.signature]
        if len(call.args) > len(names):
            raise NotImplementedError(
                f"{call.name}: {len(call.args)} arguments, the rule knows {names}: this MindSpore has more; gather the"
                " operands first with full_tensor(), or bind the kernel anew in hp_dtensor.mindspore.ops.functions"
            )
        call.bound = {**dict(binding.signature), **dict(zip(names, call.args, strict=False)), **call.kwargs}
    if binding.operands is None:
        for position, value in enumerate(call.args):
            add((position,), value)
        for name, value in call.kwargs.items():
            add((name,), value)
        return
    assert binding.signature is not None
    names = [name for name, _ in binding.signature]
    for name in binding.operands:
        position = names.index(name)
        add((position,) if position < len(call.args) and name not in call.kwargs else (name,), call.bound[name])


def make_plan(call: Call, binding: Binding) -> Plan:
    """Plans a call: operands, result shapes, placements, local function.

    Raises:
        NoLegalPlacement: an in-place call that would have to move what it writes to.
    """
    _collect(call, binding)
    given = [tensor for tensor in call.tensors if tensor is not None]
    mesh = given[0]._spec.mesh
    call.specs = [tensor._spec for tensor in given]
    shapes = [tuple(shape) for shape in binding.shapes(call)]
    if binding.solve is not None:
        found = binding.solve(call, shapes)
    elif binding.rule == "view":
        operand, result = view_placements(call.specs[0].shape, shapes[0], call.specs[0].placements, mesh.shape)
        found = Solution((operand,), ((False,) * mesh.ndim,), (result,))
    else:
        arguments = binding.arguments(call) if binding.arguments is not None else call.bound
        factors = RULES[binding.rule](
            [tensor._spec.shape if tensor is not None else None for tensor in call.tensors], shapes, arguments
        )
        found = solve(
            factors,
            [spec.shape for spec in call.specs],
            [spec.placements for spec in call.specs],
            mesh.shape,
            [tensor.itemsize for tensor in given],
            shapes,
            0 if binding.in_place else None,
        )
    call.targets = [spec.with_placements(p) for spec, p in zip(call.specs, found.operands, strict=True)]
    call.results = [TensorSpec.of(mesh, p, shape) for p, shape in zip(found.results, shapes, strict=True)]
    if binding.in_place and (call.targets[0] is not call.specs[0] or call.results[0] is not call.specs[0]):
        raise NoLegalPlacement(f"written in place, {call.specs[0]} would become {call.results[0]}")
    fixes = []
    paths = [path for path, tensor in zip(call.paths, call.tensors, strict=True) if tensor is not None]
    for path, spec, target, vary in zip(paths, call.specs, call.targets, found.vary, strict=True):
        varies = tuple(v and p.is_replicate() for v, p in zip(vary, target.placements, strict=True))
        if target is not spec or any(varies):
            fixes.append((path, target, varies if any(varies) else None))
    return Plan(
        fixes,
        call.results,
        binding.local(call) if binding.local is not None else None,
        binding.in_place,
        call.name in VIEWS,
        call.name,
    )
