"""Operations on DTensors in a graph of torch.compile, and the queries that are answered while it is traced.

See Note [Compiled regions run on local tensors] in `hp_dtensor.torch.compile.compiling`.

Note [A view that moved in a graph]
    Outside of graphs such a view follows its source (Note [A view that moved] in `moved_view`). A graph has plain local
    tensors, of which none follows another, so there the view is of a class of its own. Writing to it is refused, and so
    is reading it after a write that may have been to its source: a write of the same dtype to a DTensor with no more
    elements than the source. A view that leaves the region keeps its class, and stays a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hp_dtensor.creation.creation import layout_of
from hp_dtensor.layout.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.spec import TensorSpec, meshes, normalize, spec_named, varying
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.torch.backward import autograd
from hp_dtensor.torch.dtensor import DTensor, wrap
from hp_dtensor.torch.ops.dispatching import dispatch, special
from hp_dtensor.torch.ops.dispatching.calls import writes_first
from hp_dtensor.torch.views.moved_view import VIEWS
from hp_platform.extend import list_leaves
from hp_platform.torch.internals import without_torch_function

T = torch.Tensor
HOLE = "<the next tensor of the call>"


@dataclass(frozen=True, slots=True)
class _Call:
    """A planned call in a graph.

    Attributes:
        compute: returns the local tensors of the results.
        args, kwargs: the arguments, with a hole for each tensor.
        operands: the layouts of the tensors.
        results: the layouts of the results.
        single: there is one result, not in a list.
        copied: the results would be views on a single device, but are copies here.
    """

    compute: Callable[[Any, Any], Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    single: bool
    copied: bool


_calls: dict[str, _Call] = {}


def constant(function: Any) -> Any:
    """Mark a function that runs while Dynamo traces: its arguments are constants, and so is its result."""
    function._dynamo_marked_constant = True
    return function


# ---- at trace time ----
@constant
def enter() -> None:
    """Allow the functions of the next section in a graph; not at import, because the process may never compile."""
    import torch._dynamo
    import torch._functorch.config

    for function in (execute, local, move, vary):
        torch._dynamo.allow_in_graph(function)
    torch._functorch.config.check_custom_op_aliasing = False


@constant
def question(func: Any) -> str:
    """Return how ``func`` is traced: a kind of metadata, ``"local"``, ``"same"``, ``"dropout"``, or ``"plan"``."""
    if type(func) is str:  # an override's name
        func = getattr(T, func)
    kinds = {T.size: "size", T.dim: "dim", T.ndimension: "dim", T.numel: "numel", T.nelement: "numel", T.__len__: "len"}
    if func in kinds:
        return kinds[func]
    if isinstance(func, torch._ops.HigherOrderOperator):
        raise NotImplementedError(
            f"torch.compile: {func} with DTensors among its arguments is not traced; checkpoint modules that take and"
            " return plain tensors (use_local_output=True), or checkpoint the compiled module"
        )
    if func in (F.dropout, torch.dropout):
        return "dropout"
    handler = dispatch._SPECIAL.get(func)
    if handler is None or func is T.__getitem__:
        return "plan"
    traced = {special._local: "local", special._same: "same", special._detach: "same"}
    if handler in traced:
        return traced[handler]
    raise NotImplementedError(
        f"torch.compile: {_shown(func)} of a DTensor is not traced; call it on the local tensor (to_local), or outside"
        " of the compiled region (torch.compiler.disable)"
    )


def _shown(func: Any) -> str:
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or repr(func)


@constant
def planned(func: Any, args: Any, names: Any, values: Any, layouts: Any, dtypes: Any) -> str:
    """Plan a call and return its name among ``_calls``. The layout of a plain tensor is None."""
    func = getattr(T, func) if type(func) is str else func  # an override's name
    kwargs = dict(zip(names, values, strict=True))
    spec = next(spec_named(layout) for layout in layouts if layout is not None)
    specs = []
    for layout in layouts:
        if layout is None:
            raise NotImplementedError(
                f"torch.compile: {_shown(func)} of a DTensor placed {spec.placements} and a plain tensor; distribute"
                " the plain tensor (DTensor.from_local)"
            )
        specs.append(spec_named(layout))
    with torch.no_grad():
        stand_ins = [
            wrap(torch.empty(spec.local_shape, dtype=dtype, device="meta"), spec)
            for spec, dtype in zip(specs, dtypes, strict=True)
        ]
        tensors = iter(stand_ins)
        plan = dispatch.plan_for(func, _fill(args, tensors), {k: _fill(v, tensors) for k, v in kwargs.items()})
    name = f"{_shown(func)} {len(_calls)}"
    results = tuple(plan.outs) if plan.spec is None else (plan.spec,)
    _calls[name] = _Call(plan.compute, args, kwargs, tuple(specs), results, plan.spec is not None, plan.copied)
    return name


def _fill(template: Any, tensors: Any) -> Any:
    if type(template) in (list, tuple):
        return type(template)([_fill(item, tensors) for item in template])
    return next(tensors) if type(template) is str and template == HOLE else template


_written: list[tuple[int, torch.dtype]] = []
"""The numbers of elements and dtypes of the DTensors that were written in place, in the order of tracing."""


@constant
def note_write(func: Any, name: str, dtype: Any) -> None:
    """Record that a planned call was traced, which may write to its first operand."""
    if writes_first(getattr(T, func) if type(func) is str else func):
        _written.append((math.prod(_calls[name].operands[0].shape), dtype))


@constant
def shape_of(layout: str) -> Any:
    """Return the global shape as constants: Dynamo treats numbers that it reads from a layout itself as dynamic."""
    return tuple(spec_named(layout).shape)


@constant
def taken(name: str, dtype: Any) -> Any:
    """Return when a planned call took a view that moved, with its source's size and dtype; None for other calls."""
    call = _calls[name]
    return (len(_written), math.prod(call.operands[0].shape), dtype) if call.copied else None


