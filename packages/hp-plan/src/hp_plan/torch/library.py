"""What transformers' models do besides forward, under a plan: generating text, and saving a checkpoint."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from hp_dtensor import DTensor, implicit_replication
from hp_platform import get_platform

__all__ = ["generate_inside", "save_whole"]


def generate_inside(model: nn.Module) -> None:
    """Takes plain tensors as replicated in all of `generate`: beams reorder a cache of DTensors between forwards."""
    if not callable(getattr(model, "generate", None)):
        return
    original: Any = model.generate

    @functools.wraps(original)
    def generate(*args: Any, **options: Any) -> Any:
        with implicit_replication():
            return original(*args, **options)

    model.generate = generate  # type: ignore[assignment]


def save_whole(model: nn.Module) -> None:
    """Makes `save_pretrained` write whole weights: every rank calls it, they gather, and rank 0 writes."""
    if not callable(getattr(model, "save_pretrained", None)):
        return
    original: Any = model.save_pretrained

    @functools.wraps(original)
    def save_pretrained(save_directory: Any, *args: Any, **options: Any) -> None:
        given = options.pop("state_dict", None)
        whole = _gathered(model.state_dict() if given is None else given)
        if get_platform().groups.rank() == 0:
            original(save_directory, *args, state_dict=whole, **options)
        done = torch.zeros(1, device=get_platform().devices.current_device())
        get_platform().collectives.all_reduce(done, "sum", group=_everyone())  # Others may read what was written.

    model.save_pretrained = save_pretrained  # type: ignore[assignment]


def _everyone() -> Any:
    groups = get_platform().groups
    return groups.new_group(range(groups.size()))


def _gathered(state: dict[str, Any]) -> dict[str, Any]:
    """The state with DTensors whole; what is one tensor under several names stays one, as savers expect."""
    made: dict[int, torch.Tensor] = {}
    for value in state.values():
        if isinstance(value, DTensor) and _identity(value) not in made:
            made[_identity(value)] = value.full_tensor().detach().cpu().clone()
    return {name: made[_identity(value)] if isinstance(value, DTensor) else value for name, value in state.items()}


def _identity(value: torch.Tensor) -> int:
    """The memory of a part; an empty one has none, so the object."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.data_ptr() or id(value)
