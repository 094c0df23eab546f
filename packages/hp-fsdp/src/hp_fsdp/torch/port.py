"""Primitives of sharding modules, for `hp_fsdp.fully_shard` and `hp_fsdp.hsdp`, and of the norm of their gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from functools import reduce
from math import ceil
from typing import Any

import torch
from torch import nn

from hp_dtensor import DeviceMesh
from hp_dtensor.torch.extend import DTensor, local_view
from hp_fsdp.axes import DataAxes
from hp_fsdp.groups.managed_params import BLOCK, roots_of
from hp_fsdp.options import GroupOptions
from hp_fsdp.port import Anatomy
from hp_fsdp.torch.groups.communication import transport
from hp_fsdp.torch.groups.group import ParameterGroup
from hp_fsdp.torch.groups.parameter import ManagedParameter
from hp_fsdp.torch.module import HSDPModule, shard_class
from hp_fsdp.torch.optimizers import watch_optimizers as watch_optimizers
from hp_fsdp.torch.steps.context import RootGroup, hsdp_sync_stream
from hp_platform import get_platform

Pairs = Sequence[tuple[Any, Any]]
unrecorded = torch.no_grad


def pairs(parameters: Any, gradients: Any, where: str) -> list[tuple[Any, Any]]:
    if gradients is not None:
        raise TypeError(
            f"{where}: gradients= is for MindSpore; on PyTorch the gradients are the parameters' .grad, so leave it out"
        )
    hsdp_sync_stream()
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for parameter in parameters:
        if hasattr(parameter, "placements") and not isinstance(parameter, DTensor):
            kind = f"{type(parameter).__module__}.{type(parameter).__name__}"
            raise TypeError(
                f"{where}: expected plain parameters or DTensors of hp-dtensor, got a {kind}, as torch's fully_shard"
                " makes; use torch.nn.utils.clip_grad_norm_ or get_total_norm for those"
            )
    return [(parameter, parameter.grad) for parameter in parameters]


def dtype_of(pairs: Pairs) -> torch.dtype:
    # The same on all ranks, so not of the gradients: a rank that owns no element of a parameter has none for it.
    dtypes = (parameter.dtype for parameter, _ in pairs if parameter.requires_grad)
    return reduce(torch.promote_types, dtypes, torch.float32)


def power_sum(
    gradients: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype, pairs: Pairs, mesh: DeviceMesh | None
) -> torch.Tensor:
    parts = [part for gradient in gradients if (part := local_view(gradient)).numel()]
    if parts:
        norms = torch._foreach_norm(parts, norm_type, dtype=dtype)
        norms = torch.stack([norm.to(parts[0].device, dtype) for norm in norms])  # some parameters may be on the host
        result = norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
    else:
        result = torch.zeros((), dtype=dtype, device=_device(pairs))
    return result if mesh is None else result.to(transport(mesh))  # shards may be on the host


def nonzero(gradients: Sequence[Any], dtype: torch.dtype, pairs: Pairs, mesh: DeviceMesh | None) -> torch.Tensor:
    flags = torch.zeros(len(gradients), dtype=dtype, device=_device(pairs))
    parts = {at: local_view(each) for at, each in enumerate(gradients) if each is not None}
    filled = {at: part for at, part in parts.items() if part.numel()}
    if filled:
        largest = torch._foreach_norm(list(filled.values()), float("inf"))
        flags[list(filled)] = torch.stack([norm.to(flags.device) != 0 for norm in largest]).to(dtype)
    return flags if mesh is None else flags.to(transport(mesh))


def number(total: torch.Tensor) -> float:
    return total.item()


def of_number(number: float, double: bool, pairs: Pairs) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64 if double else torch.float32, device=_device(pairs))


def root(total: torch.Tensor, norm_type: float, pairs: Pairs) -> torch.Tensor:
    total = total.to(_device(pairs))
    return total if math.isinf(norm_type) else total.pow(1.0 / norm_type)


def _device(pairs: Pairs) -> torch.device:
    gradients = (gradient.device for _, gradient in pairs if gradient is not None)
    return next(gradients, pairs[0][0].device if pairs else torch.device("cpu"))


def scale(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float, foreach: bool | None) -> None:
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        part = local_view(gradient)
        alike.setdefault((part.device, part.dtype), []).append(part)
    with torch.no_grad():
        for (device, dtype), parts in alike.items():
            for together in [parts] if foreach is not False else [[part] for part in parts]:
                torch._foreach_mul_(together, factor.to(device, dtype))


# ---- Note [Norms by blocks] ----
def block_sums(
    gradients: Sequence[Any],
    counts: Sequence[int],
    firsts: Sequence[int],
    norm_type: float,
    dtype: torch.dtype,
    mesh: DeviceMesh,
) -> torch.Tensor:
    device = transport(mesh)
    sums = torch.zeros(sum(counts), dtype=dtype, device=device)
    parts: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    offset = 0
    for gradient, count, first in zip(gradients, counts, firsts):
        if gradient is not None and gradient.numel():
            local = local_view(gradient).reshape(-1)
            if local.numel():
                parts.append(local)
                targets.append(sums[offset + first : offset + first + ceil(local.numel() / BLOCK)])
        offset += count
    if not parts:
        return sums
    sizes = [target.numel() for target in targets]
    blocks = torch.zeros(sum(sizes) * BLOCK, dtype=dtype, device=parts[0].device)
    rows = blocks.split([size * BLOCK for size in sizes])
    torch._foreach_copy_([row[: part.numel()] for row, part in zip(rows, parts)], parts)
    blocks = blocks.mul_(blocks) if norm_type == 2 else blocks.abs_()
    added = _halved(blocks.view(-1, BLOCK)).to(device)
    torch._foreach_copy_(targets, list(added.split(sizes)))
    return sums


def total(sums: torch.Tensor) -> torch.Tensor:
    padded = sums.new_zeros(1, 1 << max(0, sums.numel() - 1).bit_length())
    padded[0, : sums.numel()] = sums
    return _halved(padded)[0]


def _halved(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, of a power of two elements; write into ``rows``."""
    width = rows.shape[1]
    while width > 1:
        width //= 2
        rows[:, :width] += rows[:, width : 2 * width]
    return rows[:, 0]


