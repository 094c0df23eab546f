"""Optimizers: their parameters, checked before the first step, and their states.

Before the first step: Note [Before an optimizer's first step] in `hp_fsdp.groups.managed_params`.

Note [States that a rank does not have]
    A rank that owns no element of a parameter gets no gradient for it, so its optimizer has no state for it either. A
    sharded state shows this: that rank lists fewer keys. A full one is gathered, which all ranks take part in; so they
    exchange the lists of their states first.

Note [Frozen and unfrozen parameters]
    A sharded state is a template as well: ``torch.distributed.checkpoint.load`` reads only what it lists, and raises
    for what was not saved. So a parameter that trains but has not stepped yet is listed with a state of zeros. The
    states of a frozen one are listed where the optimizer has them; one that has not stepped has none, and nothing here
    tells whether the checkpoint does, so it warns. A complete state needs no template.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hp_fsdp.groups.managed_params import owner_of, refuse_unreduced, spec_of, unreduced
from hp_fsdp.torch.compat import check_optimizer_state
from hp_fsdp.torch.groups.bucket import Bucket
from hp_fsdp.torch.state_dict import fill, sharded_axis
from hp_fsdp.torch.steps.context import hsdp_sync_stream, refuse_lost_gradients
from hp_platform import get_platform
from hp_platform.torch.internals import without_torch_function

_in_order: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_registered: list[Any] = []


def watch_optimizers() -> None:
    """Check optimizers' parameters from now on."""
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    hsdp_sync_stream()
    refuse_lost_gradients(parameter for group in optimizer.param_groups for parameter in group["params"])
    Bucket.optimizer_steps += 1
    if len(args) + len(kwargs) == 1:  # the optimizer itself: else a closure makes the gradients
        _warn_without_gradients(optimizer)
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _in_order.get(optimizer) != count and _check(optimizer):
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if optimizer not in _in_order and any(owner_of(parameter) for parameter in parameters):
            optimizer.register_state_dict_pre_hook(check_optimizer_state)
        _in_order[optimizer] = count


def _warn_without_gradients(optimizer: Optimizer) -> None:
    """Warn where an optimizer steps and none of its sharded parameters has a gradient."""
    count = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return
            count += parameter.requires_grad and owner_of(parameter) is not None and _owns(parameter)
    if count:
        warnings.warn(
            f"{type(optimizer).__name__} steps, but none of its {count} sharded parameters has a gradient, so nothing"
            " is trained. Was backward() called on a loss of this model's outputs, and not under no_grad?",
            stacklevel=3,
        )


def _check(optimizer: Optimizer) -> bool:
    """Raise for parameters that would be trained wrongly; return False if some may yet get gradients.

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


State = dict[str, Any]


def initialize(optimizer: Optimizer) -> None:
    """Make the states of an optimizer that has none, as before its first step.

    A step with gradients of zero, a learning rate of zero and no weight decay makes them; then "step" is set back to
    zero. For torch's Adam and AdamW these are the states of a first step, as for SGD's momentum without dampening.
    Existing gradients stay.
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


def adapted(optimizers: Optimizer | Iterable[Optimizer]) -> list[_States]:
    return [_States(each) for each in ((optimizers,) if isinstance(optimizers, Optimizer) else optimizers)]


