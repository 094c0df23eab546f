"""The norm of gradients that are sharded in blocks: the same bits for any number of ranks.

Note [Norms by blocks]
    In deterministic mode a parameter is cut between blocks of `hp_fsdp.norms.BLOCK` elements only, so each block is
    whole on one rank. Its sum is formed by adding halves, elementwise, whose order no kernel and no shape changes. Each
    rank writes its blocks' sums into a vector that has a place for every block, zeros elsewhere, and the vectors are
    added over the ranks: x + 0 is exact in any order. Then every rank adds all blocks' sums, by halves again. What is
    sent is a 1024th of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch

from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.torch.dtensor import DTensor, local_view
from hp_fsdp.norms import BLOCK
from hp_platform.torch import collectives

__all__ = ["block_power_sum", "in_blocks", "mark_in_blocks"]


def mark_in_blocks(parameter: Any) -> None:
    """Notes on a sharded parameter that it is cut between blocks only."""
    parameter._hsdp_in_blocks = True


def in_blocks(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether the parameters are cut between blocks only.

    Raises:
        ValueError: some DTensors are, some not.
    """
    kinds = {getattr(each, "_hsdp_in_blocks", False) for each in parameters if isinstance(each, DTensor)}
    if len(kinds) > 1:
        raise ValueError(
            "global_grad_norm: some parameters are sharded with deterministic=True, some are not. Shard all of them"
            " with it, or call once for each kind"
        )
    return kinds == {True}


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
    if norm_type not in (1.0, 2.0):
        raise NotImplementedError(
            f"global_grad_norm: norm_type={norm_type} is not the same for any number of ranks, as deterministic=True"
            " asks for. Use 1, 2 or inf"
        )
    lines: dict[tuple[DeviceMesh, int], list[torch.Tensor]] = {}
    plain: list[torch.Tensor] = []
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            lines.setdefault((parameter._spec.mesh, _ragged_axis(parameter._spec)), []).append(parameter)
        else:
            plain.append(parameter)
    counts = [ceil(each.numel() / BLOCK) for each in plain]
    total = _sum(_block_sums(plain, counts, [0] * len(plain), norm_type, dtype, device))
    for (own, axis), members in lines.items():
        total = total + _sum_of_line(members, own, axis, mesh, norm_type, dtype, device)
    return total


def _sum_of_line(
    members: list[Any],
    own: DeviceMesh,
    axis: int,
    mesh: DeviceMesh,
    norm_type: float,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The sum over parameters on mesh ``own``, cut along its ``axis``."""
    rank = own.get_local_rank(axis)
    # Ranks that differ in the axes of data parallelism only (up to `axis`) find the same; over the others it is added.
    others = _other_axes(own, axis, mesh)
    place = mesh.get_coordinate() or ()
    counts, firsts, counted = [], [], []
    for parameter in members:
        spec = parameter._spec
        units = spec.placements[axis].units
        start = sum(units[:rank])
        assert start % BLOCK == 0 or units[rank] == 0, (start, units)
        counts.append(ceil(sum(units) / BLOCK))
        firsts.append(start // BLOCK)
        counted.append(all(place[other] == 0 or _is_sharded(spec, mesh, other) for other in others))
    sums = _block_sums(
        [parameter if use else None for parameter, use in zip(members, counted)],
        counts,
        firsts,
        norm_type,
        dtype,
        device,
    )
    if own.size(axis) > 1:
        collectives.all_reduce(sums, group=own.get_group(axis))
    total = _sum(sums)
    for other in others:
        if mesh.size(other) > 1:
            collectives.all_reduce(total, group=mesh.get_group(other))
    return total


def _ragged_axis(spec: Any) -> int:
    return next(axis for axis, placement in enumerate(spec.placements) if hasattr(placement, "units"))


def _other_axes(own: DeviceMesh, axis: int, mesh: DeviceMesh) -> list[int]:
    if own == mesh:
        return list(range(axis + 1, mesh.ndim))
    data = set((own.mesh_dim_names or ())[: axis + 1])
    return [index for index, name in enumerate(mesh.mesh_dim_names or ()) if name not in data]


def _is_sharded(spec: Any, mesh: DeviceMesh, axis: int) -> bool:
    if spec.mesh == mesh:
        return not spec.placements[axis].is_replicate()
    name = mesh.mesh_dim_names[axis]  # type: ignore[index]
    names = spec.mesh.mesh_dim_names or ()
    return name in names and not spec.placements[names.index(name)].is_replicate()


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