MODULE = nn.Module
FORWARD = "forward"
MANAGED = ManagedParameter
DTYPE = torch.dtype
ZERO_COPY = True
ANY_DIM = True
BACKWARD_RETURNS_GRADIENTS = False


def modules_of(module: Any) -> list[nn.Module]:
    """List the modules of a group: one, or those of a list that are not inside others of it."""
    return roots_of(module, nn.Module, lambda each: each.modules())


def anatomy() -> Anatomy:
    return Anatomy(
        parameters="_parameters",
        children="_modules",
        sharded=HSDPModule,
        computes=_computes,
        nbytes=lambda parameter: parameter.numel() * parameter.element_size(),
    )


def _computes(module: nn.Module) -> bool:
    """Tell whether a module has a forward of its own, which a plain ``ModuleList`` lacks."""
    return not (isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward)


def check_contents(modules: Sequence[nn.Module], ignored_params: Collection[nn.Parameter]) -> None:
    """Accept all modules."""


def make_group(
    modules: Sequence[nn.Module],
    parameters: Sequence[ManagedParameter],
    axes: DataAxes,
    device: torch.device,
    options: GroupOptions,
    ignored: Sequence[nn.Parameter],
) -> None:
    group: RootGroup = ParameterGroup(modules, parameters, axes, device, options, ignored)
    for each in modules:
        shard_class(each, group)


def device_of(modules: Sequence[nn.Module], parameters: Sequence[ManagedParameter], mesh: DeviceMesh) -> torch.device:
    """Return the device of the shards: meta for parameters on meta, else this process's, where buffers go too."""
    on_meta = [p.name for p in parameters if p.original is not None and p.original.is_meta]
    if on_meta and len(on_meta) < len(parameters):
        raise ValueError(
            f"fully_shard: {len(on_meta)} of {len(parameters)} parameters of {type(modules[0]).__name__} are on the"
            f" meta device ({', '.join(on_meta[:3])}, ...): all or none of a group may be"
        )
    if on_meta:
        return torch.device("meta")
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    device = get_platform().devices.current_device()
    for each in itertools.chain.from_iterable(module.modules() for module in modules):
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.device.type not in ("meta", device.type):
                each._buffers[name] = buffer.to(device)
    return device
