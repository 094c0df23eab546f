"""Scaled losses: what ``torch.amp.GradScaler`` asks of gradients, alike on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor.torch.dtensor import DTensor
from hp_platform import collectives, get_platform

_impl: Any = torch._C._disabled_torch_function_impl


def unscale(func: Any, args: Any, kwargs: Any) -> None:
    """Multiplies gradients in place, and notes in ``found_inf`` whether any rank's part is not finite.

    All ranks must skip a step or none, so the note is the largest of the ranks' of each mesh.

    Args:
        func: ``torch._amp_foreach_non_finite_check_and_unscale_``.
        args: the gradients, ``found_inf`` (a plain tensor of one element), the factor.
        kwargs: the same by name.
    """
    bound = {**dict(zip(("self", "found_inf", "inv_scale"), args, strict=False)), **kwargs}
    gradients, found_inf = bound["self"], bound["found_inf"]
    _impl(func, (), (gradients, found_inf, bound["inv_scale"]))
    meshes = dict.fromkeys(each._spec.mesh for each in gradients if isinstance(each, DTensor))
    for mesh in meshes:
        device = "cpu" if mesh.device_type == "cpu" else get_platform().devices.current_device()
        sent = found_inf.to(device)
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                collectives.all_reduce(sent, "max", group=mesh.get_group(axis))
        found_inf.copy_(sent)
