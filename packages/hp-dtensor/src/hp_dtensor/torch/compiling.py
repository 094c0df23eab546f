"""torch.compile: what Dynamo traces in place of the functions that work on DTensors.

Note [Compiled regions run on local tensors]
    Dynamo follows a tensor subclass through its ``__torch_function__``. The functions here stand in for ours while it
    traces (``_torchdynamo_inline`` names them, at no cost to the eager path). Layouts are constants there, guarded by
    their names, so a call is planned once, at trace time, on stand-ins on the meta device. What stays in the graph are
    the local operations, which the compiler behind Dynamo sees through, and ``hp_dtensor::redistribute``, one operator
    for any change of layout, which runs the program that runs outside of a graph. Its arguments are the texts of two
    layouts, not numbers: compiled graphs are cached on disk, and a number means something else in the next process.

    Handlers of single functions work on DTensors, which a graph does not have. Those that are a plan, or a question to
    the local tensor, are traced; the others raise.

    torch's first run of a compiled graph looks for aliases in a mode that refuses subclasses which are no parameters,
    so a region with DTensors turns that check off (``torch._functorch.config.check_custom_op_aliasing``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec import TensorSpec, meshes, named, normalize
from hp_dtensor.torch import api, autograd, dispatch
from hp_dtensor.torch import dtensor as eager
from hp_dtensor.torch.dtensor import DTensor
from hp_dtensor.torch.overrides import Override

__all__ = ["constant", "install", "mesh_of", "placements_of", "texts", "traces_as"]

T = torch.Tensor
_off: Any = torch._C.DisableTorchFunctionSubclass
_HOLE = "<the next tensor of the call>"


@dataclass(frozen=True, slots=True)
class _Call:
    """A planned call in a graph.

    Attributes:
        compute: gives the results' local parts.
        args, kwargs: the arguments, with a hole for each tensor.
        operands: the layouts of the tensors.
        results: the layouts of the results.
        single: there is one result, and it is no list.
    """

    compute: Callable[[Any, Any], Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    single: bool


_calls: dict[str, _Call] = {}


def constant(function: Any) -> Any:
    """Marks a function that runs while Dynamo traces: its arguments are constants, and so is its result."""
    function._dynamo_marked_constant = True
    return function


def traces_as(function: Any) -> Callable[[Any], Any]:
    """Makes the decorated function what Dynamo traces where ``function`` is called."""

    def mark(stand_in: Any) -> Any:
        function._torchdynamo_inline = stand_in
        return stand_in

    return mark


# ---- at trace time ----
@constant
def _enter() -> None:
    """Lets the functions of the next section stand in a graph. Not at import: nobody may compile in this process."""
    import torch._dynamo
    import torch._functorch.config

    for function in (_execute, _move, _vary):
        torch._dynamo.allow_in_graph(function)
    torch._functorch.config.check_custom_op_aliasing = False


@constant
def _question(func: Any) -> str:
    """How ``func`` is traced: a kind of metadata, ``"local"``, ``"same"``, ``"dropout"``, or ``"plan"``."""
    from hp_dtensor.torch import special

    if type(func) is str:  # an override's name
        func = getattr(T, func)
    kinds = {T.size: "size", T.dim: "dim", T.ndimension: "dim", T.numel: "numel", T.nelement: "numel", T.__len__: "len"}
    if func in kinds:
        return kinds[func]
    if func in (F.dropout, torch.dropout):
        return "dropout"
    handler = dispatch._SPECIAL.get(func)
    if handler is None or func is T.__getitem__:
        return "plan"
    known = {special._local: "local", special._same: "same"}
    if handler in known:
        return known[handler]
    raise NotImplementedError(
        f"torch.compile: {_shown(func)} of a DTensor is not traced; call it on the local part (to_local), or outside of"
        " the compiled region (torch.compiler.disable)"
    )


def _shown(func: Any) -> str:
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or repr(func)


@constant
def _planned(func: Any, args: Any, names: Any, values: Any, layouts: Any, dtypes: Any) -> str:
    """Plans a call; the name of it among ``_calls``. The layout of a plain tensor is None."""
    kwargs = dict(zip(names, values, strict=True))
    known = next(named(layout) for layout in layouts if layout is not None)
    specs = []
    for layout in layouts:
        if layout is None:
            raise NotImplementedError(
                f"torch.compile: {_shown(func)} of a DTensor placed {known.placements} and a plain tensor; distribute"
                " it (DTensor.from_local)"
            )
        specs.append(named(layout))
    with torch.no_grad():
        stand_ins = [
            eager.wrap(torch.empty(spec.local_shape, dtype=dtype, device="meta"), spec)
            for spec, dtype in zip(specs, dtypes, strict=True)
        ]
        given = iter(stand_ins)
        plan = dispatch.plan_for(func, _fill(args, given), {k: _fill(v, given) for k, v in kwargs.items()})
    name = f"{_shown(func)} {len(_calls)}"
    results = tuple(plan.outs) if plan.spec is None else (plan.spec,)
    _calls[name] = _Call(plan.compute, args, kwargs, tuple(specs), results, plan.spec is not None)
    return name


def _fill(template: Any, tensors: Any) -> Any:
    if type(template) in (list, tuple):
        return type(template)([_fill(item, tensors) for item in template])
    return next(tensors) if type(template) is str and template == _HOLE else template


@constant
def _results(name: str) -> tuple[TensorSpec, ...]:
    return _calls[name].results


@constant
def _is_single(name: str) -> bool:
    return _calls[name].single


_PLACEMENTS = {kind.__name__: kind for kind in (Shard, StridedShard, RaggedShard, Replicate, Partial)}


def placements_of(written: Any) -> tuple[Placement, ...]:
    """The placements of which ``texts`` made constants."""
    return tuple([_PLACEMENTS[kind](*args) for kind, args in written])


@constant
def _placed(have: str, written: Any) -> TensorSpec:
    """The layout ``have`` with other placements, each as its kind and arguments."""
    spec = named(have)
    placements = normalize(placements_of(written), spec.mesh, len(spec.shape), "redistribute")
    return spec.with_placements(placements)


@constant
def _replicated(have: str) -> TensorSpec:
    spec = named(have)
    return spec.with_placements([Replicate()] * spec.mesh.ndim)


@constant
def _made_local(have: str, written: Any) -> Any:
    """What varies where a DTensor's local part is taken, for its ``grad_placements``."""
    placements = placements_of(written)
    return autograd.varying(named(have), placements)