@constant
def check_copy(func: Any, first: bool, taken: Any) -> bool:
    """Check a call on a view that moved, and return whether its results are views of that view.

    Args:
        func: the function.
        first: the view is its first argument.
        taken: see `taken`.

    Raises:
        NotImplementedError: it would write to the view, or read it after a write that may have been to its source.
    """
    func = getattr(T, func) if type(func) is str else func
    if first and writes_first(func):
        raise NotImplementedError(
            f"{REFUSED}: {_shown(func)} would not reach its source. Write to the source by index or mask outside of the"
            " region, or clone() the view first"
        )
    since, numel, dtype = taken
    if any(count <= numel and kind == dtype for count, kind in _written[since:]):
        raise NotImplementedError(
            f"{REFUSED}, and a DTensor that may be its source was written in place since: {_shown(func)} would read the"
            " old value. Take the view after the write, or clone() it before"
        )
    return first and func in VIEWS


@constant
def refuse_moved(func: Any) -> None:
    """Refuse a view that moved outside of the region.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"torch.compile: {_shown(func)} of a DTensor that is a view of another one and had to be redistributed: it"
        " follows its source, which is impossible in a graph; clone() it before the compiled region"
    )


@constant
def results(name: str) -> tuple[TensorSpec, ...]:
    """Return the layouts of a planned call's results."""
    return _calls[name].results


@constant
def is_single(name: str) -> bool:
    """Tell whether a planned call has one result."""
    return _calls[name].single


_PLACEMENTS = {kind.__name__: kind for kind in (Shard, StridedShard, RaggedShard, Replicate, Partial)}


def decode_placements(encoded: Any) -> tuple[Placement, ...]:
    """Return the placements from the constants that ``encode_placements`` made of them."""
    return tuple([_PLACEMENTS[kind](*args) for kind, args in encoded])


