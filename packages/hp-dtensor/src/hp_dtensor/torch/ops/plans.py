"""Plans: what a call does with its operands' local tensors, and what its results are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.rules.factors import NoLegalPlacement, Solution, solve
from hp_dtensor.rules.library import RULES
from hp_dtensor.rules.views import view_placements
from hp_dtensor.torch.backward.asking import without_modes
from hp_dtensor.torch.backward.autograd import convert
from hp_dtensor.torch.dtensor import DTensor, wrap
from hp_dtensor.torch.ops.empty_parts import with_the_others
from hp_dtensor.torch.views.moved_view import MAY_COPY, VIEWS, link
from hp_dtensor.torch.views.overlaps import refuse_overlaps_of_call
from hp_dtensor.torch.views.settle import Settle

__all__ = ["Binding", "Call", "Plan", "make_plan"]

_impl: Any = torch._C._disabled_torch_function_impl
Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Binding:
    """How a torch function is an operation of the rules.

    Attributes:
        rule: the rule's name, or ``"view"``.
        signature: parameter names in positional order, with defaults; None where only tensors matter.
        operands: names of the tensor parameters that the rule reads, in its order; None: every tensor argument in
            order.
        arguments: makes the rule's arguments from the bound call; default: the bound parameters themselves.
        local: makes the local function of a planned call; None runs the function itself, unchanged.
        like: the result has the first operand's shape, and the function can't run on meta tensors.
        in_place: the first operand is written to.
        hot: plans may be found by the short key, in which ``True`` and ``1`` are one.
        shape: the shape of the one result, from the call; None, or a call that gives None, asks torch on meta tensors.
        solve: finds the placements itself, from the call and the results' shapes; no rule is read.
    """

    rule: str
    signature: tuple[tuple[str, Any], ...] | None = None
    operands: tuple[str, ...] | None = None
    arguments: Callable[[Call], dict[str, Any]] | None = None
    local: Callable[[Call], Any] | None = None
    like: bool = False
    in_place: bool = False
    hot: bool = True
    shape: Callable[[Call], tuple[int, ...] | None] | None = None
    solve: Callable[[Call, list[tuple[int, ...]]], Solution] | None = None


@dataclass(slots=True)
class Call:
    """One call while it is planned.

    Attributes:
        func: the torch function.
        args, kwargs: as given, every tensor a DTensor.
        bound: parameter name -> value, where the binding has a signature.
        paths: where each operand stands: ``(position,)``, ``(position, index in the list)`` or ``(name,)``.
        specs: each operand's layout; ``targets``: the layout it is read in.
        results: each result's layout.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bound: dict[str, Any] = field(default_factory=dict)
    paths: list[tuple[Any, ...]] = field(default_factory=list)
    tensors: list[DTensor | None] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    targets: list[TensorSpec] = field(default_factory=list)
    results: list[TensorSpec] = field(default_factory=list)


class Plan:
    """A planned call: moves, the local function, the results' layouts.

    Attributes:
        direct: the function itself is called, on the operands as they are, and gives one result.
        call: a function that is called on the first operand as it is, followed by ``tail``, and gives one result; None
            elsewhere.
        plain: the function itself is called, on the operands as they are, and gives no new tensor: it writes its first
            operand, or tells something.
        copied: the results are views, on one device, of an operand that has to be moved.
        finish: a function of the results, ``args`` and ``kwargs`` that gives the results; None where they are as they
            should be.
    """

    __slots__ = (
        *("call", "copied", "direct", "finish", "fixes", "func", "hot", "listed", "local", "outs", "plain", "spec"),
        *("tail", "writes"),
    )

    def __init__(self, func: Any, fixes: list[Any], outs: list[TensorSpec], single: bool, hot: bool) -> None:
        self.func = func
        self.fixes = fixes
        self.outs = outs
        self.spec = outs[0] if single else None
        self.local: Any = None
        self.tail: tuple[Any, ...] | None = None
        self.hot = hot
        self.copied = False
        self.finish: Callable[[Any, Any, Any], Any] | None = None
        self.direct = False
        self.call: Any = None
        self.listed = False
        self.writes = False
        self.plain = False

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the call on operands with the layouts for which the plan was made."""
        out = self.compute(args, kwargs)
        spec = self.spec
        if spec is not None:
            out.__class__ = DTensor
            out._spec = spec
            return out if self.finish is None else self.finish(out, args, kwargs or {})
        if self.outs:
            flat = [value for value in out if isinstance(value, Tensor)]
            for value, layout in zip(flat, self.outs, strict=True):
                wrap(value, layout)
            return out if self.finish is None else self.finish(out, args, kwargs or {})
        return out

    def compute(self, args: Any, kwargs: Any) -> Any:
        """Return the local tensors of the results, as the framework returns them."""
        if self.fixes:
            args, kwargs = self._moved(args, kwargs)
        if self.tail is not None:
            return _impl(self.func, (), (args[0], *self.tail))
        if self.listed:
            return _impl(self.local, (), (args,))
        if kwargs:
            return _impl(self.local or self.func, (), args, kwargs)
        return _impl(self.local or self.func, (), args)

    def _moved(self, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        args = list(args)
        for path, target, vary in self.fixes:
            place = path[0]
            if len(path) == 1:
                if type(place) is int:
                    args[place] = convert(args[place], target, vary)
                else:
                    kwargs = {**kwargs, place: convert(kwargs[place], target, vary)}
            else:
                items = list(args[place])
                items[path[1]] = convert(items[path[1]], target, vary)
                args[place] = items
        return args, kwargs


class _CheckedPlan(Plan):
    """A planned write of which torch's own check of overlapping memory may differ by rank."""

    __slots__ = ()

    def compute(self, args: Any, kwargs: Any) -> Any:
        refuse_overlaps_of_call(self.func, args, kwargs)
        return super().compute(args, kwargs)


