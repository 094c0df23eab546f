"""The norm of all gradients, over shards on any axes, and clipping by it.

Note [Norms by blocks]
    In deterministic mode a parameter is sharded between blocks of `hp_fsdp.groups.managed_params.BLOCK` elements only,
    so each block is whole on one rank. It is summed by adding halves, elementwise, in an order that no kernel or shape
    changes. Each rank writes its blocks' sums into a vector with one element for every block, zeros elsewhere, and the
    vectors are added over the ranks: x + 0 is exact in any order. Then every rank adds all blocks' sums, by halves
    again. The traffic is a 1024th of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from hp_dtensor import DeviceMesh
from hp_dtensor.extend import TensorSpec, axis_within, in_one_root, slice_of
from hp_fsdp import port
from hp_fsdp.groups.managed_params import BLOCK, spec_of
from hp_platform import collectives, get_platform
from hp_platform.extend import share_numbers


def global_grad_norm(
    parameters: Any, norm_type: float = 2.0, *, gradients: Any = None, group: Any = None, copies: Sequence[Any] = ()
) -> Any:
    """Return the norm of the gradients of all parameters as one vector: that of a single process, on every rank.

    Each rank sums over its shards and counts replicated values once; one all-reduce of one number follows, over the
    ranks of the parameters' meshes. Reductions under way are waited for. Parameters without gradients count nothing.
    Parameters that were sharded with ``deterministic=True`` have a norm of the same bits for any number of ranks, at
    the price of an all-reduce of one number for 1024 elements.

    Args:
        parameters: one or several DTensors; plain ones count as replicated.
        norm_type: the p of the p-norm, ``inf`` for the largest absolute value, 0 for the number of parameters whose
            gradient is not zero, as torch counts them. Default 2.
        gradients: MindSpore, which has no ``.grad``: one for each parameter, in the same order, as
            `parallelize_value_and_grad` returns them; plain local parts are accepted. PyTorch: leave it out.
        group: ranks that have other parameters, such as a pipeline's: their sums are added in the order of the ranks,
            to the same bits on all. The host waits for them.
        copies: parameters of this rank that another rank of ``group`` counts, such as tied weights
            (`hp_pipeline.PipelineSchedule.copies`).

    Returns:
        A plain tensor of no dims, in the widest dtype of the parameters (MindSpore: of the gradients), at least
        float32.

    Raises:
        TypeError: ``gradients`` on PyTorch, none on MindSpore.
        ValueError: another number of gradients than of parameters; some parameters are sharded with
            ``deterministic=True``, some without; the ranks of ``group`` call with other arguments, on all of them;
            ``copies`` without a group; a negative ``norm_type``.
        NotImplementedError: with it, a norm that is not 0, 1, 2 or inf.
    """
    framework = port.grad_norms()
    pairs = framework.pairs(parameters, gradients, "global_grad_norm")
    return _norm(pairs, framework, _Call("global_grad_norm", float(norm_type), None, group, tuple(copies)))


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    gradients: Any = None,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    group: Any = None,
    copies: Sequence[Any] = (),
) -> Any:
    """Scale gradients in place so that their global norm is at most ``max_norm``.

    Args:
        parameters: as for `global_grad_norm`.
        max_norm: upper limit of the norm.
        norm_type: the p of the p-norm. Default 2.
        gradients: as for `global_grad_norm`.
        error_if_nonfinite: raise if the norm is not finite, instead of scaling by it.
        foreach: False scales one gradient after the other. Default: all of a dtype in one call. No effect on MindSpore.
        group: as for `global_grad_norm`.
        copies: the same; they are scaled as well.

    Returns:
        The norm before scaling, a plain tensor of no dims.

    Raises:
        TypeError, ValueError, NotImplementedError: see `global_grad_norm`.
        RuntimeError: with ``error_if_nonfinite``, a norm that is infinite or not a number.
    """
    framework = port.grad_norms()
    pairs = framework.pairs(parameters, gradients, "clip_grad_norm_")
    norm = _norm(pairs, framework, _Call("clip_grad_norm_", float(norm_type), float(max_norm), group, tuple(copies)))
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"clip_grad_norm_: the gradients' norm of order {norm_type} is {norm.item()}, so they cannot be clipped to"
            f" {max_norm}. Look for the first parameter with a gradient that is not finite, or lower the learning rate"
        )
    framework.scale([gradient for _, gradient in pairs if gradient is not None], norm, max_norm, foreach)
    return norm


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a call that do not depend on the gradients; ``max_norm`` is None where nothing is clipped."""

    name: str
    norm_type: float
    max_norm: float | None
    group: Any
    copies: tuple[Any, ...]

    def __str__(self) -> str:
        clip = "" if self.max_norm is None else f", max_norm={self.max_norm}"
        return f"{self.name} with norm_type={self.norm_type}{clip}"