class _States:
    """An optimizer of torch as an `OptimizerStates`; it gets its states, if it has none."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.fresh = not optimizer.state
        initialize(optimizer)
        self.optimizer = optimizer
        self.kind = type(optimizer).__name__
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def states(self, names: Sequence[str], *, full: bool) -> dict[str, State]:
        """Return the states; if they are to be gathered, those that any rank has."""
        packed: dict[int, State] = self.optimizer.state_dict()["state"]
        states = {names[at]: dict(state) for at, state in packed.items()}
        if full:
            return _agreed(states, dict(zip(names, self.parameters, strict=True)))
        frozen = [name for name, each in zip(names, self.parameters, strict=True) if not each.requires_grad]
        if self.fresh and frozen:
            warnings.warn(
                f"get_optimizer_state_dict: {self.kind} has not stepped, so this state lists none for its {len(frozen)}"
                f" frozen parameters ({', '.join(frozen[:3])}{', ...' if len(frozen) > 3 else ''}). If a checkpoint has"
                " states for them, from before they were frozen, loading by this template drops them: freeze after"
                " loading, or load with full_state_dict=True or hp_checkpoint.Checkpointer",
                stacklevel=3,
            )
        for at, (name, parameter) in enumerate(zip(names, self.parameters, strict=True)):
            if at not in packed and parameter.requires_grad and _owns(parameter):
                if state := self._zeros(parameter):
                    states[name] = state
        return states

    def _zeros(self, parameter: torch.Tensor) -> State:
        """Return the state of a parameter before its first step, in the form of another one's; {} if it has its own."""
        for other, state in self.optimizer.state.items():
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            if all(value.numel() == 1 or value.shape == other.shape for value in tensors):
                return {
                    key: 0
                    if not isinstance(value, torch.Tensor)
                    # a scalar's state is shaped as "step"
                    else torch.zeros_like(value)
                    if value.shape != other.shape or key == "step"
                    else torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
                    for key, value in state.items()
                    if isinstance(value, (torch.Tensor, int, float))
                }
        return {}

    def groups(self) -> list[tuple[State, list[int]]]:
        """Return hyperparameters and members."""
        packed = self.optimizer.state_dict()["param_groups"]
        return [({key: v for key, v in group.items() if key != "params"}, group["params"]) for group in packed]

    def loaded(self, number: int, name: str, key: str, value: Any) -> Any:
        """Return a value for the optimizer; a tensor that it has already is written in place."""
        parameter = self.parameters[number]
        own = self.optimizer.state[parameter].get(key)
        if not isinstance(value, torch.Tensor):
            if isinstance(own, torch.Tensor) and isinstance(value, (int, float)):
                return own.fill_(value)
            return value
        if not isinstance(own, torch.Tensor):
            if key != "step" and tuple(value.shape) == tuple(parameter.shape):  # a scalar's state is shaped as "step"
                own = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
            else:
                own = torch.zeros_like(value)
        if own.device.type == "cpu" and parameter.device.type != "cpu":
            get_platform().devices.synchronize()  # a swapped state may still be on its way to the host
        fill(f"{name}.{key}", own, value)
        return own

    def load(self, states: Mapping[int, State], groups: Sequence[State], *, strict: bool) -> None:
        """Load states, most of them the optimizer's own tensors, by its own ``load_state_dict``."""
        packed = self.optimizer.state_dict()
        for number, state in states.items():
            if state:
                packed["state"][number] = state
            else:
                packed["state"].pop(number, None)
        for group, values in zip(packed["param_groups"], groups, strict=True):
            group.update({key: _beside(value, group.get(key)) for key, value in values.items()})
        self.optimizer.load_state_dict(packed)


def _owns(parameter: torch.Tensor) -> bool:
    """Tell whether this rank has elements of a parameter."""
    with without_torch_function():
        return parameter.numel() > 0


class _Like:
    """A state in its parameter's layout, of this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _agreed(states: dict[str, State], parameters: Mapping[str, Any]) -> dict[str, State]:
    """Return the states that any rank has, in one order: Note [States that a rank does not have]."""
    lines: dict[Any, list[str]] = {}
    for name, parameter in parameters.items():
        spec, axis = spec_of(parameter), sharded_axis(spec_of(parameter))
        if spec is not None and axis is not None and spec.mesh.size(axis) > 1:
            lines.setdefault(spec.mesh.get_group(axis), []).append(name)
    for group, names in lines.items():
        mine = {name: {key: _described(v) for key, v in states[name].items()} for name in names if name in states}
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
        for name in names:
            all_keys = dict.fromkeys(key for theirs in everyone for key in theirs.get(name, ()))
            if all_keys or any(name in theirs for theirs in everyone):
                own, complete = states.get(name, {}), {}
                for key in all_keys:
                    described = next(theirs[name][key] for theirs in everyone if key in theirs.get(name, ()))
                    complete[key] = own[key] if key in own else _restored(described, parameters[name])
                states[name] = complete
    return states


def _described(value: Any) -> Any:
    if spec_of(value) is not None:
        return _Like(value.dtype)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _restored(described: Any, parameter: Any) -> Any:
    return torch.zeros_like(parameter, dtype=described.dtype) if isinstance(described, _Like) else described


def _beside(value: Any, own: Any) -> Any:
    """Move a hyperparameter, if it is a tensor, to the device of the optimizer's own."""
    return value.to(own.device) if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) else value
