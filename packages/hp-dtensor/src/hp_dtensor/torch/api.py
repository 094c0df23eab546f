"""DTensors from local parts and whole tensors, and modules of them, on PyTorch; torch's own DTensors are refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hp_dtensor.creation.creation import (
    broadcast,
    check_local,
    check_part,
    distribute_tensor,
    dtensor_of,
)
from hp_dtensor.layout.placements import Placement, Replicate
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.torch.backward.engine import on_local_gradient
from hp_dtensor.torch.dtensor import _OWN as OWN
from hp_dtensor.torch.dtensor import DTensor, local_view, wrap
from hp_dtensor.torch.moves.redistribute import execute
from hp_dtensor.torch.moves.transfer import gradient_as
from hp_dtensor.torch.ops import random
from hp_dtensor.torch.views.moved_view import shares, whole_of
from hp_platform.torch.internals import without_torch_function

_plain = (torch.Tensor, torch.nn.Parameter)


def refuse_foreign(x: Any, what: str) -> None:
    """Refuse a DTensor of torch itself, whose mesh and placements are of other types.

    Args:
        x: a value.
        what: the function to which it is passed, for the error.

    Raises:
        TypeError: ``x`` is a DTensor of torch itself.
    """
    kind = type(x)
    if kind not in _plain and kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed."):
        raise TypeError(
            f"{what}: got torch's own DTensor ({kind.__module__}) of shape {tuple(x.shape)}, placed {x.placements};"
            " expected a plain tensor or a DTensor of hp_dtensor. Apply one library to a model. x.full_tensor() returns"
            " the global tensor; DTensor.from_local(x.to_local(), mesh, placements) of hp_dtensor adopts the local one"
        )


def from_local(local: torch.Tensor, *layout: Any, **options: Any) -> DTensor:
    """See ``DTensor.from_local``."""
    refuse_foreign(local, "from_local")
    check_local(local, DTensor, torch.Tensor)
    view, local = whole_of(local)
    result = dtensor_of(local, local.device.type, *layout, **options)
    return result if view is None else shares(result, view)


def records(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


def part_of(local: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """See ``Creation``; moved to the mesh's kind of device, except from meta."""
    mesh = spec.mesh
    if local.device.type != mesh.device_type and not local.is_meta:
        local = local.to(mesh.device_type)
    if mesh.get_coordinate() is None:
        return _nothing_of(local, spec)
    check_part(tuple(local.shape), spec)
    return local


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def attached(local: torch.Tensor, spec: TensorSpec, gradient: TensorSpec | None) -> torch.Tensor:
    return local.view_as(local) if gradient is None else gradient_as(local, spec, gradient)


