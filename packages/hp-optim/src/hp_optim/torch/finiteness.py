"""Gradients that are infinite or not a number on any rank, and hyperparameters as ranks compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hp_dtensor.torch.extend import DTensor
from hp_optim.muon.ownership import world_of
from hp_optim.options import agree_on, parameter_names
from hp_platform import get_platform
from hp_platform.extend import reduce_numbers
from hp_platform.torch.internals import get_grad

_TOLD = ("lr", "weight_decay", "momentum", "nesterov", "betas", "eps")


def told(number: int, group: Mapping[str, Any]) -> str:
    """Describe hyperparameters of a group that are no part of a plan, the same for the same numbers.

    Args:
        number: of the group.
        group: with its hyperparameters.
    """
    return f"group {number} with " + ", ".join(f"{key}={_shown(group[key])}" for key in _TOLD if key in group)


def _shown(value: Any) -> str:
    """Return a hyperparameter as ranks compare it: the last bits may differ where their processors do."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return "a tensor"  # reading it would wait for the device
        value = value.item()
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def broken_gradients(caller: str, groups: Sequence[Mapping[str, Any]], problems: list[Exception]) -> list[str]:
    """List the parameters whose gradients are not finite on some rank; a collective, if there are other ranks.

    Ranks tell each other four numbers, whatever parameters they have: whether there is a problem, a digest of
    parameters and hyperparameters and its opposite, which differ from each other's where ranks differ, and whether a
    gradient is not finite. Where one is, another collective tells which.

    Args:
        caller: the optimizer, for errors.
        groups: with parameters, plain or DTensors, which count as their local tensors here.
        problems: why this rank can't step; one at most, which is taken out and raised.

    Raises:
        ValueError: ranks have different parameters or hyperparameters, on all of them.
        Exception: a rank has a problem, on all of them.
    """
    named = [
        pair for number, group in enumerate(groups) for pair in zip(parameter_names(group, number), group["params"])
    ]
    parameters = [parameter for _, parameter in named]
    meshes = {parameter._spec.mesh for parameter in parameters if isinstance(parameter, DTensor)}
    world = world_of(meshes)
    numbers, gradients = [], []
    for number, gradient in enumerate(map(get_grad, parameters)):
        if gradient is not None and gradient.layout is torch.strided and gradient.numel():
            numbers.append(number)
            gradients.append(gradient)
    flags = [0] * len(parameters)
    if gradients and not problems and not _all_finite(gradients):
        largest = [norm.cpu() for norm in torch._foreach_norm(gradients, float("inf"))]
        for number, finite in zip(numbers, torch.isfinite(torch.stack(largest)).tolist()):
            flags[number] = int(not finite)
    if len(world) == 1 or not world:
        if problems:
            raise problems.pop()
        return [name for (name, _), flag in zip(named, flags) if flag]
    hyperparameters = [told(number, group) for number, group in enumerate(groups)] if not problems else []
    text = f"{hyperparameters} {len(parameters)}".encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    group = get_platform().groups.new_group(world)
    own = [int(bool(problems)), digest, -digest, max(flags, default=0)]
    problem, high, low, broken = reduce_numbers(own, "max", group)

    def describe() -> list[str]:
        if problems:
            raise problems.pop()  # nothing of this frame holds it
        shapes = [tuple(getattr(parameter, "_spec", parameter).shape) for parameter in parameters]
        return [*hyperparameters, *(f"{name!r} of shape {shape}" for (name, _), shape in zip(named, shapes))]

    if problem or high != -low:
        agree_on(caller, describe, world)
    if not broken:
        return []
    return [name for (name, _), flag in zip(named, reduce_numbers(flags, "max", group)) if flag]


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
