"""Optimizers: their parameters, checked before the first step, and their states.

Before the first step: Note [Before an optimizer's first step] in `hp_fsdp.groups.managed_params`.

Note [States that were made before]
    An optimizer of MindSpore makes its states in the parameters' shapes when it is made. Before `fully_shard` or tensor
    parallel styles, or before a forward that new parameters join, these are the full shapes. Each rank keeps its part.

Note [What an optimizer holds]
    An optimizer is a Cell. What it keeps for its parameters are tuples as long as that of its parameters
    (``exp_avg``, ``moments``), and Parameters of one element that all of them share (``state_step``, ``beta1_power``,
    ``global_step``): those are given for each parameter, as torch's ``step`` is, so that parameters may be grouped in
    another way. Hyperparameters are values that may change after the optimizer was made: all of a parameter group of
    ``mindspore.experimental.optim`` and ``mindspore.mint.optim``; of ``mindspore.nn``'s optimizers the learning rate
    and the momentum that are Parameters, for the rest is compiled into them (a schedule goes by ``global_step``).
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.experimental.optim.optimizer import Optimizer

from hp_dtensor import RaggedShard, Replicate
from hp_dtensor.mindspore.extend import (
    DTensor,
    distribute_tensor,
    local_mode,
    local_view,
    set_local,
    states_by_name,
    wrap,
)
from hp_fsdp.groups.managed_params import refuse_unreduced, spec_of, unreduced
from hp_fsdp.mindspore.groups.parameter import copy_range
from hp_fsdp.mindspore.state_dict import fill, write

_in_order: weakref.WeakKeyDictionary[nn.Cell, list[Any]] = weakref.WeakKeyDictionary()


def watch_optimizers() -> None:
    """Check optimizers' parameters from now on; MindSpore has no hook for it, so their calls are wrapped once."""
    for kind in (nn.Optimizer, Optimizer):
        if not hasattr(kind.__call__, "_looks_at_parameters"):
            kind.__call__ = _looking(kind.__call__)


def _looking(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def looked(self: Any, *args: Any, **kwargs: Any) -> Any:
        specs = [spec_of(parameter) for parameter in self.parameters]
        if _in_order.get(self) != specs:
            _check(self)
            _in_order[self] = specs
        return call(self, *args, **kwargs)

    looked._looks_at_parameters = True  # type: ignore[attr-defined]
    return looked


def _check(optimizer: Any) -> None:
    """Shard states that were made before their parameters were sharded.

    Raises:
        RuntimeError: the optimizer has parameters that no group has beside sharded ones.
        ValueError: states are shaped neither as a parameter was before nor as it is now.
    """
    wrong = unreduced(optimizer.parameters)
    if wrong:
        refuse_unreduced(wrong, len(optimizer.parameters), type(optimizer).__name__)
    with local_mode():
        for parameter, state in _states(optimizer):
            if isinstance(parameter, DTensor) and tuple(state.shape) != tuple(parameter.shape):
                set_local(state, _part_of(state, parameter, type(optimizer).__name__))


def _part_of(state: Parameter, parameter: Any, name: str) -> Tensor:
    """Return the rank's part of a state."""
    spec, value = parameter._spec, local_view(state)
    full = tuple(value.shape) == tuple(spec.shape)
    others = [Replicate() if isinstance(p, RaggedShard) else p for p in spec.placements]
    if full and not all(placement.is_replicate() for placement in others):
        value = local_view(distribute_tensor(value.value(), spec.mesh, others, src_data_rank=None))
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, RaggedShard) and value.size == sum(placement.units):
            start = sum(placement.units[: spec.mesh.get_local_rank(axis)])
            value = copy_range(value, start, start + placement.units[spec.mesh.get_local_rank(axis)])
    if value.size != local_view(parameter).size:
        raise ValueError(
            f"fully_shard: {name} has states of shape {tuple(state.shape)} for parameter {parameter.name!r}, of which"
            f" this rank has {local_view(parameter).size} of {math.prod(spec.shape)} elements. Make the optimizer after"
            " the parameter was sharded: after a forward of the Cell that it joined, where it is a copy"
        )
    return value