def _nothing_of(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the local tensor of a rank outside the mesh: empty (zero for a scalar), in the tensor's graph."""
    if not spec.shape:
        return tensor.reshape(()).clone().zero_()
    return tensor.reshape(-1)[:0].reshape(spec.local_shape)


def check_whole(tensor: torch.Tensor) -> str:
    refuse_foreign(tensor, "distribute_tensor")
    return tensor.device.type


def check_mesh(mesh: DeviceMesh, what: str) -> None:
    del mesh, what  # a rank outside gets an empty part


def detaches(tensor: torch.Tensor) -> str | None:
    return "detach()" if not tensor.is_leaf and torch.is_grad_enabled() else None


def shard(tensor: torch.Tensor, spec: TensorSpec, src_data_rank: int | None) -> DTensor:
    """See ``Creation``; moved to the mesh's kind of device, except from meta."""
    if tensor.is_meta:
        local = torch.empty(spec.local_shape, dtype=tensor.dtype, device="meta")
        return wrap(local, spec).requires_grad_(tensor.requires_grad)  # type: ignore[return-value]
    mesh = spec.mesh
    whole = tensor.detach().to(mesh.device_type)
    if mesh.get_coordinate() is None:
        whole = _nothing_of(whole, spec)
    elif src_data_rank is not None:
        whole = whole.clone(memory_format=torch.contiguous_format)
        broadcast(whole, mesh, src_data_rank)
    local = execute(whole, spec.with_placements([Replicate()] * mesh.ndim), spec)
    if local.untyped_storage().data_ptr() == tensor.detach().untyped_storage().data_ptr() or local._base is not None:
        local = local.clone(memory_format=torch.contiguous_format)
    return wrap(local.detach(), spec).requires_grad_(tensor.requires_grad)  # type: ignore[return-value]


def submodules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    return module.named_modules()


def partition(
    partition_fn: Callable[[str, torch.nn.Module, DeviceMesh], None],
    name: str,
    module: torch.nn.Module,
    mesh: DeviceMesh,
) -> None:
    before = dict(module._parameters)
    partition_fn(name, module, mesh)
    _keep_identity(module, before)


def _keep_identity(module: torch.nn.Module, before: Mapping[str, torch.nn.Parameter | None]) -> None:
    """Restore parameters that a ``partition_fn`` replaced by DTensors, as those DTensors, for optimizers and ties.

    One that somebody else holds stays: they made it to be the module's. So does one made for a meta parameter.
    """
    for name, old in before.items():
        new = module._parameters.get(name)
        if new is old or old is None or not isinstance(new, DTensor):
            continue
        if tuple(new.shape) != tuple(old.shape) or new.dtype is not old.dtype:
            continue
        if isinstance(old, DTensor) and old._spec is not new._spec:
            continue
        if old.is_meta is not new.is_meta:  # torch gives a meta parameter no other memory
            continue
        sharded, trains, reference = wrap(local_view(new), new._spec), new.requires_grad, weakref.ref(new)
        module._parameters[name] = old
        del new
        if (holder := reference()) is not None:
            module._parameters[name] = holder
            continue
        gradient, old.grad = old.grad, None
        become(old, sharded)
        old.requires_grad_(trains)
        if gradient is not None:
            old.grad = distribute_tensor(gradient.detach(), sharded.device_mesh, sharded.placements)


def become(parameter: torch.nn.Parameter, sharded: DTensor) -> None:
    """Turn a parameter, which stays the same object for optimizers and lists, into the DTensor ``sharded``.

    Args:
        parameter: a leaf, plain or a DTensor of another layout.
        sharded: of the same dtype; its memory is the parameter's afterwards.
    """
    hooks = None if isinstance(parameter, DTensor) else parameter._backward_hooks
    with without_torch_function():
        parameter.data = local_view(sharded)
    for name in OWN:  # what belongs to the memory that it had
        vars(parameter).pop(name, None)
    leaf = wrap(parameter, sharded._spec)
    leaf._is_param = True
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
    sharded, gradient = distribute_tensor(parameter.data, mesh, placements, src_data_rank=src_data_rank), parameter.grad
    if gradient is not None:
        gradient = distribute_tensor(gradient.detach(), mesh, placements, src_data_rank=src_data_rank)
    parameter.grad = None
    become(parameter, sharded)
    parameter.grad = gradient


def replicate_parameters(
    module: torch.nn.Module, mesh: DeviceMesh, *, buffers: bool = True, src_data_rank: int | None = 0
) -> None:
    replicated = [Replicate()] * mesh.ndim
    for parameter in module._parameters.values():
        if parameter is not None and not isinstance(parameter, DTensor):
            distribute_parameter(parameter, mesh, replicated, src_data_rank=src_data_rank)
    if buffers:
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and not isinstance(buffer, DTensor):
                module._buffers[name] = distribute_tensor(buffer, mesh, replicated, src_data_rank=src_data_rank)


def make(what: str, spec: TensorSpec, dtype: torch.dtype | None, requires_grad: bool, value: Any) -> DTensor:
    """See ``Creation``; what is drawn is the part of what a single device draws."""
    options = {"dtype": dtype or torch.get_default_dtype(), "device": spec.mesh.device_type}
    if what in _DRAWS:
        local = random.draw(spec, torch.empty(0, **options), _DRAWS[what])
    else:
        local = getattr(torch, what)(spec.local_shape, *(() if value is None else (value,)), **options)
    return wrap(local, spec).requires_grad_(requires_grad)  # type: ignore[return-value]


_DRAWS: dict[str, Any] = {"rand": torch.Tensor.uniform_, "randn": torch.Tensor.normal_}

Tensor = torch.Tensor


def named_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return dict(module.named_modules(remove_duplicate=False))


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def distribute(
    module: torch.nn.Module, placed: Mapping[str, tuple[DeviceMesh, tuple[Placement, ...]]], rest: DeviceMesh
) -> None:
    """See ``Modules``; buffers are replicated as well, and modules that share a parameter share it afterwards."""
    parameters = named_parameters(module)
    by_id: dict[int, Any] = {id(parameters[name]): where for name, where in placed.items()}
    for parameter in module.parameters():
        mesh, placements = by_id.get(id(parameter), (rest, (Replicate(),) * rest.ndim))
        distribute_parameter(parameter, mesh, placements)
    for child in module.modules():
        replicate_parameters(child, rest)  # only buffers are still plain


def rank_tensor(ranks: np.ndarray) -> torch.Tensor:
    """Create a tensor of ranks on the host, as torch's DeviceMesh has it."""
    return torch.tensor(ranks.tolist(), dtype=torch.int, device="cpu")
