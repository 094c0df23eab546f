"""Gradients that are infinite or not a number, on any rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_dtensor.torch.extend import DTensor
from hp_optim.torch.layouts import local_device
from hp_optim.world import world_of
from hp_platform import collectives, get_platform

__all__ = ["broken_gradients"]

_get_grad = torch.Tensor.grad.__get__  # type: ignore[attr-defined]


def broken_gradients(names: Sequence[str], parameters: Sequence[torch.Tensor]) -> list[str]:
    """List the parameters whose gradients are not finite on some rank; a collective, if there are other ranks.

    Args:
        names: of the parameters.
        parameters: plain or DTensors, which count as their local tensors here; the same on all ranks.
    """
    numbers, gradients = [], []
    for number, gradient in enumerate(map(_get_grad, parameters)):
        if gradient is not None and not gradient.is_sparse and gradient.numel():
            numbers.append(number)
            gradients.append(gradient)
    meshes = {parameter._spec.mesh for parameter in parameters if isinstance(parameter, DTensor)}
    world = world_of(meshes)
    flags = torch.zeros(len(parameters))
    if gradients and not _all_finite(gradients):
        largest = [norm.cpu() for norm in torch._foreach_norm(gradients, float("inf"))]
        flags[numbers] = (~torch.isfinite(torch.stack(largest))).float()
    if len(world) > 1:
        device = local_device(parameters[0])
        if device.type == "cpu" and any(mesh.device_type != "cpu" for mesh in meshes):
            device = torch.device(get_platform().devices.current_device())
        flags = flags.to(device)
        collectives.all_reduce(flags, "max", group=get_platform().groups.new_group(world))
    return [name for name, flag in zip(names, flags.tolist()) if flag]


def _all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Tell whether all are surely finite: of one storage all is looked at as one tensor, what is between them too."""
    spans: dict[tuple[int, torch.dtype], list[Any]] = {}
    single = []
    for gradient in gradients:
        if not gradient.is_contiguous():
            single.append(gradient)
            continue
        start, stop = gradient.storage_offset(), gradient.storage_offset() + gradient.numel()
        span = spans.setdefault((gradient.untyped_storage().data_ptr(), gradient.dtype), [start, stop, gradient])
        span[:2] = min(span[0], start), max(span[1], stop)
    flat = [torch.as_strided(each, (stop - start,), (1,), start) for start, stop, each in spans.values()]
    return all(torch.isfinite(norm).item() for norm in torch._foreach_norm([*flat, *single]))