def mesh_of(key: Any) -> DeviceMesh:
    """The mesh of which a traced function knows ``mesh._key``, a constant."""
    device_type, shape, ranks, names = key
    found = next((mesh for mesh in meshes() if mesh._key == key), None)
    return found or DeviceMesh(device_type, np.array(ranks).reshape(shape), names, _init_groups=False)


@constant
def _laid_out(mesh: Any, written: Any, local: Any, shape: Any) -> TensorSpec:
    """The layout of ``DTensor.from_local``."""
    return api.layout_of(local, mesh_of(mesh), placements_of(written), shape)


# ---- in the graph ----
def _execute(name: str, *operands: torch.Tensor) -> Any:
    """The local part of a planned call."""
    call = _calls[name]
    with _off():
        for operand, spec in zip(operands, call.operands, strict=True):
            operand._spec = spec  # type: ignore[attr-defined]
        given = iter(operands)
        return call.compute(_fill(call.args, given), {k: _fill(v, given) for k, v in call.kwargs.items()})


def _move(name: str, have: str, want: str, x: torch.Tensor) -> torch.Tensor:
    """A redistribution; ``name`` says of which kind."""
    src, dst = named(have), named(want)
    with _off():
        if src is dst:
            return x.view_as(x)
        if name == "shared":
            x._spec = src  # type: ignore[attr-defined]
            return autograd.convert(x, dst)
        return autograd.move(x, src, dst)


def _vary(have: str, vary: Any, x: torch.Tensor) -> torch.Tensor:
    with _off():
        x._spec = named(have)  # type: ignore[attr-defined]
        return autograd.convert(x, named(have), vary)


# ---- traced ----
@traces_as(dispatch._torch_function)
def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    func = func.name if isinstance(func, Override) else func
    kwargs = kwargs or {}
    kind = _question(func)
    if kind != "plan":
        return _answer(kind, func, args, kwargs)
    _enter()
    operands: list[Any] = []
    template = [_hollow(value, operands) for value in args]
    values = [_hollow(value, operands) for value in kwargs.values()]
    layouts = [x._spec.name if isinstance(x, DTensor) else None for x in operands]
    dtypes = [x.dtype for x in operands]
    name = _planned(func, tuple(template), tuple(kwargs), tuple(values), tuple(layouts), tuple(dtypes))
    out = _execute(name, *operands)
    results = _results(name)
    if _is_single(name):
        return _wrap(out, results[0])
    return type(out)([_wrap(local, spec) for local, spec in zip(out, results, strict=True)])


def _hollow(value: Any, operands: list[Any]) -> Any:
    if isinstance(value, T):
        operands.append(value)
        return _HOLE
    if isinstance(value, (list, tuple)):
        return tuple([_hollow(item, operands) for item in value])
    return value


