"""The norm of gradients that are sharded in blocks: Note [Norms by blocks] in `hp_fsdp.blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from mindspore import Tensor, mint, ops

from hp_dtensor import DeviceMesh
from hp_fsdp.blocks import block_lines, check_norm_type
from hp_fsdp.norms import BLOCK, spec_of
from hp_platform import get_platform

__all__ = ["block_power_sum"]


def block_power_sum(
    parameters: Sequence[Any], gradients: Sequence[Tensor], mesh: DeviceMesh, norm_type: float, dtype: Any
) -> Tensor:
    """The sum of ``|x| ** norm_type`` over all gradients.

    Args:
        parameters: sharded in blocks, or plain: then every rank has the same.
        gradients: the local part of each one's.
        mesh: what `joint_mesh` gave.
        norm_type: 1 or 2.
        dtype: in which to add.

    Returns:
        The same number on every rank, of one element.

    Raises:
        NotImplementedError: another norm.
    """
    check_norm_type(norm_type)
    specs = [spec_of(parameter) for parameter in parameters]
    plain = [gradient for gradient, spec in zip(gradients, specs) if spec is None]
    counts = [ceil(gradient.numel() / BLOCK) for gradient in plain]
    total = _sum(_block_sums(plain, counts, [0] * len(plain), norm_type, dtype))
    collectives = get_platform().collectives
    for line in block_lines(specs, mesh):
        counted = [gradients[index] if use else None for index, use in zip(line.members, line.counted)]
        sums = _block_sums(counted, line.counts, line.firsts, norm_type, dtype)
        if line.group is not None:
            collectives.all_reduce(sums, group=line.group)
        part = _sum(sums)
        for group in line.others:
            collectives.all_reduce(part, group=group)
        total = total + part
    return total


def _block_sums(
    members: Sequence[Tensor | None], counts: Sequence[int], firsts: Sequence[int], norm_type: float, dtype: Any
) -> Tensor:
    """One sum for each block of each gradient; zero for those that are elsewhere or not counted."""
    parts: list[Tensor] = []
    for gradient, count, first in zip(members, counts, firsts):
        size = 0 if gradient is None else gradient.numel()
        blocks = ceil(size / BLOCK)
        if gradient is not None and blocks:
            flat = gradient.reshape(-1).astype(dtype)
            flat = flat * flat if norm_type == 2 else ops.abs(flat)
            parts += _zeros(first, dtype) + [_halved(_padded(flat, blocks * BLOCK).reshape(blocks, BLOCK))]
        else:
            first = 0
        parts += _zeros(count - first - blocks, dtype)
    return ops.concat(parts) if len(parts) > 1 else parts[0].copy() if parts else ops.zeros((1,), dtype)


def _zeros(size: int, dtype: Any) -> list[Tensor]:
    return [ops.zeros((size,), dtype)] if size else []


def _padded(flat: Tensor, size: int) -> Tensor:
    rest = size - flat.numel()
    return ops.concat([flat, ops.zeros((rest,), flat.dtype)]) if rest else flat


def _halved(rows: Tensor) -> Tensor:
    """The sum of each row, of a power of two elements."""
    width = rows.shape[1]
    while width > 1:
        width //= 2
        rows = mint.narrow(rows, 1, 0, width) + mint.narrow(rows, 1, width, width)
    return rows.reshape(-1)


def _sum(sums: Tensor) -> Tensor:
    size = 1 << max(0, sums.numel() - 1).bit_length()
    return _halved(_padded(sums, size).reshape(1, size))
