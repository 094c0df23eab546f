"""Dispatch: a MindSpore kernel on DTensors becomes a plan, made once for each combination of layouts and arguments.

Kernels come in two forms: ``func(*args, **kwargs)``, and ``func(primitive, name, args)`` for the primitives that are
classes. Those of the second form whose tensors stand in a list (``Stack``, ``AddN``) do not come at all; `install`
catches them where MindSpore's Python runs them.

Where a view's dim is cut, its elements are sent, so that it is a copy. A write into the view would not reach its
source, and one into the source would not be seen in the view. On the CPU most writes into a view are lost without
DTensors, too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspore import Tensor, ops
from mindspore._c_expression import (
    NoFallbackGuard,
    TensorPy,
)
from mindspore.ops import Primitive, primitive

from hp_dtensor.functions import replicates_plain
from hp_dtensor.layout.placements import Replicate
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mindspore import compiled
from hp_dtensor.mindspore.backward.autograd import alias, convert, local_mode, local_only
from hp_dtensor.mindspore.dtensor import DTensor, wrap
from hp_dtensor.mindspore.ops.functions import BINDINGS
from hp_dtensor.mindspore.ops.special import DRAWING, EXTREMES, WHOLE, WRITING, draw, extreme, on_whole
from hp_dtensor.rules.factors import NoLegalPlacement
from hp_dtensor.rules.planning import Binding, Call, Fix, collect, mesh_of, moved, place
from hp_platform import get_platform
from hp_platform.extend import map_nested, when_groups_end

VIEWS = frozenset(
    """__getitem__ BroadcastTo BroadcastToView Chunk ChunkView ExpandAs ExpandDims ExpandDimsView Flatten
    FlattenExt Narrow NarrowView Reshape SelectExt SelectExtView Slice Split SplitTensor SplitTensorView
    SplitWithSize SplitWithSizeView Squeeze Transpose TransposeExtView TransposeView DeprecatedTranspose
    Unstack UnstackExt UnstackExtView View""".split()
)
"""Kernels whose results are views."""


def note_view(source: Any, views: Sequence[Any], name: str, *, copied: bool) -> None:
    """Remember that ``views`` are those of ``source``.

    Args:
        source: what the kernel was called on.
        views: its results.
        name: the kernel's name.
        copied: the elements were sent, so that the views have memory of their own.
    """
    for view in views:
        view._view_by = name
    if copied:
        references = source.__dict__.get("_copied_views", ())
        source._copied_views = [ref for ref in references if ref() is not None] + [weakref.ref(view) for view in views]


def before_write(x: Any, name: str) -> None:
    """Refuse a write into a view, or into what has views that would not see it.

    Args:
        x: the DTensor that is to be written to.
        name: what writes.

    Raises:
        RuntimeError: the write would be lost.
    """
    kept = x.__dict__
    if local_only():
        return
    kernel = kept.get("_view_by")
    if kernel is not None:
        raise RuntimeError(
            f"{name}: the DTensor of shape {x._spec.shape} placed {x._spec.placements} is a view made by {kernel},"
            " through which writes don't reach its source. Write source[index] = value, or write into"
            " a copy: view.copy()"
        )
    if any(ref() is not None for ref in kept.get("_copied_views", ())):
        raise RuntimeError(
            f"{name}: the DTensor of shape {x._spec.shape} placed {x._spec.placements} has a view that was gathered"
            " from its shards and would not see the write. Drop the view first (del), or make it of a"
            " copy: source.copy()"
        )


@dataclass(slots=True)
class Plan:
    """A planned call: moves, the local function, the results' layouts."""

    fixes: list[Fix]
    outs: list[TensorSpec]
    local: Any
    in_place: bool
    view: bool
    name: str

    def run(self, run: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the call on operands with the layouts for which the plan was made."""
        if self.in_place:
            before_write(args[0], self.name)
        values, named = moved(self.fixes, args, kwargs, convert)
        with local_mode():
            out = (self.local or run)(values, named)
            if self.in_place and get_platform().devices.kind == "cpu":
                # On the CPU only a copy is in place: MindSpore's add_ and its kin leave what they are called on as it
                # was, and return the new values.
                TensorPy.copy_(args[0], out)
        if self.in_place:
            return args[0]
        if isinstance(out, Tensor):
            result = wrap(out, self.outs[0])
            if self.view:
                note_view(args[0], (result,), self.name, copied=bool(self.fixes))
            return result
        flat = [value for value in out if isinstance(value, Tensor)]
        for value, spec in zip(flat, self.outs, strict=True):
            wrap(value, spec)
        if self.view:
            note_view(args[0], flat, self.name, copied=bool(self.fixes))
        return out


def make_plan(call: Call, binding: Binding) -> Plan:
    """Plans a call: operands, result shapes, placements, local function.

    Raises:
        NoLegalPlacement: an in-place call that would have to move what it writes to.
    """
    collect(call, binding, DTensor)
    assert binding.shapes is not None
    shapes = [tuple(shape) for shape in binding.shapes(call) or ()]
    fixes = place(call, binding, shapes, [tensor.itemsize for tensor in call.given])
    return Plan(
        fixes,
        call.results,
        binding.local(call) if binding.local is not None else None,
        binding.in_place,
        call.name in VIEWS,
        call.name,
    )


_PLANS: dict[Any, Plan] = {}
when_groups_end(_PLANS.clear)
_LIMIT = 1 << 16
_TELLS = frozenset({"typeof", "DType"})  # these make no tensor


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the kernel that ``__fallback__`` intercepted."""
    if len(args) == 3 and isinstance(args[0], Primitive) and isinstance(args[1], str):
        prim, name, values = args

        def run(arguments: Sequence[Any], named: dict[str, Any]) -> Any:
            return func(prim, name, tuple(arguments))

        return run_kernel(name, run, tuple(values), {}, _attributes(prim))
    return run_kernel(func.name, lambda given, named: func(*given, **named), tuple(args), dict(kwargs))


def _attributes(prim: Primitive) -> tuple[tuple[str, Any], ...]:
    """Return the constructor arguments of a primitive, as far as a plan may depend on them."""
    kept = ((k, tuple(v) if isinstance(v, list) else v) for k, v in prim.attrs.items())
    return tuple(sorted((k, v) for k, v in kept if isinstance(v, (bool, int, float, str, tuple))))


def run_kernel(
    name: str, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], attributes: tuple[tuple[str, Any], ...] = ()
) -> Any:
    """Run a kernel on DTensors by its plan.

    Args:
        name: the kernel's name, as in the table of `hp_dtensor.mindspore.ops.functions`.
        run: calls it: ``run(positional values, keyword values)``.
        args: its positional arguments.
        kwargs: its keyword arguments.
        attributes: pairs of what else the plan depends on: a primitive's own.

    Raises:
        NotImplementedError: the kernel has no binding.
        ValueError: plain tensors among DTensors, or DTensors of two meshes.
    """
    if local_only() or name in _TELLS:
        with NoFallbackGuard():
            return run(args, kwargs)
    args, kwargs = _replicate_plain(name, args, kwargs)
    key: Any = None
    with contextlib.suppress(TypeError):
        key = (name, attributes, *map(_part, args), *((k, _part(v)) for k, v in kwargs.items()))
        found = _PLANS.get(key)
        if found is not None:
            return found.run(run, args, kwargs)
    if name in WHOLE or name in WRITING:
        return on_whole(name, run, args, kwargs)
    if name in EXTREMES:
        found = extreme(name, run, args, kwargs)
        if found is not None:
            return found
    if name in DRAWING:
        return draw(run, args, kwargs)
    plan = _make(Call(run, args, kwargs, name, dict(attributes)))
    if key is not None:
        if len(_PLANS) > _LIMIT:
            _PLANS.clear()
        _PLANS[key] = plan
    return plan.run(run, args, kwargs)