def _norm(pairs: Sequence[tuple[Any, Any]], framework: port.GradNorms, call: _Call) -> Any:
    norm_type = call.norm_type
    if not norm_type >= 0:
        raise ValueError(f"{call.name}: norm_type must be 0, a positive number or inf, got {norm_type}")
    if call.copies and call.group is None:
        raise ValueError(f"{call.name}: copies= are counted by another rank of a group; pass that group, got None")
    skipped = {id(parameter) for parameter in call.copies}
    pairs = [pair for pair in pairs if id(pair[0]) not in skipped]
    specs = [spec_of(parameter) for parameter, _ in pairs]
    mesh = _joint_mesh({spec.mesh for spec in specs if spec is not None})
    dtype = framework.dtype_of(pairs)
    with framework.unrecorded():
        if not norm_type:
            flags = framework.nonzero([gradient for _, gradient in pairs], dtype, pairs, mesh)
            if mesh is not None and mesh.size() > 1:
                collectives.all_reduce(flags, "max", group=_group_of(mesh))
            total = framework.total(flags)
        elif mesh is not None and _in_blocks(pairs) and not math.isinf(norm_type):
            total = _power_sum_of_blocks(pairs, specs, mesh, norm_type, dtype, framework)
        else:
            counted = [g for (_, g), spec in zip(pairs, specs) if g is not None and _counts(spec, mesh)]
            total = framework.power_sum(counted, norm_type, dtype, pairs, mesh)
            if mesh is not None and mesh.size() > 1:
                collectives.all_reduce(total, "max" if math.isinf(norm_type) else "sum", group=_group_of(mesh))
        if call.group is not None and get_platform().groups.size(call.group) > 1:
            total = _over_group(total, pairs, framework, call)
        return framework.root(total, norm_type or 1.0, pairs)


def _group_of(mesh: DeviceMesh) -> Any:
    return get_platform().groups.new_group(sorted(int(rank) for rank in mesh.ranks.reshape(-1)))


def _over_group(total: Any, pairs: Sequence[tuple[Any, Any]], framework: port.GradNorms, call: _Call) -> Any:
    """Add the power sums of the ranks of a group, in their order, in float64.

    Raises:
        ValueError: ranks that call with other arguments.
    """
    double = str(framework.dtype_of(pairs)).lower().endswith("float64")
    limit = -1.0 if call.max_norm is None else call.max_norm
    numbers = share_numbers([framework.number(total), call.norm_type, limit, double], call.group)
    calls = [str(replace(call, norm_type=row[1], max_norm=None if row[2] == -1 else row[2])) for row in numbers]
    if len(set(calls)) > 1:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
        raise ValueError(f"{call.name}: the ranks of the group must pass the same arguments, got {listed}")
    sums = [row[0] for row in numbers]
    result = math.nan if any(map(math.isnan, sums)) else max(sums) if math.isinf(call.norm_type) else sum(sums)
    return framework.of_number(result, any(row[3] for row in numbers), pairs)


def _power_sum_of_blocks(
    pairs: Sequence[tuple[Any, Any]],
    specs: Sequence[TensorSpec | None],
    mesh: DeviceMesh,
    norm_type: float,
    dtype: Any,
    framework: port.GradNorms,
) -> Any:
    """Return the sum of ``|x| ** norm_type`` over all gradients, the same number on every rank.

    Raises:
        NotImplementedError: a norm that is neither 1 nor 2, which no sum over blocks gives.
    """
    if norm_type not in (1.0, 2.0):
        raise NotImplementedError(
            f"global_grad_norm: norm_type={norm_type} is not the same for any number of ranks, as deterministic=True"
            " asks for. Use 1, 2 or inf"
        )
    plain = [pair for pair, spec in zip(pairs, specs) if spec is None]
    counts = [ceil(parameter.numel() / BLOCK) for parameter, _ in plain]
    zeros = [0] * len(plain)
    total = framework.total(framework.block_sums([g for _, g in plain], counts, zeros, norm_type, dtype, mesh))
    for line in _block_lines(specs):
        counted = [pairs[index][1] if use else None for index, use in zip(line.members, line.counted)]
        sums = framework.block_sums(counted, line.counts, line.firsts, norm_type, dtype, mesh)
        if line.group is not None:
            collectives.all_reduce(sums, group=line.group)
        part = framework.total(sums)
        for group in line.others:
            collectives.all_reduce(part, group=group)
        total = total + part
    return total


def _counts(spec: TensorSpec | None, mesh: DeviceMesh | None) -> bool:
    """Tell whether this rank counts its part of a tensor: it is the first of the ranks with the same part.

    Args:
        spec: the tensor's layout; None for a plain one, which counts as replicated.
        mesh: the joint mesh of all tensors.
    """
    if mesh is None:
        return True
    own = (slice_of(mesh.root, spec.mesh) or spec.mesh) if spec is not None else mesh
    replicated = [axis for axis in range(own.ndim) if spec is None or spec.placements[axis].is_replicate()]
    first = not any((own.get_coordinate() or (0,) * own.ndim)[axis] for axis in replicated)
    others = [axis for axis in range(mesh.ndim) if own != mesh and not axis_within(mesh._axes[axis], own._axes)]
    return first and not any((mesh.get_coordinate() or (0,) * mesh.ndim)[axis] for axis in others)


