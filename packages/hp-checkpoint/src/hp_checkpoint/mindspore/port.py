"""Tensors, models and optimizers of MindSpore, whose states are named and shaped as those of PyTorch.

Note [States of both frameworks]
    Where both frameworks' optimizers keep the same value, it has torch's name and dtype in a checkpoint: ``exp_avg``,
    ``exp_avg_sq``, ``max_exp_avg_sq``, ``momentum_buffer``, and ``step``, a float32 scalar for each parameter.
    MindSpore counts the steps of all parameters once, so they have to be equal. Its SGD has ``accum``, which is torch's
    ``momentum_buffer`` from the first step on, and ``stat``, which says whether that was.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental.optim.optimizer import Optimizer

from hp_checkpoint.layout.tensors import move
from hp_dtensor import SkipDTensorDispatch
from hp_dtensor.mindspore.extend import local_mode, local_view, set_local, states_by_name, wrap
from hp_platform import get_platform

State = dict[str, Any]
_STEP, _LARGEST, _STARTED = "step", "max_exp_avg_sq", "stat"
_SAVED = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum_buffer"} | {
    _LARGEST: _LARGEST,
    "accum": "momentum_buffer",
}
"""The names of states in a checkpoint, by MindSpore's."""
_NOT_OPTIONS = ("params", _LARGEST, "grad_centralization")


_DTYPES = {
    mindspore.bool_: "BOOL",
    mindspore.uint8: "U8",
    mindspore.int8: "I8",
    mindspore.int16: "I16",
    mindspore.uint16: "U16",
    mindspore.float16: "F16",
    mindspore.bfloat16: "BF16",
    mindspore.int32: "I32",
    mindspore.uint32: "U32",
    mindspore.float32: "F32",
    mindspore.int64: "I64",
    mindspore.uint64: "U64",
    mindspore.float64: "F64",
    mindspore.complex64: "C64",
}


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def dtype_of(tensor: Tensor) -> str | None:
    return _DTYPES.get(tensor.dtype)


def refusal(tensor: Tensor) -> str | None:
    if isinstance(tensor, Parameter) and tensor.has_init:
        return "has no values yet; call hp_dtensor.init_parameters(cell), or cell.init_parameters_data()"
    return None


def read_bytes(tensor: Tensor) -> np.ndarray:
    local = local_view(tensor)
    return _bytes(local) if local.numel() else np.empty(0, np.uint8)


def written_bytes(tensor: Tensor) -> tuple[np.ndarray, Callable[[], None] | None]:
    local = local_view(tensor)
    array = local.asnumpy()
    if get_platform().devices.kind == "cpu" and local.is_contiguous() and array.flags.writeable:
        return array.reshape(-1).view(np.uint8), None
    copy = np.ascontiguousarray(array).copy()

    def store() -> None:
        with local_mode():
            set_local(tensor, Tensor(copy).to(local.dtype))

    return copy.reshape(-1).view(np.uint8), store


def memory_of(tensor: Tensor) -> Hashable:
    """Return what is equal for two tensors that are one in memory: state_dict() has the parameters themselves."""
    return id(tensor)


def _bytes(local: Tensor) -> np.ndarray:
    return np.ascontiguousarray(local.asnumpy()).reshape(-1).view(np.uint8)


def empty(dtype: str, shape: Sequence[int]) -> Tensor:
    """Make a tensor on the host, of a dtype by its name in safetensors.

    Raises:
        TypeError: MindSpore lacks the dtype.
    """
    own = {name: each for each, name in _DTYPES.items()}
    if dtype not in own:
        raise TypeError(f"checkpoint: a tensor is {dtype}, which MindSpore lacks")
    return ops.zeros(tuple(shape), own[dtype])


def bytes_tensor(array: np.ndarray) -> Tensor:
    return Tensor(array)


def bytes_array(tensor: Tensor) -> np.ndarray:
    return tensor.asnumpy()


local_buffer = read_bytes
move_runs = move
from_sent = bytes_array


def to_sent(buffer: np.ndarray) -> Tensor:
    return bytes_tensor(buffer)