@constant
def placed(layout: str, encoded: Any) -> TensorSpec:
    """Return ``layout`` with other placements, each encoded as its kind and arguments."""
    spec = spec_named(layout)
    placements = normalize(decode_placements(encoded), spec.mesh, len(spec.shape), "redistribute")
    return spec.with_placements(placements)


@constant
def replicated(layout: str) -> TensorSpec:
    """Return ``layout``, replicated on every axis."""
    spec = spec_named(layout)
    return spec.with_placements([Replicate()] * spec.mesh.ndim)


@constant
def shows_varying(layout: str, encoded: Any) -> Any:
    """Return the axes on which a local tensor varies where it is taken with these ``grad_placements``."""
    placements = decode_placements(encoded)
    return varying(spec_named(layout), placements)


def mesh_of(key: Any) -> DeviceMesh:
    """Return the mesh of which a traced function knows ``mesh._key``, a constant."""
    device_type, shape, ranks, names = key
    existing = next((mesh for mesh in meshes() if mesh._key == key), None)
    return existing or DeviceMesh(device_type, np.array(ranks).reshape(shape), names, _init_groups=False)


@constant
def laid_out(mesh: Any, encoded: Any, local: Any, shape: Any, watched: bool) -> TensorSpec:
    """Return the layout of ``DTensor.from_local``."""
    return layout_of(local, mesh_of(mesh), decode_placements(encoded), shape, watched)


# ---- in the graph ----
def execute(name: str, *operands: torch.Tensor) -> Any:
    """Return the local tensor of a planned call."""
    call = _calls[name]
    with without_torch_function():
        for operand, spec in zip(operands, call.operands, strict=True):
            operand._spec = spec  # type: ignore[attr-defined]
        tensors = iter(operands)
        return call.compute(_fill(call.args, tensors), {k: _fill(v, tensors) for k, v in call.kwargs.items()})


def local(x: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of what goes into the graph, which may be a DTensor there."""
    with without_torch_function():
        return x.view_as(x)


def move(name: str, source: str, target: str, x: torch.Tensor) -> torch.Tensor:
    """Redistribute; ``name`` tells of which kind."""
    src, dst = spec_named(source), spec_named(target)
    with without_torch_function():
        if src is dst:
            return x.view_as(x)
        if name == "shared":
            x._spec = src  # type: ignore[attr-defined]
            return autograd.convert(x, dst)
        return autograd.move(x, src, dst)


def vary(layout: str, vary: Any, x: torch.Tensor) -> torch.Tensor:
    """Return a local tensor that varies on these axes from here on."""
    with without_torch_function():
        x._spec = spec_named(layout)  # type: ignore[attr-defined]
        return autograd.convert(x, spec_named(layout), vary)


# ---- views that moved ----
REFUSED = (
    "torch.compile: a view of a DTensor along a sharded dim had to be redistributed, so inside a compiled region it is"
    " a copy"
)


def _torch_function_of_copies(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    written = [*args[:1], kwargs.get("out")] if writes_first(func) else [kwargs.get("out")]
    if any(type(x) is CopiedView for x in list_leaves(written)):
        raise RuntimeError(f"{REFUSED}: {func.__name__} would not reach its source; clone() it first")
    copies: list[Any] = [x for x in list_leaves((args, kwargs)) if type(x) is CopiedView]
    for x in copies:
        x.__class__ = DTensor
    try:
        out = func(*args, **kwargs)
    finally:
        for x in copies:
            x.__class__ = CopiedView
    if func in VIEWS:
        for x in list_leaves(out):
            if type(x) is DTensor:
                x.__class__ = CopiedView
    return out


class CopiedView(DTensor):
    """A view that is a copy of its source's elements; see Note [A view that moved in a graph]."""

    _taken: Any  # see `hp_dtensor.torch.compile.graph.taken`
    __torch_function__ = classmethod(_torch_function_of_copies)  # type: ignore[assignment]
