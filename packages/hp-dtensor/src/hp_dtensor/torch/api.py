"""Making DTensors: from local parts, from whole tensors, from nothing; and modules of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hp_dtensor.from_local import (
    check_local,
    check_part,
    check_ranks,
    gradient_layout,
    layout_of,
    refuse_cut_graph,
    refuse_second_call,
)
from hp_dtensor.layout.layout import Layout, as_placements
from hp_dtensor.layout.placements import Placement, Replicate
from hp_dtensor.layout.spec import TensorSpec, normalize
from hp_dtensor.mesh.device_mesh import DeviceMesh, get_current_mesh
from hp_dtensor.torch import random
from hp_dtensor.torch.backward.engine import on_local_gradient
from hp_dtensor.torch.dtensor import _OWN as OWN
from hp_dtensor.torch.dtensor import DTensor, local_view, wrap
from hp_dtensor.torch.foreign import refuse_foreign
from hp_dtensor.torch.moves.borders import gradient_as
from hp_dtensor.torch.moves.redistribute import execute
from hp_dtensor.torch.views.moved_view import shares
from hp_dtensor.torch.views.part_of_view import whole_of
from hp_platform import get_platform

__all__ = ["distribute_module", "distribute_tensor", "empty", "from_local", "full", "ones", "rand", "randn", "zeros"]

_impl: Any = torch._C._disabled_torch_function_impl


def from_local(
    local: torch.Tensor,
    device_mesh: DeviceMesh | Layout | None,
    placements: Sequence[Placement] | None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
) -> DTensor:
    """See ``DTensor.from_local``."""
    refuse_foreign(local, "from_local")
    check_local(local, DTensor, torch.Tensor)
    view, local = whole_of(local)
    mesh, wanted = as_placements(
        device_mesh,
        placements,
        None if device_mesh is not None else get_current_mesh(),
        "from_local",
        local.device.type,
    )
    spec = layout_of(tuple(local.shape), mesh, wanted, shape, local.requires_grad)
    if local.device.type != mesh.device_type and not local.is_meta:
        local = local.to(mesh.device_type)
    if mesh.get_coordinate() is None:
        local = _nothing_of(local, spec)
    else:
        check_part(tuple(local.shape), spec)
    if run_check:
        _check(local, spec)
    gradient = gradient_layout(spec, grad_placements)
    made = wrap(local.view_as(local) if gradient is None else gradient_as(local, spec, gradient), spec)
    return made if view is None else shares(made, view)


def _nothing_of(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the local tensor of a rank outside the mesh: empty (zero for a scalar), in the tensor's graph."""
    if not spec.shape:
        return tensor.reshape(()).clone().zero_()
    return tensor.reshape(-1)[:0].reshape(spec.local_shape)


