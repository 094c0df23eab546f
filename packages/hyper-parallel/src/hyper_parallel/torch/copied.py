"""The state of a training as a copy has it: a rank's own tensors, as they are, and what else the next step rests on.

A copy is restored on the same rank of the same mesh, so nothing of it is described by global shapes, and states keep
the form that their optimizer gives them, as AdamW8bit's codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hp_checkpoint.torch.extend import DTYPES
from hp_dtensor.torch.extend import local_view, wrap
from hp_fsdp.torch.extend import drop_reductions
from hp_optim import ChainedOptimizer

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return what a step changes: trained parameters, buffers, and the optimizer's states and options.

    Args:
        model: under a plan; the tensors are its own.
        optimizer: of its parameters.

    Raises:
        TypeError: a state whose layout is not its parameter's.
    """
    return {
        "parameters": {name: local_view(each) for name, each in model.named_parameters() if each.requires_grad},
        "buffers": {name: local_view(each) for name, each in model.named_buffers()},
        "optimizers": [_optimizer_state(each) for each in _each(optimizer)],
        "iteration": getattr(optimizer, "iteration", None),
    }


def fill(model: Any, optimizer: Any, state: Mapping[str, Any]) -> None:
    """Give a model and an optimizer that were made anew what `state_of` returned of others, on the same rank.

    Args:
        model: under the same plan.
        optimizer: of its parameters, which has taken no step.
        state: with arrays of bytes in the places of tensors.
    """
    buffers = dict(model.named_buffers())
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for kept, own in ((state["parameters"], trained), (state["buffers"], buffers)):
            if kept.keys() != own.keys():
                raise ValueError(f"the copy has other tensors than the model, as {min(kept.keys() ^ own.keys())!r}")
            for name, tensor in own.items():
                local = local_view(tensor)
                local.copy_(_tensor(kept[name], local.dtype, local.shape, local.device))
    for each, kept in zip(_each(optimizer), state["optimizers"], strict=True):
        _fill_optimizer(each, kept)
    if state["iteration"] is not None:
        optimizer.iteration = state["iteration"]


def forget() -> None:
    """Let go of what is under way of models whose ranks are lost."""
    drop_reductions()


def _each(optimizer: Any) -> list[Any]:
    return list(optimizer.optimizers.values()) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _optimizer_state(optimizer: Any) -> dict[str, Any]:
    optimizer.state_dict()  # what swaps states waits here for its copies
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"options": options, "states": [_states(each, optimizer) for each in _parameters(optimizer)]}


def _states(parameter: torch.Tensor, optimizer: Any) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, torch.Tensor):
            kept[key] = value
            continue
        spec, local = getattr(value, "_spec", None), local_view(value)
        if spec is not None and spec != parameter._spec:  # type: ignore[attr-defined]
            raise TypeError(f"a copy of {type(optimizer).__name__}'s {key!r}: its layout is not its parameter's")
        told = [_NAMES[local.dtype], list(local.shape), local.device.type, spec is not None]
        kept[key] = {"of": told, "bytes": local}
    return kept


def _fill_optimizer(optimizer: Any, kept: Mapping[str, Any]) -> None:
    for group, options in zip(optimizer.param_groups, kept["options"], strict=True):
        group.update(options)
    for parameter, states in zip(_parameters(optimizer), kept["states"], strict=True):
        for key, value in states.items():
            optimizer.state[parameter][key] = _state(value, parameter) if isinstance(value, dict) else value


def _state(value: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    dtype, shape, device, as_parameter = value["of"]
    on = torch.device(device) if device == "cpu" else parameter.device
    tensor = _tensor(value["bytes"], DTYPES[dtype], shape, on)
    return wrap(tensor, parameter._spec) if as_parameter else tensor  # type: ignore[attr-defined]


def _parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _tensor(content: np.ndarray, dtype: torch.dtype, shape: Any, device: torch.device) -> torch.Tensor:
    """Return a new tensor of a copy's bytes."""
    flat = torch.from_numpy(np.array(content)) if len(content) else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(tuple(shape)).to(device)
