"""The norm of all gradients, over shards on any axes, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

import torch

from hp_dtensor.torch.extend import DTensor, local_view
from hp_fsdp.blocks import in_blocks
from hp_fsdp.norms import counts, joint_mesh, spec_of
from hp_fsdp.torch.block_norm import block_power_sum
from hp_fsdp.torch.context import hsdp_sync_stream
from hp_fsdp.torch.host import transport
from hp_platform import collectives, get_platform

__all__ = ["clip_grad_norm_", "global_grad_norm"]


def global_grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of the gradients of all parameters as one vector: that of a single process, on every rank.

    Each rank sums over what it holds and counts what several ranks hold once; one all-reduce of one number follows,
    over the ranks of the parameters' meshes. Reductions under way are waited for. Parameters without gradients count
    nothing. Parameters that were sharded
    with ``deterministic=True`` have a norm of the same bits for any number of ranks, at the price of an all-reduce of
    one number for 1024 elements.

    Args:
        parameters: DTensors, of which the gradients are; plain ones count as replicated.
        norm_type: the p of the p-norm, ``inf`` for the largest absolute value. Default 2.

    Returns:
        A plain tensor of no dims, in the widest dtype of the parameters, at least float32.

    Raises:
        ValueError: some parameters are sharded with ``deterministic=True``, some without.
        NotImplementedError: with it, a norm that is not 1, 2 or inf.
    """
    hsdp_sync_stream()
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm_type = float(norm_type)
    held = [parameter for parameter in parameters if parameter.grad is not None]
    mesh = joint_mesh([parameter._spec.mesh for parameter in parameters if isinstance(parameter, DTensor)])
    reference = held[0] if held else parameters[0] if parameters else torch.zeros(())
    # The same on all ranks, so not of the gradients: a rank that owns nothing of a parameter has none for it.
    dtypes = (parameter.dtype for parameter in parameters if parameter.requires_grad)
    dtype = reduce(torch.promote_types, dtypes, torch.float32)
    if mesh is not None and in_blocks(parameters) and not math.isinf(norm_type):
        with torch.no_grad():
            total = block_power_sum(parameters, mesh, norm_type, dtype, transport(mesh))
            return total.to(reference.device).pow(1.0 / norm_type)
    counted = [local_view(parameter.grad) for parameter in held if counts(spec_of(parameter), mesh)]  # type: ignore[arg-type]
    with torch.no_grad():
        counted = [gradient for gradient in counted if gradient.numel()]
        if counted:
            norms = torch.stack([norm.to(dtype) for norm in torch._foreach_norm(counted, norm_type, dtype=dtype)])
            total = norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
        else:
            total = torch.zeros((), dtype=dtype, device=reference.device)
        if mesh is not None and mesh.size() > 1:
            group = get_platform().groups.new_group(sorted(int(rank) for rank in mesh.ranks.reshape(-1)))
            total = total.to(transport(mesh))  # shards may be on the host
            collectives.all_reduce(total, "max" if math.isinf(norm_type) else "sum", group=group)
            total = total.to(reference.device)
        return total if math.isinf(norm_type) else total.pow(1.0 / norm_type)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    gradients: None = None,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients in place so that their global norm is at most ``max_norm``.

    Args:
        parameters: as for `global_grad_norm`.
        max_norm: the largest norm to allow.
        norm_type: the p of the p-norm. Default 2.
        gradients: MindSpore's, which has no ``.grad``; here the parameters have them.
        error_if_nonfinite: raise where the norm is not finite, instead of scaling by it.
        foreach: False scales one gradient after the other; default all of a dtype in one call.

    Returns:
        The norm before scaling, a plain tensor of no dims.

    Raises:
        TypeError: ``gradients`` are given.
        RuntimeError: with ``error_if_nonfinite``, a norm that is infinite or not a number.
    """
    if gradients is not None:
        raise TypeError(
            "clip_grad_norm_: gradients= is for MindSpore; on PyTorch the gradients are the parameters' .grad, so leave"
            " it out"
        )
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = global_grad_norm(parameters, norm_type)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"clip_grad_norm_: the gradients' norm of order {norm_type} is {norm.item()}, so they cannot be clipped to"
            f" {max_norm}. Look for the first parameter with a gradient that is not finite, or lower the learning rate"
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(local_view(parameter.grad))
    with torch.no_grad():
        for dtype, grads in by_dtype.items():
            for together in [grads] if foreach is not False else [[grad] for grad in grads]:
                torch._foreach_mul_(together, scale.to(dtype))
    return norm
