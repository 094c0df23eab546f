"""The hook of torch's optimizers by which their parameters are looked at: Note [Before an optimizer's first step]."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hp_fsdp.finding import owner_of
from hp_fsdp.optimizers import refuse_unreduced, unreduced
from hp_fsdp.torch.context import hsdp_sync_stream
from hp_fsdp.torch.other_libraries import check_optimizer_state

__all__ = ["watch_optimizers"]

_in_order: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_registered: list[Any] = []


def watch_optimizers() -> None:
    """Looks at what optimizers are given from now on."""
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    hsdp_sync_stream()
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _in_order.get(optimizer) != count and _check(optimizer):
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if optimizer not in _in_order and any(owner_of(parameter) for parameter in parameters):
            optimizer.register_state_dict_pre_hook(check_optimizer_state)
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
    others = unreduced(parameters)
    wrong = [each for each in others if each.grad is not None]
    if wrong:
        refuse_unreduced(wrong, len(parameters), name)
    return not others
