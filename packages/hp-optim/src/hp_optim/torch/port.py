"""Optimizers of PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hp_optim.torch.adamw import AdamW
from hp_optim.torch.muon import Muon
from hp_optim.torch.states.on_host import swap as swap

State = dict[str, Any]


def named_parameters(model: nn.Module | Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """List the parameters with their names, each once; ``model`` may be such a list."""
    return list(model.named_parameters()) if isinstance(model, nn.Module) else list(model)


def trains(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter gets gradients."""
    return parameter.requires_grad


def make(kind: str, groups: list[State], options: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer of groups whose params are pairs of a name and a parameter."""
    return {"adamw": AdamW, "muon": Muon}[kind](groups, **options)


def groups(optimizer: Optimizer) -> list[State]:
    """List the groups, the optimizer's own dictionaries."""
    return optimizer.param_groups


def get_lr(group: State) -> float:
    """Return a group's learning rate."""
    return float(group["lr"])


def set_lr(group: State, value: float) -> None:
    """Set a group's learning rate; one that is a tensor is written."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


def check_gradients(gradients: object) -> None:
    """Raise for gradients that are passed.

    Raises:
        TypeError: see above.
    """
    if gradients is not None:
        raise TypeError("ChainedOptimizer.step: on PyTorch the gradients are the parameters' .grad; call step()")


def step(optimizer: Optimizer, gradients: Sequence[Any] | None) -> None:
    """Update the parameters with their gradients."""
    optimizer.step()


def zero_grad(optimizer: Optimizer, set_to_none: bool) -> None:
    """Drop the gradients."""
    optimizer.zero_grad(set_to_none=set_to_none)


def states(optimizer: Optimizer) -> list[State]:
    """List the state of each parameter, in the order of the groups."""
    return [optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"]]


def load(optimizer: Optimizer, states: Sequence[State], groups: Sequence[State]) -> None:
    """Load the state of each parameter and the hyperparameters of each group."""
    packed = optimizer.state_dict()
    packed["state"] = {number: dict(state) for number, state in enumerate(states) if state}
    for group, values in zip(packed["param_groups"], groups, strict=True):
        group.update(values)
    optimizer.load_state_dict(packed)
