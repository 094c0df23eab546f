"""Whole tensors of a sharded model: out of it and into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hp_dtensor.placements import Replicate
from hp_dtensor.torch.dtensor import DTensor, local_view, wrap
from hp_dtensor.torch.redistribute import execute
from hp_fsdp.torch.bucket import Bucket
from hp_fsdp.torch.module import group_of
from hp_platform import get_platform
from hp_platform.torch import collectives

__all__ = ["full_state_dict", "load_full_state_dict"]


def full_state_dict(model: nn.Module, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, torch.Tensor]:
    """The model's state as whole plain tensors: names, order and values of an unsharded model's ``state_dict()``.

    One all-gather for each bucket of parameters; every rank has to call it. Tied parameters appear under each name, as
    one tensor.

    Args:
        model: holds sharded modules, or is one.
        rank0_only: other ranks than the first take part and get an empty dictionary. Default False: all get the same.
        cpu: put the tensors on the host.
    """
    keep = not rank0_only or get_platform().groups.rank() == 0
    buckets = _buckets(model)
    own = model.state_dict(keep_vars=True)
    whole: dict[int, Any] = {}
    for bucket in buckets:
        for sharded, tensor in _gathered(bucket):
            whole[id(sharded)] = _own(tensor, cpu) if keep else None
    with torch.no_grad():
        for value in own.values():
            if isinstance(value, torch.Tensor) and id(value) not in whole:
                tensor = value.full_tensor() if isinstance(value, DTensor) else value
                whole[id(value)] = _own(tensor.detach(), cpu) if keep else None
    # What is no tensor (a module's extra state) is kept as it is.
    return {name: whole.get(id(value), value) for name, value in own.items()} if keep else {}


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Loads whole tensors into a sharded model: each rank takes its part, in place. Nothing is communicated.

    Args:
        model: holds sharded modules, or is one.
        state: what ``full_state_dict`` gave, or an unsharded model's ``state_dict()``; the same on every rank.
        strict: every name must be in both. Default True.

    Raises:
        ValueError: with ``strict``, names that are missing or not known; a tensor of another shape.
    """
    owners = {id(p.sharded): (bucket, index) for bucket in _buckets(model) for index, p in enumerate(bucket.parameters)}
    own = model.state_dict(keep_vars=True)
    missing, unknown = [name for name in own if name not in state], [name for name in state if name not in own]
    if strict and (missing or unknown):
        raise ValueError(
            f"load_full_state_dict: {len(missing)} names are missing ({', '.join(missing[:5])}), {len(unknown)} are not"
            f" known ({', '.join(unknown[:5])}). Use strict=False to load the rest"
        )
    with torch.no_grad():
        for name, target in own.items():
            source = state.get(name)
            if not isinstance(target, torch.Tensor) or source is None:
                continue
            if tuple(source.shape) != tuple(target.shape):
                raise ValueError(
                    f"load_full_state_dict: {name!r} has shape {tuple(source.shape)}, the model's is"
                    f" {tuple(target.shape)}"
                )
            bucket, index = owners.get(id(target), (None, 0))
            if bucket is not None:
                parameter = bucket.parameters[index]
                start, stop = bucket.layout.part(index, bucket.axes.shard_rank)
                local_view(target).copy_(_part(source, parameter.inner).reshape(-1)[start:stop])
            else:
                local_view(target).copy_(_part(source, target._spec if isinstance(target, DTensor) else None))


def _buckets(model: nn.Module) -> list[Bucket]:
    """The buckets under ``model``, with the sharded parameters registered."""
    found = []
    for module in model.modules():
        group = group_of(module)
        if group is not None:
            group.reshard()
            group.check()
            found += group.buckets
    return found


def _gathered(bucket: Bucket) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each sharded parameter with its whole value, of which it does not own the memory."""
    full = bucket.shard
    if bucket.axes.shard_size > 1:
        full = torch.empty(bucket.layout.total, dtype=bucket.dtype, device=bucket.shard.device)
        collectives.all_gather(full, bucket.shard, group=bucket.axes.shard_group)
    for parameter, offset in zip(bucket.parameters, bucket.layout.offsets):
        tensor = full[offset : offset + parameter.numel].view(parameter.shape)
        if parameter.inner is not None:
            tensor = wrap(tensor, parameter.inner).full_tensor()
        yield parameter.sharded, tensor


def _own(tensor: torch.Tensor, cpu: bool) -> torch.Tensor:
    return tensor.to("cpu", copy=True) if cpu else tensor.clone()


def _part(whole: torch.Tensor, spec: Any) -> torch.Tensor:
    if spec is None:
        return whole
    return execute(whole, spec.with_placements([Replicate()] * spec.mesh.ndim), spec)