def new_buffer(count: int) -> np.ndarray:
    return np.empty(count, np.uint8)


def new_whole(dtype: str, shape: Sequence[int]) -> tuple[Tensor, np.ndarray, Callable[[], None] | None]:
    tensor = empty(dtype, shape)
    return tensor, *written_bytes(tensor)


def model_state(model: nn.Cell | Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters and persistent buffers by name.

    What this returned before is taken for the model as well, and returned as it is.
    """
    if isinstance(model, Mapping):
        return dict(model)
    for _, cell in model.cells_and_names():
        reshard = getattr(cell, "reshard", None)  # of fully_shard: the sharded parameters have to be registered
        if callable(reshard):
            reshard()
    return dict(model.state_dict(keep_vars=True))


def optimizer_states(model: nn.Cell | Mapping[str, Any], optimizer: Any) -> list[Any]:
    names: dict[int, str] = {}
    for name, value in model_state(model).items():
        names.setdefault(id(value), name)
    return list(_states_by_name(names, optimizer))


def _states_by_name(names: Mapping[int, str], optimizer: Any) -> list[_States]:
    """Return the state of an optimizer, or of each optimizer in a chain.

    Args:
        names: of the model's parameters, by their identity.
        optimizer: one of ``mindspore.experimental.optim`` or hp_optim.

    Raises:
        TypeError: an optimizer, or states, whose meaning is not known.
        ValueError: a parameter that is not the model's, or states of another shape.
    """
    optimizers: Iterable[Any] = optimizer if hasattr(optimizer, "optimizers") else (optimizer,)
    return [_States(names, each) for each in optimizers]


class _States:
    """An optimizer as an `OptimizerState`."""

    def __init__(self, names: Mapping[int, str], optimizer: Any) -> None:
        kind = type(optimizer).__name__
        of_mint = any(each.__module__.startswith("mindspore.mint") for each in type(optimizer).__mro__)
        if not isinstance(optimizer, Optimizer) or of_mint:
            raise _unknown(f"{kind} is no optimizer of mindspore.experimental.optim or hp_optim")
        self._optimizer, self._kind = optimizer, kind
        self._slots = states_by_name(optimizer)
        unknown = sorted({*self._slots} - {*_SAVED, _STARTED} | {*_shared(optimizer)} - {"state_step"})
        if unknown:
            raise _unknown(f"{kind} has the states {', '.join(unknown)}, which PyTorch's optimizers have not")
        self._numbers: dict[str, int] = {}
        self._groups: dict[str, State] = {}
        self._step: float | None = None
        self.states: dict[str, State] = {}
        self.options: dict[str, State] = {}
        for group in optimizer.param_groups:
            options = {key: _plain(value) for key, value in group.items() if key not in _NOT_OPTIONS}
            for parameter in group["params"]:
                number = len(self._numbers)
                name = names.get(id(parameter))
                if name is None:
                    raise ValueError(
                        f"checkpoint: parameter {number} of {kind}, {parameter.name!r} of shape"
                        f" {tuple(parameter.shape)}, is not the model's. Make the optimizer of the model as it is now"
                    )
                self._numbers[name], self._groups[name], self.options[name] = number, group, options
        started = _STARTED not in self._slots or any(not each.asnumpy().any() for each in self._filled(_STARTED))
        for name in self._numbers:
            self.states[name] = self._state(name, started)

    def make(self, name: str, key: str, dtype: str, shape: Sequence[int]) -> Any:
        """Return a state that the optimizer has and doesn't use yet."""
        del dtype, shape
        if self._slot(name, key) is None:
            has = sorted({_SAVED[slot] for slot in self._slots if slot in _SAVED})
            raise ValueError(
                f"load: the checkpoint has the state {key!r} of {name!r}, and {self._kind} has {', '.join(has)}; build"
                " the optimizer that was saved, or load the model alone"
            )
        return self._placed(name, key)

    def set(self, values: Mapping[str, Mapping[str, Any]], options: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the states of the parameters, and the options of their groups.

        Raises:
            ValueError: the parameters of one optimizer were saved after different numbers of steps.
        """
        for name in self._numbers:
            self._set_state(name, values.get(name, {}))
            self._set_options(self._groups[name], options[name])

    def _set_state(self, name: str, values: Mapping[str, Any]) -> None:
        number = self._numbers[name]
        with local_mode():
            for key, value in values.items():
                slot = self._slot(name, key)
                if slot is not None:
                    set_local(slot, local_view(value).copy())
            if "accum" in self._slots and "momentum_buffer" in values:
                started = self._slots[_STARTED][number]
                set_local(started, ops.zeros_like(local_view(started)))
        if _STEP in values:
            self._set_step(name, float(values[_STEP]))

    def _state(self, name: str, started: bool) -> State:
        group = self._groups[name]
        kept = [key for key in self._slots if key in _SAVED and (key != _LARGEST or group.get("amsgrad"))]
        if "accum" in kept and not (started and group["momentum"]):
            kept.remove("accum")
        state = {_SAVED[key]: self._placed(name, _SAVED[key]) for key in kept}
        counted = _shared(self._optimizer).get("state_step")
        if counted is not None:
            state[_STEP] = np.array(counted.asnumpy().reshape(()), dtype=np.float32)
        return state

    def _slot(self, name: str, key: str) -> Any:
        """Return what the optimizer keeps under a state's name; None if it keeps nothing."""
        own = next((slot for slot, saved in _SAVED.items() if saved == key and slot in self._slots), None)
        return None if own is None else self._slots[own][self._numbers[name]]

    def _placed(self, name: str, key: str) -> Any:
        """Return a state in its parameter's layout, on the optimizer's memory where that is on the host."""
        slot, parameter = local_view(self._slot(name, key)), self._optimizer.parameters[self._numbers[name]]
        own = local_view(parameter)
        if tuple(slot.shape) != tuple(own.shape):
            raise ValueError(
                f"checkpoint: state {key!r} of {name!r} in {self._kind} has shape {tuple(slot.shape)} on this rank, the"
                f" parameter's part {tuple(own.shape)}: make the optimizer after the parameter is sharded"
            )
        spec = getattr(parameter, "_spec", None)
        return slot if spec is None else wrap(slot, spec)

    def _filled(self, key: str) -> list[Tensor]:
        return [each for each in map(local_view, self._slots[key]) if each.numel()]

    def _set_step(self, name: str, step: float) -> None:
        if self._step is not None and self._step != step:
            raise ValueError(
                f"load: the optimizer's parameters were saved after {self._step:.0f} and {step:.0f} steps ({name!r});"
                f" {self._kind} on MindSpore counts the steps of all together. Make an optimizer for each of them"
            )
        self._step = step
        _write(_shared(self._optimizer)["state_step"], step)

    def _set_options(self, group: State, options: Mapping[str, Any]) -> None:
        for key, value in options.items():
            own = group.get(key)
            if isinstance(own, Parameter):
                _write(own, value)
            elif isinstance(own, Tensor) or key == "initial_lr":
                group[key] = Tensor(value, mindspore.float32)
            elif key in group and key not in _NOT_OPTIONS:  # another framework's others mean nothing here
                group[key] = float(value) if isinstance(own, float) else value


def _shared(optimizer: Any) -> dict[str, Parameter]:
    """Return the states that all parameters share."""
    taken = {id(each) for each in (*optimizer.parameters, *optimizer.lrs)}
    taken |= {id(each) for slots in states_by_name(optimizer).values() for each in slots}
    return {key: own for key, own in optimizer._params.items() if id(own) not in taken}


def _write(parameter: Parameter, value: float) -> None:
    with SkipDTensorDispatch():
        ops.assign(parameter, Tensor(np.full(tuple(parameter.shape), value), parameter.dtype))


def _plain(value: Any) -> Any:
    return value.asnumpy().item() if isinstance(value, Tensor) else value


def _unknown(what: str) -> TypeError:
    return TypeError(
        f"checkpoint: {what}. Supported are Adam, AdamW and SGD of mindspore.experimental.optim, and hp_optim's; of"
        " others pass the states to hp_checkpoint.save as tensors by name, and load them so"
    )