def _answer(kind: str, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    shape = x._spec.shape
    if kind == "size":
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return torch.Size(shape) if dim is None else shape[dim]
    if kind == "dim":
        return len(shape)
    if kind == "len":
        return shape[0]
    if kind == "numel":
        return torch.Size(shape).numel()
    if kind == "dropout":
        bound = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
        if bound.get("p", 0.5) == 0.0 or not bound.get("training", True):
            return x
        raise NotImplementedError(
            "torch.compile: dropout of a DTensor is not traced; call it on the local part (to_local), or outside of the"
            " compiled region"
        )
    with _off():
        out = func(*args, **kwargs)
    return _wrap(out, x._spec) if kind == "same" else out


@traces_as(eager.wrap)
def _wrap(local: Any, spec: Any) -> Any:
    made = local.as_subclass(DTensor)
    made._spec = spec
    return made


@traces_as(eager.local_of)
def _local(x: Any) -> Any:
    with _off():
        return x.view_as(x)


@traces_as(eager.redistribute)
def _redistribute(x: Any, spec: Any) -> Any:
    _enter()
    return _wrap(_move("alone", x._spec.name, spec.name, _local(x)), spec)


@traces_as(eager.redistribute_shared)
def _redistribute_shared(x: Any, spec: Any, src: Any = None) -> Any:
    _enter()
    if isinstance(x, DTensor):
        src = x._spec
    return _wrap(_move("shared", spec.name if src is None else src.name, spec.name, x), spec)


def texts(placements: Any) -> Any:
    """Placements as constants, each its kind and arguments; traced."""
    return tuple([_text(placement) for placement in placements])


def _text(placement: Any) -> Any:
    if isinstance(placement, Replicate):
        return "Replicate", ()
    if isinstance(placement, Partial):
        return "Partial", (placement.op,)
    if isinstance(placement, StridedShard):
        return "StridedShard", (placement.dim, placement.split_factor)
    if isinstance(placement, RaggedShard):
        return "RaggedShard", (placement.dims, placement.units)
    if isinstance(placement, Shard):
        return "Shard", (placement.dim,)
    raise TypeError("torch.compile: not a placement")


@traces_as(DTensor.redistribute)
def _redistribute_method(self: Any, device_mesh: Any = None, placements: Any = None, *, async_op: bool = False) -> Any:
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise NotImplementedError("torch.compile: redistribute to a Layout is not traced; give placements")
    if device_mesh is not None and device_mesh._key != self._spec.mesh._key:
        raise NotImplementedError("torch.compile: redistribution to another mesh is not traced")
    wanted = self._spec if placements is None else _placed(self._spec.name, texts(placements))
    return _redistribute(self, wanted)


@traces_as(DTensor.full_tensor)
def _full_tensor(self: Any, *, grad_placements: Any = None) -> Any:
    return _to_local(_redistribute(self, _replicated(self._spec.name)), grad_placements=grad_placements)


@traces_as(DTensor.to_local)
def _to_local(self: Any, *, grad_placements: Any = None) -> Any:
    if grad_placements is None:
        return _local(self)
    _enter()
    vary = _made_local(self._spec.name, texts(grad_placements))
    return _local(self) if vary is None else _vary(self._spec.name, vary, _local(self))


@traces_as(DTensor.from_local)
def _from_local(
    local_tensor: Any,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    run_check: bool = False,
    shape: Any = None,
    stride: Any = None,
) -> Any:
    if run_check or device_mesh is None or placements is None:
        raise NotImplementedError("torch.compile: from_local is traced with a mesh and placements, without run_check")
    local = tuple([int(size) for size in local_tensor.shape])
    spec = _laid_out(device_mesh._key, texts(placements), local, None if shape is None else tuple(shape))
    return _wrap(local_tensor.view_as(local_tensor), spec)


def _shape(self: Any) -> Any:
    return torch.Size(self._spec.shape)


def _ndim(self: Any) -> Any:
    return len(self._spec.shape)


def _dtype(self: Any) -> Any:
    return _local(self).dtype


def _device(self: Any) -> Any:
    return _local(self).device


def _requires_grad(self: Any) -> Any:
    return _local(self).requires_grad


def install() -> None:
    """Leads Dynamo to the getters here; called once, when hp_dtensor's torch side is imported."""
    getters = {"shape": _shape, "ndim": _ndim, "dtype": _dtype, "device": _device, "requires_grad": _requires_grad}
    for name, stand_in in getters.items():
        traces_as(getattr(DTensor, name).fget)(stand_in)
