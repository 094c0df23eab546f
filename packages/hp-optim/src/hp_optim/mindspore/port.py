"""Optimizers of MindSpore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspore import Parameter, Tensor, nn, ops

from hp_dtensor import SkipDTensorDispatch
from hp_dtensor.mindspore.extend import local_view, set_local, states_by_name
from hp_optim.mindspore.adamw import AdamW
from hp_optim.mindspore.muon import Muon

State = dict[str, Any]
_NOT_SAVED = ("params", "max_exp_avg_sq")


def named_parameters(model: Any) -> list[tuple[str, Parameter]]:
    named: dict[int, tuple[str, Parameter]] = {}
    for name, parameter in model.parameters_and_names() if isinstance(model, nn.Cell) else model:
        named.setdefault(id(parameter), (name, parameter))
    return list(named.values())


CLASSES = {"adamw": AdamW, "muon": Muon}


def set_lr(group: State, value: float) -> None:
    if isinstance(group["lr"], Tensor):
        ops.assign(group["lr"], Tensor(value, group["lr"].dtype))
    else:
        group["lr"] = value


def check_gradients(gradients: object) -> None:
    """Raise for gradients that are not passed by the parameters' names.

    Raises:
        TypeError: see above.
    """
    if gradients is None:
        raise TypeError(
            "ChainedOptimizer.step: on MindSpore parameters have no gradients of their own; pass them by the names of"
            " the parameters"
        )
    if not isinstance(gradients, Mapping):
        raise TypeError(
            f"ChainedOptimizer.step takes gradients by the parameters' names, got a {type(gradients).__name__}:"
            " pass dict(zip(names, gradients)), with the names in the order of the gradients"
        )


def step(optimizer: Any, gradients: Sequence[Any]) -> None:
    """Update the parameters with these gradients.

    Raises:
        ValueError: one is missing.
    """
    missing = [each.name for each, gradient in zip(optimizer.parameters, gradients) if gradient is None]
    if missing:
        raise ValueError(f"ChainedOptimizer.step: no gradients for {', '.join(missing[:5])}")
    optimizer(tuple(gradients))


def zero_grad(optimizer: Any, set_to_none: bool) -> None:
    """Do nothing: gradients are returned, not accumulated."""


def swap(optimizers: Sequence[Any], config: Any, link: Any) -> None:
    """Refuse to.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "swap_optimizer is not supported on MindSpore: its optimizers update all Parameters in one call, and a"
        " Parameter that is a state can't move between the host and the device. Shard the states instead, by"
        " hp_fsdp.fully_shard"
    )


def states(optimizer: Any) -> list[State]:
    """List the state of each parameter, in the order of the groups; what all share is in each."""
    shared = {key: value for key, value in vars(optimizer).get("_params", {}).items() if key == "state_step"}
    slots = states_by_name(optimizer)
    numbers = range(len(optimizer.parameters))
    return [{**{key: kept[number] for key, kept in slots.items()}, **shared} for number in numbers]


def load(optimizer: Any, states: Sequence[State], groups: Sequence[State]) -> None:
    slots = states_by_name(optimizer)
    for number, state in enumerate(states):
        for key, value in state.items():
            if key in slots:
                set_local(slots[key][number], local_view(value).copy())
            elif number == 0:
                with SkipDTensorDispatch():
                    ops.assign(getattr(optimizer, key), value)
    for own, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            if key == "lr":
                set_lr(own, float(value))
            elif key not in _NOT_SAVED:
                own[key] = value
