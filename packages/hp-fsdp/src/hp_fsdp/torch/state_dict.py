"""The tensors of a module: gathered full, exported by part, and filled, one at a time to bound memory.

Note [One tensor at a time]
    With a `RaggedShard` one rank may have a full parameter and the others none of it. So the owners broadcast their
    shards straight into the full tensor: nothing else is sent, and no memory is taken beside the result. A gather of
    equal shards would take as many times the longest one as there are ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from hp_dtensor import Replicate
from hp_dtensor.extend import TensorSpec
from hp_dtensor.torch.extend import DTensor, execute, local_view, wrap
from hp_fsdp.groups.managed_params import groups_in, spec_of
from hp_fsdp.port import Broadcaster
from hp_fsdp.state_dict.model import pieces_along, ragged_axis
from hp_fsdp.torch.groups.communication import transport
from hp_platform import collectives

incompatible_keys = _IncompatibleKeys


def entries(model: nn.Module) -> dict[str, Any]:
    for module in model.modules():
        if hasattr(module, "_fqn_modifiers"):
            raise NotImplementedError(
                f"{type(module).__name__} renames its keys by a method _fqn_modifiers, which is not supported here;"
                " remove the method and rename the state's keys yourself"
            )
    _settle(model)
    return {unwrapped(name): value for name, value in model.state_dict(keep_vars=True).items()}


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    _settle(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield unwrapped(name), parameter


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@torch.no_grad()
def full(tensor: torch.Tensor, *, on_host: bool) -> torch.Tensor:
    gathered = gather_full(tensor)
    return gathered.cpu() if on_host else gathered


@torch.no_grad()
def part(tensor: torch.Tensor, *, on_host: bool) -> torch.Tensor:
    spec, local = spec_of(tensor), local_view(tensor)
    if on_host:
        local = local.to("cpu", copy=True)
    return local if spec is None else wrap(local, spec)


def load_extra(model: nn.Module, extra: dict[str, Any]) -> None:
    wrapped = {unwrapped(name): name for name in model.state_dict(keep_vars=True)}
    model.load_state_dict({wrapped[name]: value for name, value in extra.items()}, strict=False)


def _settle(model: nn.Module) -> None:
    """Register the sharded parameters under ``model``, in their flat shards."""
    for group in groups_in(model.modules()):
        group.reshard()
        group.check()


def sharded_axis(spec: TensorSpec | None) -> int | None:
    """Return the mesh axis over which a parameter is sharded raggedly, or else the first that shards it, or None."""
    axis = ragged_axis(spec)
    if axis is None and spec is not None:
        return next((axis for axis, placement in enumerate(spec.placements) if not placement.is_replicate()), None)
    return axis


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full value, plain, in memory of its own; every rank of the tensor's mesh has to call it.

    Args:
        tensor: a DTensor, or a plain tensor, which is copied.
    """
    spec = spec_of(tensor)
    local = local_view(tensor)
    if spec is None:
        return local.clone()
    sent = local.to(transport(spec.mesh))
    axis = ragged_axis(spec)
    if axis is not None and spec.mesh.size(axis) > 1 and spec.mesh.group_order(axis) is None:
        spec, sent = _gathered_along(spec, sent, axis)
    full = execute(sent, spec, spec.with_placements([Replicate()] * spec.mesh.ndim))
    return full.clone() if full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() else full


def _gathered_along(spec: TensorSpec, local: torch.Tensor, axis: int) -> tuple[TensorSpec, torch.Tensor]:
    """Replicate over the ragged axis: Note [One tensor at a time]."""
    inner, sizes = pieces_along(spec, axis)
    gathered = local.new_empty(inner.local_shape)
    me = spec.mesh.get_local_rank(axis)
    group = spec.mesh.get_group(axis)
    handles = []
    for rank, piece in enumerate(gathered.view(-1).split(sizes)):
        if sizes[rank]:
            if rank == me:
                piece.copy_(local)
            handles.append(collectives.broadcast(piece, rank, group=group, async_op=True))
    for handle in handles:
        if handle is not None:
            handle.wait()
    return inner, gathered


def fill(name: str, target: torch.Tensor, source: Any) -> None:
    """Write a value into a tensor in place, each rank its part.

    Args:
        name: for errors.
        target: a DTensor or a plain tensor, with memory.
        source: a full plain tensor, the same on every rank, or a DTensor in any layout.

    Raises:
        TypeError: ``source`` is not a tensor.
        ValueError: it has another shape.
        RuntimeError: ``target`` is on the meta device.
    """
    if not isinstance(source, torch.Tensor):
        raise TypeError(f"load: {name!r} must be a tensor, got {type(source).__name__}")
    if tuple(source.shape) != tuple(target.shape):
        raise ValueError(
            f"load: {name!r} has shape {tuple(source.shape)}, the model's is {tuple(target.shape)}. A shard of another"
            " number of ranks is loaded by torch.distributed.checkpoint.load"
        )
    if target.device.type == "meta":
        raise RuntimeError(
            f"load: {name!r} is still on the meta device. Give it memory first: model.to_empty(device=...), or"
            " hp_dtensor.init_parameters(model)"
        )
    spec = spec_of(target)
    with torch.no_grad():
        if isinstance(source, DTensor):
            if spec is None:
                local = source.full_tensor()
            else:
                moved = source if source._spec is spec else source.redistribute(spec.mesh, spec.placements)
                local = local_view(moved)
        else:
            gather: Any = getattr(source, "full_tensor", source.detach)  # a DTensor of another library has it as well
            local = gather()
            if spec is not None:
                local = execute(local, spec.with_placements([Replicate()] * spec.mesh.ndim), spec)
        local_view(target).copy_(local)


def broadcaster(model: nn.Module) -> Broadcaster:
    """Return the way from rank 0, over the device on which the ranks that share the model communicate."""
    own = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    spec = next((spec for parameter in model.parameters() if (spec := spec_of(parameter)) is not None), None)
    device = own if spec is None else transport(spec.mesh)

    def broadcast_object(value: Any) -> Any:
        objects = [value]
        dist.broadcast_object_list(objects, src=0)
        return objects[0]

    def broadcast_tensor(tensor: Any, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        if tensor is not None:
            sent = tensor.detach().to(device).contiguous()
        else:
            sent = torch.empty(shape, dtype=dtype, device=device)
        if sent.numel():
            world: Any = dist.group.WORLD
            collectives.broadcast(sent, 0, group=world)
        return sent

    return Broadcaster(is_tensor, broadcast_object, broadcast_tensor)


_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that torch's wrappers of a module add to the names inside it."""


def unwrapped(name: str) -> str:
    """Strip the prefixes of wrappers from a name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def takes_own_shape_only(target: torch.Tensor) -> bool:
    """Tell a parameter from buffers, some of which take other shapes, and from lazy parameters."""
    return isinstance(target, torch.nn.Parameter) and not is_lazy(target)


def has_memory(target: torch.Tensor) -> bool:
    return target.device.type != "meta"


@torch.no_grad()
def laid_out_like(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    spec = spec_of(target)
    if isinstance(value, DTensor):
        if spec is None:
            return value.full_tensor()
        return value if value._spec is spec else value.redistribute(spec.mesh, spec.placements)
    if spec is None:
        return value
    value = value.reshape(spec.shape) if not spec.shape else value
    if tuple(value.shape) != tuple(spec.shape):
        return wrap(local_view(value), spec)
    part = execute(value.detach(), spec.with_placements([Replicate()] * spec.mesh.ndim), spec)
    return wrap(local_view(part), spec)
