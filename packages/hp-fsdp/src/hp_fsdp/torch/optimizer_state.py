"""Optimizer states by the names of parameters: out of optimizers and into them.

Note [States that a rank does not have]
    A rank that owns no element of a parameter gets no gradient for it, so its optimizer has no state for it either. A
    sharded state says so: that rank lists fewer keys. A full one is gathered, which all ranks take part in; so they
    tell each other first which states there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hp_fsdp.state_options import StateDictOptions, flatten_optimizer_state, unflatten_optimizer_state
from hp_fsdp.torch.state_dict import communication_device, exported, parameter_names
from hp_fsdp.torch.whole import fill, from_rank0, ragged_axis, spec_of
from hp_platform import get_platform

__all__ = ["get_optimizer_state_dict", "set_optimizer_state_dict"]

State = dict[str, Any]


def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], *, options: StateDictOptions | None = None
) -> State:
    """The optimizers' state, by the parameters' names in the unsharded model.

    An optimizer that has not stepped yet gets its states first, of zeros, so that a checkpoint can be loaded into them.

    Example:
        >>> state = get_optimizer_state_dict(model, optimizer)      # AdamW, sharded
        >>> state["state"]["layer.weight"]                          # exp_avg and exp_avg_sq are DTensors as the weight
        {'step': ..., 'exp_avg': ..., 'exp_avg_sq': ...}
        >>> state["param_groups"][0]["params"]
        ['layer.weight', 'layer.bias']

    Args:
        model: whose parameters the optimizers have.
        optimizers: one or several; made after ``fully_shard``.
        options: see `StateDictOptions`. Full, states are gathered one at a time, and every rank has to call it.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [name]}]}``, or a flat dictionary.

    Raises:
        ValueError: an optimizer has a parameter that is not the model's.
    """
    options = StateDictOptions.of(options)
    names = parameter_names(model)
    keep = not (options.full_state_dict and options.cpu_offload) or get_platform().groups.rank() == 0
    result: State = {"state": {}, "param_groups": []}
    for optimizer in _as_tuple(optimizers):
        initialize(optimizer)
        packed = optimizer.state_dict()
        parameters, fqns = _named(optimizer, names)
        states = {fqns[at]: dict(state) for at, state in packed["state"].items()}
        if options.full_state_dict:
            states = _agreed(states, dict(zip(fqns, parameters, strict=True)))
        for name in fqns:
            if name in states:
                result["state"][name] = {key: _export(v, options, keep) for key, v in states[name].items()}
        for group in packed["param_groups"]:
            values = {key: _export(value, options, keep) for key, value in group.items() if key != "params"}
            result["param_groups"].append({**values, "params": [fqns[at] for at in group["params"]]})
    if not keep:
        return {}
    return flatten_optimizer_state(result) if options.flatten_optimizer_state_dict else result


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Loads the optimizers' state in place: whole tensors, of which each rank takes its part, or DTensors.

    Args:
        model: whose parameters the optimizers have.
        optimizers: one or several; the state's parameter groups may be other ones than theirs.
        optim_state_dict: what `get_optimizer_state_dict` gave, nested or flat.
        options: see `StateDictOptions`.

    Raises:
        ValueError: with ``strict``, parameters that the state does not know, or that no optimizer has; a tensor of
            another shape; parameters of one group that were saved with different hyperparameters.
    """
    options = StateDictOptions.of(options)
    names = parameter_names(model)
    optimizers = _as_tuple(optimizers)
    states, groups = unflatten_optimizer_state(optim_state_dict, [name for each in names.values() for name in each])
    entries: dict[Any, Any] = {(name, key): value for name, state in states.items() for key, value in state.items()}
    entries |= groups
    known, values = set(entries), iter(entries.items())
    if options.broadcast_from_rank0:
        known, values = from_rank0(entries, communication_device(model))
    saved = {name for name in known if isinstance(name, str)}
    found = _matched(optimizers, names, saved, options.strict)
    fresh: dict[str, State] = {name: {} for name in found}
    hyper: dict[str, State] = {}
    for entry, value in values:
        if isinstance(entry, str):
            hyper[entry] = value
        elif entry[0] in found:
            optimizer, parameter = found[entry[0]]
            fresh[entry[0]][entry[1]] = _loaded(entry, value, optimizer.state[parameter], parameter)
    for optimizer in optimizers:
        _load(optimizer, {id(found[name][1]): name for name in found}, fresh, hyper)


def initialize(optimizer: Optimizer) -> None:
    """Makes the states of an optimizer that has none, as before its first step.

    A step with gradients of zero, a learning rate of zero and no weight decay makes them; then "step" is set back to
    zero. Of torch's optimizers, Adam's and AdamW's are then what their first step finds, and SGD's momentum with no
    dampening. Gradients that there are stay.
    """
    if optimizer.state:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    before = [{key: group[key] for key in ("lr", "weight_decay") if key in group} for group in optimizer.param_groups]
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update({k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0.0 for k, v in values.items()})
    try:
        optimizer.step()
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif step is not None:
            state["step"] = 0


