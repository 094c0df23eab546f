"""States that come from outside: loaded, set by a program, or left from when a parameter had another shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hp_dtensor.torch.extend import DTensor, refuse_foreign

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


def facts_of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Return what a state of a tensor is laid out for."""
    return tensor.shape, tensor.dtype, tensor.device


def told(facts: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    """Describe what `facts_of` returns."""
    shape, dtype, device = facts
    return f"{dtype} of shape {tuple(shape)} on {device}"