def _collect(call: Call, binding: Binding) -> None:
    """Find the operands of a call."""
    if binding.signature is not None:
        names = [name for name, _ in binding.signature]
        if len(call.args) > len(names):
            raise TypeError(
                f"{call.func}: {len(call.args)} positional arguments, at most {len(names)} are known: {names}"
            )
        call.bound = dict(binding.signature)
        call.bound.update(zip(names, call.args, strict=False))
        call.bound.update(call.kwargs)

    def add(path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, DTensor):
            call.paths.append(path)
            call.tensors.append(value)
        elif isinstance(value, (list, tuple)) and len(path) == 1 and any(isinstance(v, DTensor) for v in value):
            if isinstance(path[0], str):
                raise TypeError(f"{call.func}: pass the list {path[0]!r} by position")
            for index, item in enumerate(value):
                add((path[0], index), item)
        elif binding.operands is not None:
            call.paths.append(path)
            call.tensors.append(None)

    if binding.operands is None:
        for position, value in enumerate(call.args):
            add((position,), value)
        for name, value in call.kwargs.items():
            add((name,), value)
    else:
        names = [name for name, _ in binding.signature or ()]
        for name in binding.operands:
            position = names.index(name)
            add((position,) if position < len(call.args) and name not in call.kwargs else (name,), call.bound[name])
    kept = {id(tensor) for tensor in call.tensors}
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, DTensor) and id(value) not in kept:
            raise NotImplementedError(
                f"{call.func}: a DTensor of shape {tuple(value.shape)} where rule {binding.rule!r} expects none; pass a"
                " number (item()) or a plain tensor (full_tensor()) there"
            )


def _on_meta(call: Call, binding: Binding) -> Any:
    """Return the results' shapes by running the function on meta tensors, so that its argument checks come first."""

    def change(value: Any) -> Any:
        if isinstance(value, DTensor):
            return torch.empty(value._spec.shape, dtype=value.dtype, device="meta")
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            return [change(v) for v in value]
        return torch.device("meta") if isinstance(value, torch.device) else value

    with torch.no_grad(), without_modes():
        return call.func(*[change(a) for a in call.args], **{k: change(v) for k, v in call.kwargs.items()})


def nothing(results: list[TensorSpec], made: Any) -> Callable[..., Any]:
    """Return the function for a rank outside the mesh: results without elements, in the graph of the operands.

    Args:
        results: each result's layout.
        made: the results on meta.
    """
    several = not isinstance(made, Tensor)
    values = [value for value in (made if several else (made,)) if isinstance(value, Tensor)]

    def run(*args: Any, **kwargs: Any) -> Any:
        flat = [*args, *kwargs.values()]
        flat += [item for value in flat if isinstance(value, (list, tuple)) for item in value]
        given = [value for value in flat if isinstance(value, Tensor)]
        tied = sum(value.reshape(-1)[:0].sum() for value in given if value.requires_grad)
        parts = []
        for spec, value in zip(results, values, strict=True):
            part = torch.zeros(spec.local_shape, dtype=value.dtype, device=given[0].device)
            inexact = value.dtype.is_floating_point or value.dtype.is_complex
            parts.append(part + tied.to(value.dtype) if inexact and isinstance(tied, Tensor) else part)
        return (type(made)(parts) if isinstance(made, (tuple, list)) else parts) if several else parts[0]

    return run


