"""Tensors and models of MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from hp_checkpoint.mindspore import optimizers
from hp_dtensor.mindspore.extend import local_mode, local_view, set_local
from hp_platform import get_platform

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
    """Tell whether a value is a tensor."""
    return isinstance(value, Tensor)


def dtype_of(tensor: Tensor) -> str | None:
    """Return a dtype's name in safetensors, None for one that it lacks."""
    return _DTYPES.get(tensor.dtype)


def refusal(tensor: Tensor) -> str | None:
    """Return the reason why a tensor can't be saved or loaded, None where it can."""
    if isinstance(tensor, Parameter) and tensor.has_init:
        return "has no values yet; call hp_dtensor.init_parameters(cell), or cell.init_parameters_data()"
    return None


def read_bytes(tensor: Tensor) -> np.ndarray:
    """Return the local tensor's bytes, row-major: its own memory where that is on the host, else a copy."""
    local = local_view(tensor)
    return _bytes(local) if local.numel() else np.empty(0, np.uint8)


def written_bytes(tensor: Tensor) -> tuple[np.ndarray, Callable[[], None] | None]:
    """Return bytes to write, and a function that brings them into the local tensor."""
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
    """Return bytes as a tensor that the ranks can send."""
    return Tensor(array)


def bytes_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor of bytes as an array."""
    return tensor.asnumpy()


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
    """Return the state of an optimizer, or of each optimizer in a chain; see `mindspore.optimizers`."""
    names: dict[int, str] = {}
    for name, value in model_state(model).items():
        names.setdefault(id(value), name)
    return list(optimizers.optimizer_states(names, optimizer))
