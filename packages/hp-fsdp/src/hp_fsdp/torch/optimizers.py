"""What optimizers are given beside sharded parameters, looked at before their first step.

Note [Before an optimizer's first step]
    A block can't see that the model around it was not sharded; the optimizer has the parameters of both. Those that no
    group has would be trained on each rank's own gradients, and drift apart without a word. So the first call of
    `fully_shard` registers a hook of torch's for all optimizers. It costs one look-up a step, once the parameters were
    found in order.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hp_fsdp.finding import owner_of
from hp_fsdp.norms import spec_of

__all__ = ["ignore", "watch_optimizers"]

_in_order: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_registered: list[Any] = []


def watch_optimizers() -> None:
    """Looks at what optimizers are given from now on."""
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_before_step))


def ignore(parameter: Any) -> None:
    """Notes on a parameter that its gradients are reduced elsewhere: by the user, or as its own layout says."""
    parameter._hsdp_ignored = True


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _in_order.get(optimizer) != count and _check(optimizer):
        _in_order[optimizer] = count


def _check(optimizer: Optimizer) -> bool:
    """Raises for parameters that would be trained wrongly; False where some may yet get gradients.

    Raises:
        RuntimeError: the optimizer has gathered parameters, or such that no group has beside sharded ones.
    """
    name = type(optimizer).__name__
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gathered = [each for each in parameters if getattr(each, "_hsdp_gathered", False)]
    if gathered:
        raise RuntimeError(
            f"fully_shard: {name} was made while {len(gathered)} of its {len(parameters)} parameters were gathered (the"
            f" first of shape {tuple(gathered[0].shape)}), and these get no gradients. Make it from model.parameters()"
            " before the first forward, or after model.reshard()"
        )
    meshes = {each._spec.mesh for each in parameters if owner_of(each) is not None}
    if not meshes or all(mesh.size() == 1 for mesh in meshes):
        return True
    others = [
        each for each in parameters if owner_of(each) is None and each.requires_grad and not _settled(each, meshes)
    ]
    wrong = [each for each in others if each.grad is not None]
    if wrong:
        raise RuntimeError(
            f"fully_shard: {len(wrong)} of the {len(parameters)} parameters of {name} are in no sharded module (the"
            f" first of shape {tuple(wrong[0].shape)}), so their gradients are each rank's own and the ranks would"
            " drift apart. Call fully_shard on the model itself, too, after its blocks; if you reduce these gradients"
            " yourself, pass the parameters in ignored_params"
        )
    return not others


def _settled(parameter: torch.Tensor, meshes: set[Any]) -> bool:
    """True for a parameter that is reduced elsewhere: by the user, or as a DTensor over the same ranks."""
    spec = spec_of(parameter)
    return getattr(parameter, "_hsdp_ignored", False) or (spec is not None and spec.mesh in meshes)