def _as_tuple(optimizers: Optimizer | Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


def _named(optimizer: Optimizer, names: Mapping[int, Sequence[str]]) -> tuple[list[Any], list[str]]:
    """The optimizer's parameters in their order, and the first name of each."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = [parameter for parameter in parameters if id(parameter) not in names]
    if strange:
        raise ValueError(
            f"optimizer state: {len(strange)} of {len(parameters)} parameters of {type(optimizer).__name__} are not the"
            f" model's, the first of shape {tuple(strange[0].shape)}. fully_shard makes new parameters: create the"
            " optimizer after it"
        )
    return parameters, [names[id(parameter)][0] for parameter in parameters]


def _export(value: Any, options: StateDictOptions, keep: bool) -> Any:
    if isinstance(value, dict):
        return {key: _export(inside, options, keep) for key, inside in value.items()}
    return exported(value, options, keep=keep)


class _Like:
    """A state in its parameter's layout, of this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _agreed(states: dict[str, State], parameters: Mapping[str, Any]) -> dict[str, State]:
    """The states that any rank has, in one order: Note [States that a rank does not have]."""
    lines: dict[Any, list[str]] = {}
    for name, parameter in parameters.items():
        spec, axis = spec_of(parameter), ragged_axis(spec_of(parameter))
        if spec is not None and axis is not None and spec.mesh.size(axis) > 1:
            lines.setdefault(spec.mesh.get_group(axis), []).append(name)
    for group, names in lines.items():
        mine = {name: {key: _told(v) for key, v in states[name].items()} for name in names if name in states}
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
        for name in names:
            all_keys = dict.fromkeys(key for theirs in everyone for key in theirs.get(name, ()))
            if all_keys or any(name in theirs for theirs in everyone):
                own, made = states.get(name, {}), {}
                for key in all_keys:
                    told = next(theirs[name][key] for theirs in everyone if key in theirs.get(name, ()))
                    made[key] = own[key] if key in own else _made(told, parameters[name])
                states[name] = made
    return states


def _told(value: Any) -> Any:
    if spec_of(value) is not None:
        return _Like(value.dtype)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _made(told: Any, parameter: Any) -> Any:
    return torch.zeros_like(parameter, dtype=told.dtype) if isinstance(told, _Like) else told


def _matched(
    optimizers: Sequence[Optimizer], names: Mapping[int, Sequence[str]], saved: set[str], strict: bool
) -> dict[str, tuple[Optimizer, Any]]:
    """The optimizer and the parameter of each saved name; of a tied parameter's names, the saved one."""
    found: dict[str, tuple[Optimizer, Any]] = {}
    missing: list[str] = []
    for optimizer in optimizers:
        initialize(optimizer)
        for parameter in _named(optimizer, names)[0]:
            name = next((name for name in names[id(parameter)] if name in saved), None)
            if name is None:
                missing.append(names[id(parameter)][0])
            else:
                found[name] = (optimizer, parameter)
    unknown = sorted(saved - set(found))
    if strict and (missing or unknown):
        raise ValueError(
            f"set_optimizer_state_dict: {len(missing)} parameters of the optimizers are missing in the state"
            f" ({', '.join(missing[:5])}), {len(unknown)} in it are of no optimizer ({', '.join(unknown[:5])}). Use"
            " strict=False to load the rest"
        )
    return found


def _loaded(entry: tuple[str, str], value: Any, state: State, parameter: Any) -> Any:
    """The value as the optimizer is to hold it; a tensor that it has already is written in place."""
    own = state.get(entry[1])
    if not isinstance(value, torch.Tensor):
        if isinstance(own, torch.Tensor) and isinstance(value, (int, float)):
            return own.fill_(value)
        return value
    if not isinstance(own, torch.Tensor):
        if entry[1] != "step" and tuple(value.shape) == tuple(parameter.shape):  # a scalar's state is shaped as "step"
            own = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
        else:
            own = torch.zeros_like(value)
    fill(f"{entry[0]}.{entry[1]}", own, value)
    return own


def _load(optimizer: Optimizer, names: Mapping[int, str], fresh: dict[str, State], hyper: dict[str, State]) -> None:
    """Hands the optimizer its states, which are its own tensors mostly, through its own ``load_state_dict``."""
    packed = optimizer.state_dict()
    at = 0
    for group, own in zip(packed["param_groups"], optimizer.param_groups, strict=True):
        values: State | None = None
        for parameter in own["params"]:
            name = names.get(id(parameter))
            if name is not None:
                if values is not None and not _same(values, hyper[name]):
                    raise ValueError(
                        f"set_optimizer_state_dict: {name!r} was saved with {hyper[name]}, others of its group with"
                        f" {values}. Group the parameters as they were saved"
                    )
                values = hyper[name]
                if fresh[name]:
                    packed["state"][at] = fresh[name]
                else:
                    packed["state"].pop(at, None)
            at += 1
        group.update({key: _beside(value, group.get(key)) for key, value in (values or {}).items()})
    optimizer.load_state_dict(packed)


def _beside(value: Any, own: Any) -> Any:
    """A hyperparameter, where it is a tensor on the device of the optimizer's own."""
    return value.to(own.device) if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) else value


def _same(a: State, b: State) -> bool:
    return a is b or (a.keys() == b.keys() and all(bool(torch.as_tensor(a[k] == b[k]).all()) for k in a))
