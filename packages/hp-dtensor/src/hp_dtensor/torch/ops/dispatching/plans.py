"""Plans: what a call does with its operands' local tensors, and what its results are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.rules.factors import NoLegalPlacement
from hp_dtensor.rules.planning import Binding, Call, collect, moved, place, refuse_others
from hp_dtensor.torch.backward.asking import without_modes
from hp_dtensor.torch.backward.autograd import convert
from hp_dtensor.torch.dtensor import DTensor, wrap
from hp_dtensor.torch.ops.dispatching.calls import name_of, on_meta
from hp_dtensor.torch.ops.dispatching.empty_parts import with_the_others
from hp_dtensor.torch.views.moved_view import MAY_COPY, VIEWS, link
from hp_dtensor.torch.views.overlaps import refuse_overlaps_of_call
from hp_dtensor.torch.views.settle import Settle
from hp_platform.extend import map_nested

_impl: Any = torch._C._disabled_torch_function_impl
Tensor = torch.Tensor


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
            args, kwargs = moved(self.fixes, args, kwargs, convert)
        if self.tail is not None:
            return _impl(self.func, (), (args[0], *self.tail))
        if self.listed:
            return _impl(self.local, (), (args,))
        if kwargs:
            return _impl(self.local or self.func, (), args, kwargs)
        return _impl(self.local or self.func, (), args)


class _CheckedPlan(Plan):
    """A planned write of which torch's own check of overlapping memory may differ by rank."""

    __slots__ = ()

    def compute(self, args: Any, kwargs: Any) -> Any:
        refuse_overlaps_of_call(self.func, args, kwargs)
        return super().compute(args, kwargs)


def _on_meta(call: Call) -> Any:
    """Return the results' shapes by running the function on meta tensors, so that its argument checks come first."""
    with torch.no_grad(), without_modes():
        named = {name: map_nested(on_meta, value) for name, value in call.kwargs.items()}
        return call.func(*map_nested(on_meta, call.args), **named)


def nothing(results: list[TensorSpec], outputs: Any) -> Callable[..., Any]:
    """Return the function for a rank outside the mesh: results without elements, in the graph of the operands.

    Args:
        results: each result's layout.
        outputs: the results on meta.
    """
    several = not isinstance(outputs, Tensor)
    values = [value for value in (outputs if several else (outputs,)) if isinstance(value, Tensor)]

    def run(*args: Any, **kwargs: Any) -> Any:
        flat = [*args, *kwargs.values()]
        flat += [item for value in flat if isinstance(value, (list, tuple)) for item in value]
        tensors = [value for value in flat if isinstance(value, Tensor)]
        tied = sum(value.reshape(-1)[:0].sum() for value in tensors if value.requires_grad)
        parts = []
        for spec, value in zip(results, values, strict=True):
            part = torch.zeros(spec.local_shape, dtype=value.dtype, device=tensors[0].device)
            inexact = value.dtype.is_floating_point or value.dtype.is_complex
            parts.append(part + tied.to(value.dtype) if inexact and isinstance(tied, Tensor) else part)
        return (type(outputs)(parts) if isinstance(outputs, (tuple, list)) else parts) if several else parts[0]

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
    call = Call(func, tuple(args), dict(kwargs), name_of(func))
    collect(call, binding, DTensor)
    refuse_others(call, binding, DTensor)
    here = call.specs[0].mesh.get_coordinate() is not None
    meta, shapes = None, binding.shapes(call) if binding.shapes is not None and here else None
    single = shapes is not None
    if shapes is None:
        meta = call.given[0] if binding.like or binding.in_place else _on_meta(call)
        single = isinstance(meta, Tensor)
        outs = [meta] if single else [value for value in meta if isinstance(value, Tensor)]
        shapes = [tuple(value._spec.shape if isinstance(value, DTensor) else value.shape) for value in outs]
    fixes = place(call, binding, shapes, [tensor.dtype.itemsize for tensor in call.given])
    if call.kwargs.get("inplace") and call.targets[0] is not call.specs[0]:  # F.relu(x, inplace=True)
        raise NoLegalPlacement(
            f"with inplace=True, {call.specs[0]} is written, and it would have to be moved to {call.targets[0]} first;"
            " redistribute it before, or leave inplace=True out"
        )
    first, *others = call.specs
    checked = binding.in_place and (
        first.thin or any(spec is not first and spec.shape and not spec.replicated for spec in others)
    )
    plan = (_CheckedPlan if checked else Plan)(func, fixes, call.results, single, binding.hot)
    if not here and not (binding.like or binding.in_place):
        local = nothing(call.results, meta)
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