def _check(local: torch.Tensor, spec: TensorSpec) -> None:
    """Compare shapes and dtypes over all ranks, and replicated values over the axis; communicates."""
    collectives = get_platform().collectives

    def agree(numbers: Sequence[int] | None, group: Any) -> bool:
        value = local.detach() if numbers is None else torch.tensor(numbers, dtype=torch.int64, device=local.device)
        low, high = value.contiguous().clone(), value.contiguous().clone()
        collectives.all_reduce(low, "min", group=group)
        collectives.all_reduce(high, "max", group=group)
        return torch.equal(low, high)

    check_ranks(spec, local.dtype, local.requires_grad, agree)


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | Layout | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a global tensor over a mesh.

    Args:
        tensor: the whole tensor, of the same shape on every rank; it is not changed, and the result shares no memory
            with it. It is moved to the mesh's kind of device, except from meta, where the DTensor is as well. The
            result is a leaf, with the tensor's ``requires_grad``.
        device_mesh: the mesh, or a Layout; default the mesh of ``with mesh:``.
        placements: one an axis; default replicated.
        src_data_rank: the index along each axis of the rank whose values count; they are broadcast. None: every rank's
            own values are taken, nothing is communicated (they must agree).

    Raises:
        ValueError: placements that do not fit, or a tensor in a graph, whose gradients would be lost.
    """
    refuse_foreign(tensor, "distribute_tensor")
    mesh, wanted = as_placements(
        device_mesh,
        placements,
        None if device_mesh is not None else get_current_mesh(),
        "distribute_tensor",
        tensor.device.type,
    )
    wanted = normalize(wanted, mesh, tensor.dim(), "distribute_tensor")
    if isinstance(tensor, DTensor):
        if tensor._spec.mesh != mesh:
            raise ValueError(f"distribute_tensor: the DTensor is on {tensor._spec.mesh}, not on {mesh}")
        return tensor.redistribute(mesh, wanted)
    if not tensor.is_leaf and torch.is_grad_enabled():
        refuse_cut_graph(tuple(tensor.shape), "detach()")
    spec = TensorSpec.of(mesh, wanted, tuple(tensor.shape))
    if tensor.is_meta:
        return wrap(torch.empty(spec.local_shape, dtype=tensor.dtype, device="meta"), spec).requires_grad_(
            tensor.requires_grad
        )  # type: ignore[return-value]
    whole = tensor.detach().to(mesh.device_type)
    if src_data_rank is not None and mesh.get_coordinate() is not None:
        whole = whole.clone(memory_format=torch.contiguous_format)
        for axis in range(mesh.ndim):
            if mesh.shape[axis] > 1:
                order = mesh.group_order(axis)
                source = src_data_rank if order is None else order.index(src_data_rank)
                get_platform().collectives.broadcast(whole, source, group=mesh.get_group(axis))
    if mesh.get_coordinate() is None:
        whole = _nothing_of(whole, spec)
    local = execute(whole, spec.with_placements([Replicate()] * mesh.ndim), spec)
    if local.untyped_storage().data_ptr() == tensor.detach().untyped_storage().data_ptr() or local._base is not None:
        local = local.clone(memory_format=torch.contiguous_format)
    return wrap(local.detach(), spec).requires_grad_(tensor.requires_grad)  # type: ignore[return-value]


def distribute_module(
    module: torch.nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, torch.nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[[torch.nn.Module, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[torch.nn.Module, Any, DeviceMesh], Any] | None = None,
) -> torch.nn.Module:
    """Turn a module's parameters and buffers into DTensors, in place.

    Args:
        module: the module; parameters that ``partition_fn`` leaves plain become replicated.
        device_mesh: the mesh; default that of ``with mesh:``.
        partition_fn: called as ``(name, submodule, mesh)`` for every submodule, to distribute its parameters.
        input_fn: called as ``(module, inputs, mesh)`` before forward; returns the inputs.
        output_fn: called as ``(module, outputs, mesh)`` after forward; returns the outputs.

    Raises:
        RuntimeError: it was called on this module before, whose inputs and outputs would be converted twice.
    """
    refuse_second_call(module)
    mesh = device_mesh if device_mesh is not None else get_current_mesh()
    for name, child in module.named_modules():
        if partition_fn is not None:
            before = dict(child._parameters)
            partition_fn(name, child, mesh)
            _keep_identity(child, before)
        replicate_parameters(child, mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: output_fn(mod, outputs, mesh))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _keep_identity(module: torch.nn.Module, before: Mapping[str, torch.nn.Parameter | None]) -> None:
    """Restore parameters that a ``partition_fn`` replaced by DTensors, as those DTensors, for optimizers and ties.

    One that somebody else holds stays: they made it to be the module's.
    """
    for name, old in before.items():
        new = module._parameters.get(name)
        if new is old or old is None or not isinstance(new, DTensor):
            continue
        if tuple(new.shape) != tuple(old.shape) or new.dtype is not old.dtype:
            continue
        if isinstance(old, DTensor) and old._spec is not new._spec:
            continue
        made, trains, gone = wrap(local_view(new), new._spec), new.requires_grad, weakref.ref(new)
        module._parameters[name] = old
        del new
        if (held := gone()) is not None:
            module._parameters[name] = held  # type: ignore[assignment]
            continue
        gradient, old.grad = old.grad, None
        become(old, made)
        old.requires_grad_(trains)
        if gradient is not None:
            old.grad = distribute_tensor(gradient.detach(), made.device_mesh, made.placements)


def become(parameter: torch.nn.Parameter, made: DTensor) -> None:
    """Turn a parameter, which stays the same object for optimizers and lists, into the DTensor ``made``.

    Args:
        parameter: a leaf, plain or a DTensor of another layout.
        made: of the same dtype; its memory is the parameter's afterwards.
    """
    hooks = None if isinstance(parameter, DTensor) else parameter._backward_hooks
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = local_view(made)
    for name in OWN:  # what belongs to the memory that it had
        vars(parameter).pop(name, None)
    leaf = wrap(parameter, made._spec)
    leaf._is_param = True  # type: ignore[attr-defined]
    for key in hooks or ():  # they are for gradients of this object, which are DTensors now
        hooks[key] = on_local_gradient(leaf, hooks[key])  # type: ignore[index]


def distribute_parameter(
    parameter: torch.nn.Parameter,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = 0,
) -> None:
    """Turn a parameter, which stays the same object, into a DTensor, and its gradient with it.

    Modules that share it go on sharing it, and an optimizer that has it goes on training it.

    Args:
        parameter: a leaf; a DTensor of the same mesh is redistributed.
        mesh: the mesh.
        placements: one an axis.
        src_data_rank: see ``distribute_tensor``.
    """
    made, gradient = distribute_tensor(parameter.data, mesh, placements, src_data_rank=src_data_rank), parameter.grad
    if gradient is not None:
        gradient = distribute_tensor(gradient.detach(), mesh, placements, src_data_rank=src_data_rank)
    parameter.grad = None
    become(parameter, made)
    parameter.grad = gradient


def replicate_parameters(
    module: torch.nn.Module, mesh: DeviceMesh, *, buffers: bool = True, src_data_rank: int | None = 0
) -> None:
    """Turn the plain parameters (and buffers) of ``module`` itself into replicated DTensors."""
    replicated = [Replicate()] * mesh.ndim
    for parameter in module._parameters.values():
        if parameter is not None and not isinstance(parameter, DTensor):
            distribute_parameter(parameter, mesh, replicated, src_data_rank=src_data_rank)
    if buffers:
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and not isinstance(buffer, DTensor):
                module._buffers[name] = distribute_tensor(buffer, mesh, replicated, src_data_rank=src_data_rank)


# ---- factories ----
def _make(
    what: str,
    size: Any,
    dtype: torch.dtype | None,
    device_mesh: Any,
    placements: Any,
    requires_grad: bool,
    make: Callable[..., torch.Tensor],
    drawn: bool = False,
) -> DTensor:
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(int(s) for s in size)
    mesh, wanted = as_placements(device_mesh, placements, None if device_mesh is not None else get_current_mesh(), what)
    wanted = normalize(wanted, mesh, len(shape), what)
    if any(placement.is_partial() for placement in wanted):
        raise ValueError(f"{what}: placements {wanted} hold a Partial; make the tensor replicated or sharded")
    spec = TensorSpec.of(mesh, wanted, shape)
    options = {"dtype": dtype or torch.get_default_dtype(), "device": mesh.device_type}
    local = random.draw(spec, torch.empty(0, **options), make) if drawn else make(spec.local_shape, **options)
    return wrap(local, spec).requires_grad_(requires_grad)  # type: ignore[return-value]


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """Return a DTensor of zeros; ``size`` is the global shape, ``placements`` default to replicated."""
    return _make("zeros", size, dtype, device_mesh, placements, requires_grad, torch.zeros)


def ones(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """Return a DTensor of ones."""
    return _make("ones", size, dtype, device_mesh, placements, requires_grad, torch.ones)


def empty(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """Return a DTensor of uninitialized memory."""
    return _make("empty", size, dtype, device_mesh, placements, requires_grad, torch.empty)


def full(
    size: Any,
    fill_value: float,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """Return a DTensor filled with ``fill_value``."""
    return _make(
        "full",
        (size,),
        dtype,
        device_mesh,
        placements,
        requires_grad,
        lambda shape, **o: torch.full(shape, fill_value, **o),
    )


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """Uniform on [0, 1): the part of what ``torch.rand`` draws on a single device."""
    return _make(
        "rand", size, dtype, device_mesh, placements, requires_grad, lambda whole: whole.uniform_(), drawn=True
    )


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """Return this rank's shard of what ``torch.randn`` draws on a single device."""
    return _make(
        "randn", size, dtype, device_mesh, placements, requires_grad, lambda whole: whole.normal_(), drawn=True
    )
