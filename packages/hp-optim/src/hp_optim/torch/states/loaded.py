"""States and groups that programs load, set, copy or replace, or that are left from when a parameter had another shape.

Note [Roster]
    Programs write into ``param_groups`` and ``state``: new parameters in a group's list, another dictionary in place of
    a group, states that are dropped or replaced. An optimizer that reads both at each step sees it. Ours keep memory
    and plans from step to step, for the objects that there were, so each step begins by comparing these, by identity:
    another parameter may have equal values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch

from hp_dtensor.torch.extend import DTensor, refuse_foreign
from hp_platform import get_platform

INTO_ANY_LAYOUT = "hp_fsdp.set_optimizer_state_dict loads what get_optimizer_state_dict saved into any layout"


class Moved(Exception):
    """A parameter is not of the shape, dtype or device that its states were laid out for."""


def check_state(caller: str, name: str, parameter: torch.Tensor, key: str, value: Any) -> None:
    """Raise for a state that is not laid out as its parameter, which copying would spread over it or mix up.

    Args:
        caller: the optimizer, for the error.
        name: of the parameter.
        parameter: plain, or a DTensor, which counts as its local tensor here.
        key: of the state.
        value: the state; None is none.

    Raises:
        ValueError: it has another shape, or another layout.
        TypeError: it is no tensor, or a DTensor of torch's own.
    """
    if value is None:
        return
    what = f"{caller}: state {key!r} of {name!r}"
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(value).__name__}")
    refuse_foreign(value, what)
    if value.shape != parameter.shape:
        raise ValueError(
            f"{what} has shape {tuple(value.shape)}, and the parameter {tuple(parameter.shape)}. Load the state of the"
            f" same model; delete optimizer.state[parameter] to begin anew. {INTO_ANY_LAYOUT}"
        )
    if isinstance(value, DTensor):
        mine, theirs = getattr(parameter, "_spec", None), value._spec
        if mine is None:
            if not theirs.replicated:
                raise ValueError(
                    f"{what} is placed {theirs.placements}, and the parameter is a plain tensor. {INTO_ANY_LAYOUT}"
                )
        elif (mine.mesh, mine.placements) != (theirs.mesh, theirs.placements):
            raise ValueError(
                f"{what} is placed {theirs.placements} on {theirs.mesh}, and the parameter {mine.placements} on"
                f" {mine.mesh}. {INTO_ANY_LAYOUT}"
            )


def value_for(view: torch.Tensor, value: Any, flat: torch.Tensor) -> torch.Tensor | None:
    """Return what a view is to hold, safe to be copied after the views beside it were written.

    Args:
        view: a parameter's part of a state's memory.
        value: of the state; None is none.
        flat: the memory.
    """
    if value is None or value is view:
        return value
    return value.clone() if value.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() else value


def counters(
    caller: str, names: Sequence[str], states: Iterable[Mapping[str, Any]], like: torch.Tensor
) -> torch.Tensor:
    """Return how many steps states are from, as one tensor.

    Args:
        caller: the optimizer, for the error.
        names: of the parameters.
        states: of the parameters; without "step" they are new.
        like: of its dtype and device.

    Raises:
        ValueError: a counter of several elements.
    """
    counts = []
    for name, state in zip(names, states):
        count = torch.as_tensor(state.get("step", 0.0), dtype=like.dtype, device=like.device)
        if count.numel() != 1:
            raise ValueError(f"{caller}: state 'step' of {name!r} must be one number, got shape {tuple(count.shape)}")
        counts.append(count.reshape(()))
    return torch.stack(counts)


def begin_anew(caller: str, name: str, parameter: torch.Tensor, state: dict[str, Any], keys: Iterable[str]) -> None:
    """Drop states of a parameter that has got another shape, if they are those from before the first step.

    Args:
        caller: the optimizer, for the error.
        name: of the parameter.
        parameter: as it is now.
        state: of the parameter.
        keys: of the states that have its shape.

    Raises:
        RuntimeError: the states are of steps with the shape that it had.
    """
    values = [state[key] for key in keys if isinstance(state.get(key), torch.Tensor)]
    different = [tuple(value.shape) for value in values if value.shape != parameter.shape]
    if not different:
        return
    if float(state["step"]) if "step" in state else any(bool(value.any()) for value in values):
        raise RuntimeError(
            f"{caller}: parameter {name!r} has shape {tuple(parameter.shape)}, and its states have {different[0]}, from"
            " the steps before. Set states of the new shape, too, or delete optimizer.state[parameter] to begin anew"
        )
    state.clear()


def has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has memory, see `hp_platform.devices`."""
    return get_platform().devices.has_memory(tensor)


def facts_of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Return what a state of a tensor is laid out for."""
    return tensor.shape, tensor.dtype, tensor.device


def told(facts: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    """Describe what `facts_of` returns."""
    shape, dtype, device = facts
    return f"{dtype} of shape {tuple(shape)} on {device}"


def compact(state: Mapping[Any, dict[str, Any]]) -> defaultdict[Any, dict[str, Any]]:
    """Return states with memory of their own: pickle would write all of a buffer for each view of it.

    Args:
        state: an optimizer's.
    """
    with torch.no_grad():
        return defaultdict(dict, {key: dict(zip(own, map(_own, own.values()))) for key, own in state.items()})


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


_NOTHING: Mapping[Any, Any] = {}


class Roster:
    """The groups, parameters and states of an optimizer at one time; see Note [Roster].

    Args:
        groups: its ``param_groups``.
        state: by parameters.

    Attributes:
        groups: the dictionaries.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]] = (), state: Mapping[Any, Any] = _NOTHING) -> None:
        self.groups = list(groups)
        self._parameters = [list(group["params"]) for group in groups]
        self._keys, self._states = list(state), list(state.values())

    def holds(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> bool:
        """Tell whether groups, parameters and states are those of this roster, in its order.

        Args:
            groups: as they are now.
            state: as it is now.
        """
        return (
            len(groups) == len(self.groups)
            and all(map(is_, groups, self.groups))
            and all(map(self.has, range(len(groups)), groups))
            and len(state) == len(self._keys)
            and all(map(is_, state, self._keys))
            and all(map(is_, state.values(), self._states))
        )

    def has(self, number: int, group: Mapping[str, Any]) -> bool:
        """Tell whether a group has the parameters that the group of this number had.

        Args:
            number: of the group.
            group: as it is now.
        """
        if number >= len(self._parameters):
            return False
        now, before = group["params"], self._parameters[number]
        return len(now) == len(before) and all(map(is_, now, before))
