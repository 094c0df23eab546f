"""The norm of gradients that are sharded in blocks: Note [Norms by blocks] in `hp_fsdp.blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch

from hp_dtensor import DeviceMesh
from hp_dtensor.torch.extend import local_view
from hp_fsdp.blocks import BlockLine, block_lines, check_norm_type
from hp_fsdp.norms import BLOCK, spec_of
from hp_platform import collectives

__all__ = ["block_power_sum"]


def block_power_sum(
    parameters: Sequence[torch.Tensor], mesh: DeviceMesh, norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The sum of ``|x| ** norm_type`` over all gradients.

    Args:
        parameters: sharded in blocks, or plain: then every rank has the same.
        mesh: what `joint_mesh` gave.
        norm_type: 1 or 2.
        dtype: in which to add.
        device: where the collectives work.

    Returns:
        The same number on every rank, of no dims.

    Raises:
        NotImplementedError: another norm.
    """
    check_norm_type(norm_type)
    specs = [spec_of(parameter) for parameter in parameters]
    plain = [parameter for parameter, spec in zip(parameters, specs) if spec is None]
    counts = [ceil(each.numel() / BLOCK) for each in plain]
    total = _sum(_block_sums(plain, counts, [0] * len(plain), norm_type, dtype, device))
    for line in block_lines(specs, mesh):
        total = total + _sum_of_line(parameters, line, norm_type, dtype, device)
    return total


def _sum_of_line(
    parameters: Sequence[torch.Tensor], line: BlockLine, norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    counted = [parameters[index] if use else None for index, use in zip(line.members, line.counted)]
    sums = _block_sums(counted, line.counts, line.firsts, norm_type, dtype, device)
    if line.group is not None:
        collectives.all_reduce(sums, group=line.group)
    total = _sum(sums)
    for group in line.others:
        collectives.all_reduce(total, group=group)
    return total


def _block_sums(
    members: Sequence[Any],
    counts: Sequence[int],
    firsts: Sequence[int],
    norm_type: float,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """One sum for each block of each parameter; zero for those that are elsewhere, and where there is no gradient."""
    sums = torch.zeros(sum(counts), dtype=dtype, device=device)
    gradients: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    offset = 0
    for parameter, count, first in zip(members, counts, firsts):
        gradient = None if parameter is None else parameter.grad
        if gradient is not None and gradient.numel():
            local = local_view(gradient).reshape(-1)
            if local.numel():
                gradients.append(local)
                places.append(sums[offset + first : offset + first + ceil(local.numel() / BLOCK)])
        offset += count
    if not gradients:
        return sums
    sizes = [place.numel() for place in places]
    blocks = torch.zeros(sum(sizes) * BLOCK, dtype=dtype, device=gradients[0].device)
    rows = blocks.split([size * BLOCK for size in sizes])
    torch._foreach_copy_([row[: gradient.numel()] for row, gradient in zip(rows, gradients)], gradients)
    blocks = blocks.mul_(blocks) if norm_type == 2 else blocks.abs_()
    added = _halved(blocks.view(-1, BLOCK)).to(device)
    torch._foreach_copy_(places, list(added.split(sizes)))
    return sums


def _halved(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row, of a power of two elements; writes into ``rows``."""
    width = rows.shape[1]
    while width > 1:
        width //= 2
        rows[:, :width] += rows[:, width : 2 * width]
    return rows[:, 0]


def _sum(sums: torch.Tensor) -> torch.Tensor:
    padded = sums.new_zeros(1, 1 << max(0, sums.numel() - 1).bit_length())
    padded[0, : sums.numel()] = sums
    return _halved(padded)[0]