def _callable(func: Any, local: Any) -> Callable[..., Any]:
    """Return the local operation as one function of the call's arguments."""
    if not isinstance(local, tuple):
        return local or func
    function, tail = local
    if tail is None:
        return lambda *args, **kwargs: function(args)
    return lambda x, *args, **kwargs: function(x, *tail)


def _finish(plan: Plan, func: Any, specs: Iterable[TensorSpec]) -> None:
    """Set how the results of ``func`` become the views or copies that a single device returns.

    Args:
        plan: of a call that writes nothing.
        func: the function.
        specs: the operands' layouts and the results'.
    """
    if plan.fixes and func in VIEWS:
        plan.copied = True
        plan.finish = lambda out, args, kwargs: link(out, func, args, kwargs)
    elif (func in VIEWS or func in MAY_COPY) and any(spec.thin for spec in specs):
        plan.finish = Settle(func, func in MAY_COPY)


def make_plan(func: Any, binding: Binding, args: Any, kwargs: Any) -> Plan:
    """Plans a call: operands, result shapes, placements, local function.

    Raises:
        NoLegalPlacement: an in-place call that would have to move what it writes to.
    """
    call = Call(func, tuple(args), dict(kwargs))
    _collect(call, binding)
    given = [tensor for tensor in call.tensors if tensor is not None]
    mesh = given[0]._spec.mesh
    call.specs = [tensor._spec for tensor in given]
    here = mesh.get_coordinate() is not None
    shape = binding.shape(call) if binding.shape is not None and here else None
    made = None
    if shape is not None:
        single, shapes = True, [shape]
    else:
        made = given[0] if binding.like or binding.in_place else _on_meta(call, binding)
        single = isinstance(made, Tensor)
        outs = [made] if single else [value for value in made if isinstance(value, Tensor)]
        shapes = [tuple(value._spec.shape if isinstance(value, DTensor) else value.shape) for value in outs]

    if binding.rule == "view":
        operand, result = view_placements(call.specs[0].shape, shapes[0], call.specs[0].placements, mesh.shape)
        found = Solution((operand,), ((False,) * mesh.ndim,), (result,))
    elif binding.solve is not None:
        found = binding.solve(call, shapes)
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
            [tensor.element_size() for tensor in given],
            shapes,
            0 if binding.in_place else None,
        )
    call.targets = [spec.with_placements(p) for spec, p in zip(call.specs, found.operands, strict=True)]
    call.results = [TensorSpec.of(mesh, p, shape) for p, shape in zip(found.results, shapes, strict=True)]
    if binding.in_place and (call.targets[0] is not call.specs[0] or call.results[0] is not call.specs[0]):
        raise NoLegalPlacement(f"written in place, {call.specs[0]} would become {call.results[0]}")

    if call.kwargs.get("inplace") and call.targets[0] is not call.specs[0]:  # F.relu(x, inplace=True)
        raise NoLegalPlacement(
            f"with inplace=True, {call.specs[0]} is written, and it would have to be moved to {call.targets[0]} first;"
            " redistribute it before, or leave inplace=True out"
        )
    fixes = []
    paths = [path for path, tensor in zip(call.paths, call.tensors, strict=True) if tensor is not None]
    for path, spec, target, vary in zip(paths, call.specs, call.targets, found.vary, strict=True):
        varies = tuple(v and p.is_replicate() for v, p in zip(vary, target.placements, strict=True))
        if target is not spec or any(varies):
            fixes.append((path, target, varies if any(varies) else None))
    first, *others = call.specs
    checked = binding.in_place and (
        first.thin or any(spec is not first and spec.shape and not spec.replicated for spec in others)
    )
    plan = (_CheckedPlan if checked else Plan)(func, fixes, call.results, single, binding.hot)
    if not here and not (binding.like or binding.in_place):
        local = nothing(call.results, made)
    else:
        local = binding.local(call) if binding.local is not None else None
    if here and not binding.in_place and any(0 in spec.local_shape for spec in call.targets):
        local = with_the_others(call, binding.rule, func in VIEWS, _callable(func, local)) or local
    if isinstance(local, tuple) and local[1] is None:
        plan.local, plan.listed = local[0], True
    elif isinstance(local, tuple):
        plan.func, plan.tail = local
    else:
        plan.local = local
    if not binding.in_place:
        _finish(plan, func, (*call.specs, *call.results))
    plan.writes = binding.in_place
    bare = not fixes and plan.tail is None and plan.local is None
    plan.direct = bare and single and not plan.writes
    plan.plain = bare and (plan.writes or not call.results) and not checked
    if single and not plan.writes and not fixes and plan.tail is not None:
        plan.call = plan.func
    return plan
