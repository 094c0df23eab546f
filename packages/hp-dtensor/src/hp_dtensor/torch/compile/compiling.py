"""torch.compile: the functions that Dynamo traces in place of those that work on DTensors.

Note [Compiled regions run on local tensors]
    Dynamo traces a tensor subclass through its ``__torch_function__``. The functions here replace ours while it traces
    (``_torchdynamo_inline`` names them, at no cost to eager mode). Layouts are constants there, guarded by their names,
    so a call is planned once, at trace time, on meta tensors. The graph contains the local operations, which the
    compiler behind Dynamo optimizes, and ``hp_dtensor::redistribute``, one operator for any change of layout, which
    runs the same code as outside of a graph. Its arguments are the names of two layouts as text, not numbers: compiled
    graphs are cached on disk, and a number means something else in the next process.

    Handlers of single functions work on DTensors, which a graph does not have. Those that are a plan, or a query of
    the local tensor, are traced; the others raise.

    torch's first run of a compiled graph looks for aliases in a mode that refuses tensor subclasses that are not
    parameters, so a region with DTensors turns that check off (``torch._functorch.config.check_custom_op_aliasing``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from hp_dtensor.layout.placements import Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.torch import dtensor as eager
from hp_dtensor.torch.compile import graph
from hp_dtensor.torch.compile.graph import CopiedView
from hp_dtensor.torch.compile.overrides import Override
from hp_dtensor.torch.dtensor import DTensor
from hp_dtensor.torch.ops.dispatching import dispatch
from hp_dtensor.torch.views.moved_view import MovedView
from hp_platform.torch.internals import without_torch_function

T = torch.Tensor


def traces_as(function: Any) -> Callable[[Any], Any]:
    """Make Dynamo trace the decorated function where ``function`` is called."""

    def mark(stand_in: Any) -> Any:
        function._torchdynamo_inline = stand_in
        return stand_in

    return mark


# ---- traced ----
@traces_as(dispatch._torch_function)
def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    func = func.name if isinstance(func, Override) else func
    kwargs = kwargs or {}
    kind = graph.question(func)
    if kind != "plan":
        return _answer(kind, func, args, kwargs)
    graph.enter()
    operands: list[Any] = []
    template = [_hollow(value, operands) for value in args]
    values = [_hollow(value, operands) for value in kwargs.values()]
    layouts = [x._spec.name if isinstance(x, DTensor) else None for x in operands]
    dtypes = [x.dtype for x in operands]
    name = graph.planned(func, tuple(template), tuple(kwargs), tuple(values), tuple(layouts), tuple(dtypes))
    out = graph.execute(name, *operands)
    results = graph.results(name)
    graph.note_write(func, name, dtypes[0])
    taken = graph.taken(name, dtypes[0])
    if graph.is_single(name):
        return _wrap(out, results[0]) if taken is None else _copy(out, results[0], taken)
    wrapped = [_wrap(x, spec) if taken is None else _copy(x, spec, taken) for x, spec in zip(out, results, strict=True)]
    return type(out)(wrapped)


def _copy(local: Any, spec: Any, taken: Any) -> Any:
    copy = local.as_subclass(CopiedView)
    copy._spec = spec
    copy._taken = taken
    return copy


@traces_as(graph._torch_function_of_copies)
def _torch_function_of_copy(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    func = func.name if isinstance(func, Override) else func
    operands: list[Any] = []
    for value in (*args, *(kwargs or {}).values()):
        _hollow(value, operands)
    taken = None
    for index, x in enumerate(operands):
        if isinstance(x, CopiedView) and graph.check_copy(func, index == 0, x._taken):
            taken = x._taken
    out = _torch_function(cls, func, types, args, kwargs)
    if taken is None:
        return out
    if isinstance(out, (list, tuple)):
        return type(out)([_copy(_local(x), x._spec, taken) for x in out])
    return _copy(_local(out), out._spec, taken)


@traces_as(MovedView.__torch_function__.__func__)
def _torch_function_of_moved(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    graph.refuse_moved(func.name if isinstance(func, Override) else func)


def _hollow(value: Any, operands: list[Any]) -> Any:
    if isinstance(value, T):
        operands.append(value)
        return graph.HOLE
    if isinstance(value, (list, tuple)):
        return tuple([_hollow(item, operands) for item in value])
    return value


def _answer(kind: str, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    shape = graph.shape_of(x._spec.name)
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
            "torch.compile: dropout of a DTensor is not traced; call it on the local tensor (to_local), or outside of"
            " the compiled region"
        )
    with without_torch_function():
        out = func(*args, **kwargs)
    return _wrap(out, x._spec) if kind == "same" else out


@traces_as(eager.wrap)
def _wrap(local: Any, spec: Any) -> Any:
    dtensor = local.as_subclass(DTensor)
    dtensor._spec = spec
    return dtensor


@traces_as(eager.local_of)
def _local(x: Any) -> Any:
    graph.enter()
    return graph.local(x)


@traces_as(eager.redistribute)
def _redistribute(x: Any, spec: Any) -> Any:
    graph.enter()
    return _wrap(graph.move("alone", x._spec.name, spec.name, _local(x)), spec)


@traces_as(eager.redistribute_shared)
def _redistribute_shared(x: Any, spec: Any, src: Any = None) -> Any:
    graph.enter()
    if isinstance(x, DTensor):
        src = x._spec
    return _wrap(graph.move("shared", spec.name if src is None else src.name, spec.name, x), spec)


def encode_placements(placements: Any) -> Any:
    """Encode placements as constants, each as its kind and arguments; traced."""
    return tuple([_encode(placement) for placement in placements])


def _encode(placement: Any) -> Any:
    if isinstance(placement, Replicate):
        return "Replicate", ()
    if isinstance(placement, Partial):
        return "Partial", (placement.op,)
    if isinstance(placement, StridedShard):
        return "StridedShard", (placement.dim, placement.split_factor)
    if isinstance(placement, RaggedShard):
        return "RaggedShard", (placement.dims, placement.units, placement.owners)
    if isinstance(placement, Shard):
        return "Shard", (placement.dim,)
    raise TypeError("torch.compile: not a placement")


@traces_as(DTensor.redistribute)
def _redistribute_method(
    self: Any,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    async_op: bool = False,
    forward_dtype: Any = None,
    backward_dtype: Any = None,
) -> Any:
    if forward_dtype is not None or backward_dtype is not None:
        raise NotImplementedError(
            "torch.compile: redistribute with forward_dtype or backward_dtype is not traced; cast with to(dtype) first,"
            " or redistribute outside of the compiled region"
        )
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise NotImplementedError("torch.compile: redistribute to a Layout is not traced; pass its placements")
    if device_mesh is not None and device_mesh._key != self._spec.mesh._key:
        raise NotImplementedError(
            "torch.compile: redistribution to another mesh is not traced; call it outside of the compiled region"
        )
    if placements is None:
        raise NotImplementedError("torch.compile: redistribute: pass the target, placements=; [Replicate()] gathers")
    return _redistribute(self, graph.placed(self._spec.name, encode_placements(placements)))


@traces_as(DTensor.full_tensor)
def _full_tensor(self: Any, *, grad_placements: Any = None) -> Any:
    return _to_local(_redistribute(self, graph.replicated(self._spec.name)), grad_placements=grad_placements)


@traces_as(DTensor.to_local)
def _to_local(self: Any, *, grad_placements: Any = None) -> Any:
    if grad_placements is None:
        return _local(self)
    graph.enter()
    vary = graph.shows_varying(self._spec.name, encode_placements(grad_placements))
    return _local(self) if vary is None else graph.vary(self._spec.name, vary, _local(self))


@traces_as(DTensor.from_local)
def _from_local(
    local_tensor: Any,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    run_check: bool = False,
    shape: Any = None,
    stride: Any = None,
    grad_placements: Any = None,
) -> Any:
    if run_check or device_mesh is None or placements is None or grad_placements is not None:
        raise NotImplementedError(
            "torch.compile: from_local is traced with a mesh and placements, without run_check and grad_placements;"
            " pass the first two, and call it with the others outside of the compiled region"
        )
    local = tuple([operator.index(size) for size in local_tensor.shape])  # int() leaves a symbol
    global_shape = None if shape is None else tuple(shape)
    spec = graph.laid_out(
        device_mesh._key, encode_placements(placements), local, global_shape, local_tensor.requires_grad
    )
    return _wrap(local_tensor.view_as(local_tensor), spec)


def _shape(self: Any) -> Any:
    return torch.Size(graph.shape_of(self._spec.name))


def _ndim(self: Any) -> Any:
    return len(graph.shape_of(self._spec.name))


def _dtype(self: Any) -> Any:
    return _local(self).dtype


def _device(self: Any) -> Any:
    return _local(self).device


def _requires_grad(self: Any) -> Any:
    return _local(self).requires_grad


def install() -> None:
    """Make Dynamo trace the getters of this module; called once, when hp_dtensor's torch side is imported."""
    getters = {"shape": _shape, "ndim": _ndim, "dtype": _dtype, "device": _device, "requires_grad": _requires_grad}
    for name, stand_in in getters.items():
        traces_as(getattr(DTensor, name).fget)(stand_in)
