"""Layouts of the test model on ranks, and gradients that are the same in each."""

from __future__ import annotations

from typing import Any

import torch
from optim_models import Net, whole_gradients
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_fsdp import fully_shard
from hp_testing import device_type

R = Replicate()


def mesh_of(*shape: int) -> Any:
    return init_device_mesh(device_type(), shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def lay_out(model: nn.Module, placements: dict[str, Any], mesh: Any) -> None:
    """Make parameters DTensors; those that are not named are replicated."""
    for name, parameter in list(model.named_parameters()):
        module, _, key = name.rpartition(".")
        made = distribute_tensor(parameter.detach(), mesh, placements.get(name, [R] * mesh.ndim))
        made = nn.Parameter(made, requires_grad=parameter.requires_grad)
        setattr(model.get_submodule(module), key, made)


def lay_plain(model: Net) -> None:
    """One process."""


def ragged(model: Net) -> None:
    fully_shard(model, mesh_of(torch.distributed.get_world_size()))


def ragged_groups(model: Net) -> None:
    mesh = mesh_of(torch.distributed.get_world_size())
    for module in (model.experts, model.qkv):
        fully_shard(module, mesh)
    fully_shard(model, mesh)


def hsdp(model: Net) -> None:
    fully_shard(model, mesh_of(2, 2))


def slices(model: Net) -> None:
    """Of a dim other than the first."""
    fully_shard(model, mesh_of(torch.distributed.get_world_size()), shard_placement_fn=lambda p: Shard(p.ndim - 1))


TENSOR_PARALLEL = {
    "first.weight": [Shard(0)],
    "qkv.weight": [Shard(0)],
    "out.weight": [Shard(1)],
    "last.weight": [Shard(1)],
    "experts.up": [Shard(2)],
    "experts.down": [Shard(1)],
}


def tensor_parallel(model: Net) -> None:
    lay_out(model, TENSOR_PARALLEL, mesh_of(torch.distributed.get_world_size()))


def expert_parallel(model: Net) -> None:
    lay_out(model, {"experts.up": [Shard(0)], "experts.down": [Shard(0)]}, mesh_of(torch.distributed.get_world_size()))


def both(model: Net) -> None:
    """Tensor parallel inside fully_shard."""
    mesh = mesh_of(2, 2)
    lay_out(model, TENSOR_PARALLEL, mesh["tp"])
    fully_shard(model, mesh["dp"])


def only_some(model: Net) -> None:
    """Some parameters on a slice of the mesh, the rest on the whole mesh."""
    mesh = mesh_of(2, 2)
    for name, parameter in list(model.named_parameters()):
        module, _, key = name.rpartition(".")
        where, how = (mesh, [Shard(0), R]) if "out" in name else (mesh["tp"], [Shard(0)])
        made = nn.Parameter(distribute_tensor(parameter.detach(), where, how), requires_grad=parameter.requires_grad)
        setattr(model.get_submodule(module), key, made)


def give(model: nn.Module, step: int, dtype: torch.dtype, without: tuple[str, ...] = ()) -> None:
    """Whole gradients, of which each rank takes its part."""
    for name, gradient in whole_gradients(step, model).items():
        parameter: Any = model.get_parameter(name)
        if not parameter.requires_grad or name in without:
            parameter.grad = None
        elif isinstance(parameter, DTensor):
            spec: Any = parameter._spec
            whole = distribute_tensor(gradient.to(device_type(), dtype), spec.mesh, [R] * spec.mesh.ndim)
            parameter.grad = whole.redistribute(spec.mesh, spec.placements)
        else:
            parameter.grad = gradient.to(parameter.device, dtype)


def crossed(model: Net) -> None:
    """Parameters on one axis of a mesh, others on the other one: no mesh has all ranks."""
    mesh = mesh_of(2, 2)
    for name, parameter in list(model.named_parameters()):
        module, _, key = name.rpartition(".")
        made = distribute_tensor(parameter.detach(), mesh["tp" if "out" in name else "dp"], [Shard(0)])
        setattr(model.get_submodule(module), key, nn.Parameter(made, requires_grad=parameter.requires_grad))
