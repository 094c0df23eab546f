"""Plans: a call on its operands' local tensors, its results, and the views among them.

Note [The graph of nothing]
Of no elements, some of torch's functions give a gradient that is in no graph, or is in one where others are not. Ranks
whose gradients differ so record different moves, and where the gradient is differentiated they would wait for each
other ever after. A rank without elements comes to the graph of the others by two ways:

- Kernels that know the gradient of nothing (``cumprod``, ``var``, attention) compute on one element, a number that
  nobody reads, and nothing of the result is taken.
- A view that is taken again after a write goes by ``as_strided``, whose gradient for nothing is zeros. Such views are
  recorded as the functions that they are: autograd's view replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.grad_mode import _force_original_view_tracking

from hp_dtensor.layout.placements import RaggedShard
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.rules.factors import NoLegalPlacement
from hp_dtensor.rules.planning import Binding, Call, collect, moved, place, refuse_others
from hp_dtensor.torch.backward.autograd import convert
from hp_dtensor.torch.backward.compat import without_modes
from hp_dtensor.torch.dtensor import DTensor, wrap
from hp_dtensor.torch.ops.dispatching.calls import name_of, on_meta
from hp_dtensor.torch.views.moved_view import MAY_COPY, VIEWS, link
from hp_dtensor.torch.views.overlaps import refuse_overlaps_of_call
from hp_platform.extend import map_nested

if TYPE_CHECKING:
    from hp_dtensor.rules.planning import Call


from hp_dtensor.layout.sharding import contiguous
from hp_dtensor.torch.views.moved_view import linked
from hp_dtensor.torch.views.strides import local_strides, on_one_device
from hp_platform.torch.internals import get_requires_grad, plainly, same_memory

T = torch.Tensor


class ViewDecision:
    """Decision whether a planned call on a thin DTensor returns a view or a copy, the same on all ranks.

    It also records the result's strides. The decision depends only on the operand's strides, and is cached by them.

    Args:
        func: a function that returns views, or may; its layouts and other arguments are those of one plan.
        may_copy: the function returns a copy if strides don't allow a view.
    """

    __slots__ = ("_func", "_known", "_may_copy")

    def __init__(self, func: Any, may_copy: bool) -> None:
        self._func, self._may_copy = func, may_copy
        self._known: dict[Any, tuple[list[torch.Tensor], bool, Any]] = {}

    def __call__(self, out: Any, args: Any, kwargs: Any) -> Any:
        source = args[0] if args else kwargs["input"]
        strides = source.__dict__.get("_strides") if source._spec.thin else local_strides(source)
        answer = self._known.get(strides)
        if answer is None:
            answer = self._known[strides] = self._ask(out, source, args, kwargs)
        metas, is_view, noted = answer
        if self._may_copy and is_view is not same_memory(out, source):
            if is_view:
                return linked(out, source, self._func, args, kwargs, metas)
            spec, out = out._spec, plainly(T.clone, (), (out,), {"memory_format": torch.contiguous_format})
            out.__class__, out._spec = source.__class__, spec
        if noted is not None:
            for x, strides in zip(out if isinstance(out, (list, tuple)) else (out,), noted, strict=True):
                if x is not source:  # `contiguous` may return its operand
                    x._strides = strides
        return out

    def _ask(self, out: Any, source: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], bool, Any]:
        """Return one device's result, whether it is a view, and the strides to note, None if there are none."""
        metas, is_view = on_one_device(self._func, source, args, kwargs)
        specs = [x._spec for x in (out if isinstance(out, (list, tuple)) else (out,))]
        noted = [
            meta.stride() if spec.thin and meta.stride() != contiguous(spec.shape) else None
            for spec, meta in zip(specs, metas, strict=True)
        ]
        return metas, is_view, noted if any(noted) else None


_ON_STAND_INS = frozenset({"attention", "norm", "statistics", "replicated_dim"})
"""Rules whose kernels record another graph, or none, for an empty operand: a rank with an empty shard runs them on
numbers in its place, see `_on_stand_ins`, so that its backward communicates as the others' do."""


def with_the_others(call: Call, rule: str, view: bool, compute: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a function that puts this rank into a graph like that of the others; None if ``compute`` is None.

    Args:
        call: the call, planned.
        rule: its rule's name.
        view: the result is a view.
        compute: what runs on the local tensors.
    """
    if all(_filled(spec) == spec.local_shape for spec in call.targets):
        return None
    partial = any(placement.is_partial() for spec in call.results for placement in spec.placements)
    if view or rule not in _ON_STAND_INS or partial:
        return _replayed(compute)  # what is no view may give one all the same: einsum squeezes a product
    return _on_stand_ins(call, compute)


def _replayed(compute: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _force_original_view_tracking(True):
            return compute(*args, **kwargs)

    return run


def _on_stand_ins(call: Call, compute: Callable[..., Any]) -> Callable[..., Any]:
    paths = [path for path, tensor in zip(call.paths, call.tensors, strict=True) if tensor is not None]
    shapes = {path: _filled(spec) for path, spec in zip(paths, call.targets, strict=True) if len(path) == 1}

    def run(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        if not (torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and get_requires_grad(x) for x in values)):
            return compute(*args, **kwargs)
        stand_ins = [_stand_in(x, shapes.get((place,))) for place, x in enumerate(args)]
        result = compute(*stand_ins, **{name: _stand_in(x, shapes.get((name,))) for name, x in kwargs.items()})
        if isinstance(result, torch.Tensor):
            return _cut(result, call.results[0].local_shape)
        parts = iter(call.results)
        cut = [_cut(x, next(parts).local_shape) if isinstance(x, torch.Tensor) else x for x in result]
        return type(result)(cut)

    return run


def _filled(spec: Any) -> tuple[int, ...]:
    """Return the local shape, with one element instead of none in dims that are not globally empty."""
    if any(isinstance(placement, RaggedShard) for placement in spec.placements):
        return spec.local_shape
    return tuple(1 if size and not local else local for size, local in zip(spec.shape, spec.local_shape, strict=True))


def _stand_in(x: Any, shape: tuple[int, ...] | None) -> Any:
    """Numbers of this shape, in the graph of ``x``, which has none; no two are equal: their variance is not 0."""
    if shape is None or tuple(x.shape) == shape:
        return x
    zeros = torch.zeros(shape, dtype=x.dtype, device=x.device)
    if not (x.is_floating_point() or x.is_complex()):
        return zeros
    ramp = torch.arange(1, zeros.numel() + 1, dtype=torch.float32, device=x.device).cos().view(shape)
    return zeros + ramp + x.sum()


def _cut(result: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    for dim, size in enumerate(shape):
        if not size:
            result = result.narrow(dim, 0, 0)
    return result


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
            return plainly(self.func, (), (args[0], *self.tail))
        if self.listed:
            return plainly(self.local, (), (args,))
        if kwargs:
            return plainly(self.local or self.func, (), args, kwargs)
        return plainly(self.local or self.func, (), args)


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
        plan.finish = ViewDecision(func, func in MAY_COPY)


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
