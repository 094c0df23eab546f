"""The norm of all gradients, over shards on any axes, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from mindspore import Tensor, _no_grad, ops
from mindspore.common import dtype as mstype

from hp_dtensor.mindspore.extend import local_mode, local_view
from hp_fsdp.blocks import in_blocks
from hp_fsdp.mindspore.block_norm import block_power_sum
from hp_fsdp.mindspore.host import on_host, to_device, to_host
from hp_fsdp.norms import counts, joint_mesh, spec_of
from hp_platform import get_platform

__all__ = ["clip_grad_norm_", "global_grad_norm"]


def global_grad_norm(
    parameters: Tensor | Iterable[Tensor], gradients: Tensor | Sequence[Tensor], norm_type: float = 2.0
) -> Tensor:
    """The norm of the gradients of all parameters as one vector: that of a single process, on every rank.

    Each rank sums over what it holds and counts what several ranks hold once; one all-reduce of one number follows,
    over the ranks of the parameters' meshes. Parameters that were sharded with ``deterministic=True`` have a norm of
    the same bits for any number of ranks, at the price of an all-reduce of one number for 1024 elements.

    Args:
        parameters: DTensors, of which the gradients are; plain ones count as replicated.
        gradients: one for each, in the same order, as `parallelize_value_and_grad` returns them (MindSpore has no
            ``.grad``); plain local parts will do.
        norm_type: the p of the p-norm, ``inf`` for the largest absolute value. Default 2.

    Returns:
        A plain tensor of no dims, in the gradients' dtype, at least float32.

    Raises:
        ValueError: another number of gradients than of parameters, or some parameters are sharded with
            ``deterministic=True``, some without.
        NotImplementedError: with it, a norm that is not 1, 2 or inf.
    """
    parameters, gradients = _pairs(parameters, gradients, "global_grad_norm")
    norm_type = float(norm_type)
    largest = math.isinf(norm_type)
    mesh = joint_mesh([spec.mesh for p in parameters if (spec := spec_of(p)) is not None])
    wide = any(gradient.dtype == mstype.float64 for gradient in gradients)
    dtype = mstype.float64 if wide else mstype.float32
    with _no_grad(), local_mode():
        parts = [to_device(local_view(gradient)) for gradient in gradients]
        if mesh is not None and in_blocks(parameters) and not largest:
            return (block_power_sum(parameters, parts, mesh, norm_type, dtype) ** (1.0 / norm_type)).reshape(())
        total: Any = ops.zeros((1,), dtype)
        for parameter, local in zip(parameters, parts):
            # The sum of no elements is not zero on CPU, it is undefined.
            if not local.numel() or not counts(spec_of(parameter), mesh):
                continue
            size = ops.abs(local.astype(dtype)).reshape(-1)
            total = ops.maximum(total, size.max().reshape(1)) if largest else total + (size**norm_type).sum().reshape(1)
        if mesh is not None and mesh.size() > 1:
            group = get_platform().groups.new_group(sorted(int(rank) for rank in mesh.ranks.reshape(-1)))
            get_platform().collectives.all_reduce(total, "max" if largest else "sum", group=group)
        return (total if largest else total ** (1.0 / norm_type)).reshape(())


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    gradients: Tensor | Sequence[Tensor] | None = None,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients in place so that their global norm is at most ``max_norm``.

    Args:
        parameters: as for `global_grad_norm`.
        max_norm: the largest norm to allow.
        norm_type: the p of the p-norm. Default 2.
        gradients: as for `global_grad_norm`; needed, since MindSpore has no ``.grad``.
        error_if_nonfinite: raise where the norm is not finite, instead of scaling by it.
        foreach: PyTorch's; it has no effect.

    Returns:
        The norm before scaling, a plain tensor of no dims.

    Raises:
        TypeError: no ``gradients``.
        RuntimeError: with ``error_if_nonfinite``, a norm that is infinite or not a number.
    """
    if gradients is None or not isinstance(max_norm, (int, float)):
        raise TypeError(
            f"clip_grad_norm_: max_norm is {type(max_norm).__name__}, gradients {type(gradients).__name__}; MindSpore"
            " has no .grad, so write clip_grad_norm_(parameters, max_norm, gradients=gradients), with the gradients"
            " that parallelize_value_and_grad returned"
        )
    parameters, gradients = _pairs(parameters, gradients, "clip_grad_norm_")
    norm = global_grad_norm(parameters, gradients, norm_type)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"clip_grad_norm_: the gradients' norm of order {norm_type} is {norm.item()}, so they cannot be clipped to"
            f" {max_norm}. Look for the first parameter with a gradient that is not finite, or lower the learning rate"
        )
    with _no_grad(), local_mode():
        scale = ops.minimum(max_norm / (norm + 1e-6), Tensor(1.0, norm.dtype))
        for gradient in gradients:
            local = local_view(gradient)
            if local.numel():
                # Arithmetic in place (mul_) does nothing on CPU, and a view can't be written to.
                scaled = to_device(local) * scale.astype(gradient.dtype)
                gradient._update_data(to_host(scaled, local.is_pinned()) if on_host(local) else scaled)
    return norm


def _pairs(parameters: Any, gradients: Any, where: str) -> tuple[list[Any], list[Any]]:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [gradients] if isinstance(gradients, Tensor) else list(gradients)
    if len(parameters) != len(gradients):
        raise ValueError(
            f"{where}: {len(parameters)} parameters and {len(gradients)} gradients; give the gradient of each parameter"
        )
    return parameters, gradients