def _part(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value._spec, value.itemsize
    if type(value) is float:
        return float  # no rule reads one
    if isinstance(value, (list, tuple)):
        return (type(value) is list, *map(_part, value))
    hash(value)
    return type(value), value


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _replicate_plain(name: str, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Plain tensors as replicated DTensors: those of one element always, others where the user said so."""
    tensors = list(_tensors((*args, *kwargs.values())))
    some = next(tensor for tensor in tensors if isinstance(tensor, DTensor))
    if all(isinstance(tensor, DTensor) for tensor in tensors):
        return args, kwargs
    mesh = some._spec.mesh

    def replicated(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        if value.size != 1 and not replicates_plain():
            raise ValueError(
                f"{name}: a plain tensor of shape {tuple(value.shape)} meets a DTensor of shape {some._spec.shape}"
                f" placed {some._spec.placements}. Distribute it (distribute_tensor or DTensor.from_local), or take"
                " plain tensors as replicated: `with hp_dtensor.implicit_replication():`"
            )
        with NoFallbackGuard():
            same = alias(value) if value._requires_grad else ops.stop_gradient(value)
        return wrap(same, TensorSpec.of(mesh, (Replicate(),) * mesh.ndim, value.shape))

    if "Inplace" in name and not isinstance(args[0], DTensor):
        raise ValueError(
            f"{name}: writing a DTensor of shape {some._spec.shape} into a plain tensor of shape"
            f" {tuple(args[0].shape)}; gather it first: full_tensor()"
        )
    return map_nested(replicated, tuple(args)), {k: map_nested(replicated, v) for k, v in kwargs.items()}


def _make(call: Call) -> Plan:
    binding = BINDINGS.get(call.name)
    operands = [t for t in _tensors((*call.args, *call.kwargs.values())) if isinstance(t, DTensor)]
    shown = ", ".join(f"{t._spec.shape} {t._spec.placements}" for t in operands)
    if binding is None:
        raise NotImplementedError(
            f"no sharding rule for MindSpore's kernel {call.name} (DTensors: {shown}). Bind it in"
            " hp_dtensor.mindspore.ops.functions (one line), gather the operands first with full_tensor(), or, where it"
            f" is right on parts, say so: @hp_dtensor.register_sharding({call.name!r}) on a function of its arguments"
            " that returns pairs of placements, such as [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]"
        )
    mesh_of(call.name, operands)
    try:
        return make_plan(call, binding)
    except NoLegalPlacement as error:
        raise RuntimeError(f"{call.name}: {error}") from None


def forget_plans() -> None:
    """Drop all plans, after the rule of a kernel changed."""
    _PLANS.clear()


def install() -> None:
    """Catches the primitives whose tensors stand in a list, once a process."""
    plain = primitive._run_op
    if getattr(plain, "_of_dtensors", False):
        return

    def run_op(obj: Any, op_name: str, args: Any) -> Any:
        if not local_only():
            for value in args:
                if isinstance(value, (list, tuple)) and any(isinstance(v, DTensor) for v in value):
                    named = {"axis": obj.attrs["axis"]} if "axis" in obj.attrs else {}
                    arguments = tuple(args)
                    return run_kernel(op_name, lambda a, _: plain(obj, op_name, a), arguments, named, _attributes(obj))
        return plain(obj, op_name, args)

    run_op._of_dtensors = True
    primitive._run_op = run_op


install()
compiled.install()
