"""Tensors, models and optimizers of PyTorch, with their dtypes by the names in safetensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from hp_dtensor.torch.extend import local_view
from hp_platform import get_platform

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

State = dict[str, Any]
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
_NOT_OPTIONS = ("params", "param_names")


_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def dtype_of(tensor: torch.Tensor) -> str | None:
    return _NAMES.get(tensor.dtype)


def refusal(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:
        return "is a nested tensor; save its .unbind() parts"
    if type(tensor) not in _PLAIN and getattr(tensor, "_spec", None) is None or _is_foreign(tensor):
        kind = type(tensor)
        return (
            f"is a {kind.__module__}.{kind.__qualname__}, whose layout is not known here; expected a plain tensor or a"
            " DTensor of hp_dtensor"
        )
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}; expected a dense tensor"
    if tensor.is_meta:
        return "is on the meta device and has no values; give it memory first, as by hp_dtensor.init_parameters(model)"
    return None


def _is_foreign(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "DTensor" and type(tensor).__module__.startswith("torch.")


def read_bytes(tensor: torch.Tensor) -> np.ndarray:
    local = local_view(tensor).resolve_conj().resolve_neg()
    return _bytes(local.cpu().contiguous())


def written_bytes(tensor: torch.Tensor) -> tuple[np.ndarray, Callable[[], None] | None]:
    local = local_view(tensor)
    increment_version(local)
    if local.device.type == "cpu" and local.is_contiguous() and not (local.is_conj() or local.is_neg()):
        return _bytes(local), None
    host = local.to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()

    def store() -> None:
        local.copy_(host)

    return _bytes(host), store


def memory_of(tensor: torch.Tensor) -> Hashable:
    if refusal(tensor) is not None:
        return id(tensor)
    local = local_view(tensor)
    place = local.data_ptr()
    signs = local.is_conj(), local.is_neg()
    return (
        (place, local.device, local.dtype, local.shape, local.stride(), tensor.shape, *signs) if place else id(tensor)
    )


def _bytes(local: torch.Tensor) -> np.ndarray:
    return local.reshape(-1).view(torch.uint8).numpy() if local.numel() else np.empty(0, np.uint8)


def empty(dtype: str, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=DTYPES[dtype], device="cpu")


def bytes_tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(_device())


def _device() -> torch.device:
    """Return where the ranks communicate."""
    devices = get_platform().devices
    return torch.device("cpu") if devices.kind == "cpu" else devices.current_device()


def bytes_array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


def local_buffer(tensor: torch.Tensor) -> torch.Tensor:
    local = local_view(tensor).resolve_conj().resolve_neg().contiguous()
    return local.reshape(-1).view(torch.uint8)


def new_buffer(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=_device())


def new_whole(dtype: str, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, None]:
    tensor = torch.empty(tuple(shape), dtype=DTYPES[dtype], device=_device())
    return tensor, tensor.reshape(-1).view(torch.uint8), None


def move_runs(
    length: int, count: int, source: torch.Tensor, start: int, stride: int, target: torch.Tensor, at: int, step: int
) -> None:
    size = (count, length)
    into = target.as_strided(size, (step, 1), target.storage_offset() + at)
    into.copy_(source.as_strided(size, (stride, 1), source.storage_offset() + start))


def to_sent(buffer: torch.Tensor) -> torch.Tensor:
    return buffer


def from_sent(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def model_state(model: torch.nn.Module | Mapping[str, Any]) -> State:
    """Return the parameters and persistent buffers by name, without the prefixes of torch's wrappers.

    What this returned before is taken for the model as well, and returned as it is.

    Stages whose ``tied_names`` says that two names are one tensor have it under the first, wherever they have it.

    Raises:
        TypeError: a value of ``state_dict()`` that is not the model's own tensor.
    """
    if isinstance(model, Mapping):
        return dict(model)
    tied: Mapping[str, str] = getattr(model, "tied_names", {})
    state: State = {}
    tensors = {id(value) for value in (*model.parameters(), *model.buffers())}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in tensors:
            raise TypeError(
                f"checkpoint: {name!r} of state_dict() is no parameter or buffer of the {type(model).__name__}:"
                " get_extra_state() or a hook made it, and loading would not reach the model. Save it as extra, and a"
                " dictionary of the parameters and buffers as the model"
            )
        own = _unwrapped(name)
        state.setdefault(tied.get(own, own), value)
    return state


def optimizer_states(model: torch.nn.Module | Mapping[str, Any], optimizer: Any) -> list[_States]:
    """Return the state of an optimizer, or of each optimizer in a chain.

    Raises:
        ValueError: a parameter that is not the model's.
        TypeError: a state whose layout is not known.
    """
    names: dict[int, str] = {}
    for name, value in model_state(model).items():
        names.setdefault(id(value), name)
    optimizers: Iterable[Any] = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    return [_States(names, each) for each in optimizers]


class _States:
    """An optimizer as an `OptimizerState`."""

    def __init__(self, names: Mapping[int, str], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: dict[str, torch.Tensor] = {}
        self._groups: dict[str, State] = {}
        self._encodes = False
        self.states: dict[str, State] = {}
        self.options: dict[str, State] = {}
        packed = optimizer.state_dict()["state"]  # what swaps states waits here for its copies
        number = 0
        for group in optimizer.param_groups:
            options = {key: _plain(value) for key, value in group.items() if key not in _NOT_OPTIONS}
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise ValueError(
                        f"checkpoint: parameter {number} of {type(optimizer).__name__}, of shape"
                        f" {tuple(parameter.shape)}, is not the model's. What replaces parameters (to_empty, an"
                        " adapter) comes before the optimizer"
                    )
                self._parameters[name], self._groups[name], self.options[name] = parameter, group, options
                self.states[name] = dict(packed.get(number, {}))
                self._encodes |= not self.states[name].keys() <= optimizer.state.get(parameter, {}).keys()
                _check_states(name, self.states[name], optimizer)
                _check_layouts(name, parameter, self.states[name], optimizer)
                number += 1

    def make(self, name: str, key: str, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """Make a state that a parameter lacks: in the parameter's layout if it has its shape."""
        parameter, group = self._parameters[name], self._groups[name]
        if key != "step" and tuple(shape) == tuple(parameter.shape):  # a scalar's state is shaped as "step"
            return torch.zeros_like(parameter, dtype=DTYPES[dtype], requires_grad=False)
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        return torch.zeros(tuple(shape), dtype=DTYPES[dtype], device=parameter.device if on_device else "cpu")

    def set(self, values: Mapping[str, Mapping[str, Any]], options: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the states of the parameters, and the options of their groups."""
        for name, group in self._groups.items():
            group.update({key: _taken(group.get(key), value) for key, value in options[name].items()})
        if self._encodes:  # what it shows are values, and it keeps others
            packed = self._optimizer.state_dict()
            loaded = {at: values[name] for at, name in enumerate(self._parameters) if values.get(name)}
            self._optimizer.load_state_dict({**packed, "state": {**packed["state"], **loaded}})
            return
        for name, parameter in self._parameters.items():
            state = self._optimizer.state[parameter]
            state.update({key: value for key, value in values.get(name, {}).items() if state.get(key) is not value})


def _plain(value: Any) -> Any:
    """Return an option with numbers in place of tensors of one element."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _taken(own: Any, value: Any) -> Any:
    """Return a saved option as a group has it: in its own tensor, where it has one."""
    if isinstance(own, torch.Tensor):
        with torch.no_grad():
            return own.copy_(torch.as_tensor(value))
    if isinstance(own, (tuple, list)) and isinstance(value, (tuple, list)) and len(own) == len(value):
        return type(value)(map(_taken, own, value))
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value) if value.size > 1 else value.item()
    return value


def _check_states(name: str, state: State, optimizer: Any) -> None:
    """Refuse what is neither a tensor nor a number: an optimizer that keeps lists could not go on from the rest."""
    for key, value in state.items():
        if not isinstance(value, (torch.Tensor, int, float, str, type(None))):
            raise TypeError(
                f"checkpoint: state {key!r} of {name!r} in {type(optimizer).__name__} is a {type(value).__name__}, and"
                " only tensors and numbers are saved as states. Save the model without this optimizer, and its"
                " state_dict() by torch.save"
            )


def _check_layouts(name: str, parameter: torch.Tensor, state: State, optimizer: Any) -> None:
    """Refuse plain tensors beside a sharded parameter: each rank's are its own, in a layout that only it knows."""
    spec = getattr(parameter, "_spec", None)
    if spec is None or spec.replicated:
        return
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() > 1 and getattr(value, "_spec", None) is None:
            raise TypeError(
                f"checkpoint: state {key!r} of {name!r} in {type(optimizer).__name__} is a plain tensor of shape"
                f" {tuple(value.shape)}, and the parameter is sharded: how it is divided over the ranks is not known."
                " Use an optimizer whose states are DTensors (AdamW, Muon, torch.optim.AdamW)"
            )


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