def counts_here(parameters: Sequence[Any]) -> list[bool]:
    """Tell of each parameter whether this rank counts its part: no earlier rank has the same.

    Args:
        parameters: all of a model; plain ones count as replicated.
    """
    specs = [spec_of(parameter) for parameter in parameters]
    mesh = _joint_mesh({spec.mesh for spec in specs if spec is not None})
    return [_counts(spec, mesh) for spec in specs]


def _joint_mesh(meshes: set[DeviceMesh]) -> DeviceMesh | None:
    """Return the smallest mesh that has the ranks of all; None without meshes."""
    if len(meshes) <= 1:
        return next(iter(meshes), None)
    ordered = sorted(meshes, key=lambda mesh: (-mesh.ndim, mesh.mesh_dim_names or ()))
    slices = in_one_root(ordered)
    if slices is None:
        other = next((mesh for mesh in ordered if in_one_root([ordered[0], mesh]) is None), ordered[-1])
        raise ValueError(
            f"global_grad_norm: parameters are on {other} and on {ordered[0]}; both must be slices, by name, of one"
            " mesh"
        )
    ordered, largest = slices, slices[0]
    axes = [(mesh, axis) for mesh in ordered for axis in range(mesh.ndim)]
    # Axes that were made of others, or split: the larger ones have all ranks.
    chosen: list[DeviceMesh] = []
    for mesh, axis in sorted(axes, key=lambda each: -each[0].shape[each[1]]):
        if not axis_within(mesh._axes[axis], [one._axes[0] for one in chosen]):
            chosen.append(mesh[mesh.mesh_dim_names[axis]])  # type: ignore[index]
    if not chosen:
        return largest
    root = largest.root
    covered = all(axis_within(digits, [one._axes[0] for one in chosen]) for digits in root._axes)
    return root if covered else DeviceMesh._concatenate(chosen)


def mark_in_blocks(parameter: Any) -> None:
    """Mark a sharded parameter as sharded between blocks only."""
    parameter._hsdp_in_blocks = True


def _in_blocks(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Tell whether the parameters are sharded between blocks only; raise ValueError if some are and some are not."""
    kinds = {getattr(each, "_hsdp_in_blocks", False) for each, _ in pairs if spec_of(each) is not None}
    if len(kinds) > 1:
        raise ValueError(
            "global_grad_norm: some parameters are sharded with deterministic=True, some are not. Shard all of them"
            " with it, or call once for each kind"
        )
    return kinds == {True}


@dataclass(frozen=True, slots=True)
class _BlockLine:
    """Parameters on one mesh that are sharded along the same axis of it.

    Attributes:
        members: their indices in the list of all.
        counts: number of blocks of each over all ranks of the line.
        firsts: index of the first block of each on this rank.
        counted: for each, True on one of the ranks with the same blocks.
        group: the ranks of the line; None for one.
        others: groups of the axes over which the line's sum is added, one after the other.
    """

    members: tuple[int, ...]
    counts: tuple[int, ...]
    firsts: tuple[int, ...]
    counted: tuple[bool, ...]
    group: Any
    others: tuple[Any, ...]


def _block_lines(specs: Sequence[TensorSpec | None]) -> list[_BlockLine]:
    """Return the lines of all sharded parameters; plain ones, whose spec is None, are in no line."""
    members: dict[tuple[DeviceMesh, int], list[int]] = {}
    for index, spec in enumerate(specs):
        if spec is not None:
            members.setdefault((spec.mesh, _ragged_axis(spec)), []).append(index)
    return [_line(own, axis, indices, specs) for (own, axis), indices in members.items()]


def _line(own: DeviceMesh, axis: int, members: Sequence[int], specs: Sequence[Any]) -> _BlockLine:
    rank = own.get_local_rank(axis)
    # Ranks that differ in the axes of data parallelism only (up to `axis`), or in axes that the parameters' mesh lacks,
    # have the same sum; the others add theirs.
    others = range(axis + 1, own.ndim)
    place = own.get_coordinate() or (0,) * own.ndim
    counts, firsts, counted = [], [], []
    for spec in (specs[index] for index in members):
        units = spec.placements[axis].units
        start = sum(units[:rank])
        assert start % BLOCK == 0 or units[rank] == 0, (start, units)
        counts.append(ceil(sum(units) / BLOCK))
        firsts.append(start // BLOCK)
        counted.append(all(place[other] == 0 or not spec.placements[other].is_replicate() for other in others))
    return _BlockLine(
        tuple(members),
        tuple(counts),
        tuple(firsts),
        tuple(counted),
        own.get_group(axis) if own.size(axis) > 1 else None,
        tuple(own.get_group(other) for other in others if own.size(other) > 1),
    )


def _ragged_axis(spec: Any) -> int:
    return next(axis for axis, placement in enumerate(spec.placements) if hasattr(placement, "units"))