def _states(optimizer: Any) -> Iterator[tuple[Any, Parameter]]:
    """Yield each parameter with each of its states."""
    for states in states_by_name(optimizer).values():
        yield from zip(optimizer.parameters, states)
    for group in getattr(optimizer, "param_groups", ()):
        if isinstance(group.get("max_exp_avg_sq"), (list, tuple)):
            yield from zip(group["params"], group["max_exp_avg_sq"])


State = dict[str, Any]
_LARGEST = "max_exp_avg_sq"
"""Kept by some optimizers whether they use it (``amsgrad``) or not, by others in the parameter groups."""


def adapted(optimizers: nn.Cell | Iterable[nn.Cell]) -> list[States]:
    return [States(each) for each in ((optimizers,) if isinstance(optimizers, nn.Cell) else optimizers)]


class States:
    """An optimizer of MindSpore as an `OptimizerStates`.

    Args:
        optimizer: of ``mindspore.experimental.optim``, ``mindspore.mint.optim`` or ``mindspore.nn``.

    Attributes:
        slots: for each parameter its states by their names.
        shared: the states that all parameters share.
        rates: for each parameter what holds its learning rate, of ``mindspore.nn``'s optimizers.

    Raises:
        TypeError: it is none.
        ValueError: a state is of another shape than its parameter.
    """

    def __init__(self, optimizer: Any) -> None:
        if not isinstance(getattr(optimizer, "parameters", None), ParameterTuple):
            raise TypeError(
                f"optimizer state: expected an optimizer of mindspore.experimental.optim, mindspore.mint.optim or"
                f" mindspore.nn, got {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self.kind = type(optimizer).__name__
        self.parameters: list[Any] = list(optimizer.parameters)
        self.slots: list[dict[str, Any]] = [{} for _ in self.parameters]
        for key, slots in vars(optimizer).items():
            fits = isinstance(slots, ParameterTuple) and len(slots) == len(self.parameters)
            if fits and key != "learning_rate" and slots[0] is not self.parameters[0]:
                self._add(key, range(len(slots)), slots)
        for group, members in self._own_groups():
            if _LARGEST in group:
                self._add(_LARGEST, members, group[_LARGEST])
        rate: Any = getattr(optimizer, "learning_rate", None)
        self.rates = list(rate) if isinstance(rate, ParameterTuple) else [rate] * len(self.parameters)
        self.momentum: Any = getattr(optimizer, "momentum", None)
        taken = {id(each) for each in (*self.parameters, *self.rates, self.momentum)}
        taken |= {id(slot) for slots in self.slots for slot in slots.values()}
        self.shared = {name: own for name, own in optimizer._params.items() if id(own) not in taken}

    def states(self, names: Sequence[str], *, full: bool) -> dict[str, State]:
        """Return the states; every rank has all."""
        shared = {key: Tensor(value.asnumpy()) for key, value in self.shared.items()}
        result: dict[str, State] = {}
        for number, (name, parameter) in enumerate(zip(names, self.parameters)):
            spec = spec_of(parameter)
            result[name] = {}
            for key in self._keys(number):
                local = local_view(self.slots[number][key])
                result[name][key] = local if spec is None else wrap(local, spec)
            result[name] |= shared
        return result

    def groups(self) -> list[tuple[State, Sequence[int]]]:
        """Return hyperparameters and members."""
        own = self._own_groups()
        if own:
            left_out = ("params", _LARGEST)
            return [({k: _plain(v) for k, v in group.items() if k not in left_out}, at) for group, at in own]
        members: dict[int, list[int]] = {}
        for number, rate in enumerate(self.rates):
            members.setdefault(id(rate), []).append(number)
        result = []
        for numbers in members.values():
            hyper = {"learning_rate": self.rates[numbers[0]], "momentum": self.momentum}
            result.append(({key: _plain(own) for key, own in hyper.items() if isinstance(own, Parameter)}, numbers))
        return result

    def loaded(self, number: int, name: str, key: str, value: Any) -> Any:
        """Write a parameter's own state; return a state that all parameters share."""
        slot = self.slots[number].get(key)
        if slot is None:
            return value
        fill(f"{name}.{key}", slot, value, self.parameters[number])
        return None

    def load(self, states: Mapping[int, State], groups: Sequence[State], *, strict: bool) -> None:
        """Set hyperparameters and the states that all parameters share."""
        own = self._own_groups()
        for at, (values, (_, members)) in enumerate(zip(groups, self.groups())):
            hyper = own[at][0] if own else {"learning_rate": self.rates[members[0]], "momentum": self.momentum}
            for key, value in values.items():
                if isinstance(hyper.get(key), Parameter):
                    write(hyper[key], Tensor(value, hyper[key].dtype))
                elif own:
                    hyper[key] = tuple(value) if isinstance(value, list) else value
        for number, state in states.items():
            keys = {*self._keys(number), *self.shared}
            missing, unknown = sorted(keys - set(state)), sorted(set(state) - keys)
            if strict and (missing or unknown):
                raise ValueError(
                    f"set_optimizer_state_dict: parameter {self.parameters[number].name!r} of {self.kind} misses the"
                    f" states {missing}, and has {unknown}, which are not known. Load into the optimizer that was"
                    " saved, or use strict=False to load the rest"
                )
        for key, shared in self.shared.items():
            arrays = [_array(state[key]) for state in states.values() if key in state]
            if any(not np.array_equal(each, arrays[0]) for each in arrays):
                raise ValueError(
                    f"set_optimizer_state_dict: parameters of one {self.kind} were saved with different {key}, from"
                    f" {min(each.item() for each in arrays)} to {max(each.item() for each in arrays)}. Make"
                    " an optimizer for each of them, as they were saved"
                )
            if arrays:
                value = arrays[0].astype(shared.asnumpy().dtype).reshape(tuple(shared.shape))
                write(shared, Tensor(value))

    def _add(self, key: str, numbers: Sequence[int], slots: Sequence[Any]) -> None:
        for number, slot in zip(numbers, slots):
            parameter = self.parameters[number]
            if _local_shape(slot) != _local_shape(parameter):
                raise ValueError(
                    f"optimizer state: {key} of {parameter.name!r} has shape {_local_shape(slot)} on this rank, the"
                    f" parameter's part {_local_shape(parameter)}: create the optimizer after fully_shard. One whose"
                    " states are not shaped as their parameters is not supported"
                )
            self.slots[number][key] = slot

    def _keys(self, number: int) -> list[str]:
        """Return the names of a parameter's own states that are in use."""
        group = next((group for group, members in self._own_groups() if number in members), {})
        return [key for key in self.slots[number] if key != _LARGEST or group.get("amsgrad", True)]

    def _own_groups(self) -> list[tuple[State, range]]:
        """Return the optimizer's own parameter groups and their members' numbers; ``mindspore.nn``'s have none."""
        groups, end = [], 0
        for group in getattr(self.optimizer, "param_groups", ()):
            groups.append((group, range(end, end + len(group["params"]))))
            end += len(group["params"])
        return groups


def _local_shape(tensor: Any) -> tuple[int, ...]:
    return tensor.local_shape if isinstance(tensor, DTensor) else tuple(tensor.shape)


def _plain(value: Any) -> Any:
    """Convert a hyperparameter to a number."""
    return value.asnumpy().item() if isinstance(value, Tensor) else value


def _array(value: Any) -> np.ndarray:
    return np.asarray(value.asnumpy() if isinstance(value, Tensor) else value)
