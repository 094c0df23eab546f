"""What a framework supplies to hp-checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hp_platform.extend import load_port

Tensor = Any
Buffer = Any
"""Bytes that are moved between tensors and ranks: a tensor of uint8 on PyTorch, an array of uint8 on MindSpore."""


class OptimizerState(Protocol):
    """The state of an optimizer, by the names of the model's parameters.

    Attributes:
        states: of each parameter, by its name: tensors, the optimizer's own, and other values.
        options: of each parameter, by its name: the options of its group.
    """

    states: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Mapping[str, Any]]

    def make(self, name: str, key: str, dtype: str, shape: Sequence[int]) -> Tensor:
        """Make a state that a parameter lacks, of a dtype by its name in safetensors and this global shape."""
        ...

    def set(self, values: Mapping[str, Mapping[str, Any]], options: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the states of the parameters by their names, and the options of their groups."""
        ...


class Port(Protocol):
    """Tensors as bytes; models and optimizers as tensors by name. `<framework>/port.py`."""

    def is_tensor(self, value: object) -> bool:
        """Tell whether a value is a tensor of the framework."""
        ...

    def dtype_of(self, tensor: Tensor) -> str | None:
        """Return a dtype's name in safetensors, None for one that it lacks."""
        ...

    def refusal(self, tensor: Tensor) -> str | None:
        """Return the reason why a tensor can't be saved or loaded, None where it can."""
        ...

    def read_bytes(self, tensor: Tensor) -> np.ndarray:
        """Return the local tensor's bytes, row-major: its own memory where that is on the host, else a copy."""
        ...

    def written_bytes(self, tensor: Tensor) -> tuple[np.ndarray, Callable[[], None] | None]:
        """Return bytes to write, row-major, and a function that brings them into the local tensor.

        The tensor counts as modified in place, for a backward that has saved it. The function is None where the bytes
        are the tensor's own memory. Other bytes begin as the tensor's values.
        """
        ...

    def memory_of(self, tensor: Tensor) -> Hashable:
        """Return what is equal for two tensors that are one in memory, and have the same value at any time."""
        ...

    def empty(self, dtype: str, shape: Sequence[int]) -> Tensor:
        """Make a tensor on the host, of a dtype by its name in safetensors.

        Raises:
            TypeError: the framework lacks the dtype.
        """
        ...

    def bytes_tensor(self, array: np.ndarray) -> Tensor:
        """Return bytes as a tensor that the ranks can send."""
        ...

    def bytes_array(self, tensor: Tensor) -> np.ndarray:
        """Return a tensor of bytes as an array."""
        ...

    def local_buffer(self, tensor: Tensor) -> Buffer:
        """Return the local tensor's bytes, row-major, where it is: its own memory where that is contiguous."""
        ...

    def new_buffer(self, count: int) -> Buffer:
        """Make a buffer of so many bytes, where the ranks communicate."""
        ...

    def new_whole(self, dtype: str, shape: Sequence[int]) -> tuple[Tensor, Buffer, Callable[[], None] | None]:
        """Make a plain tensor, its bytes, and a function that brings these into it, None where they are its own.

        Args:
            dtype: by its name in safetensors.
            shape: its shape.
        """
        ...

    def move_runs(
        self, length: int, count: int, source: Buffer, start: int, stride: int, target: Buffer, at: int, step: int
    ) -> None:
        """Copy runs of a buffer into another one; the arguments are those of `layout.tensors.move`, in bytes."""
        ...

    def to_sent(self, buffer: Buffer) -> Tensor:
        """Return a buffer as a tensor that the ranks can send, or receive into."""
        ...

    def from_sent(self, tensor: Tensor) -> Buffer:
        """Return what was received as a buffer."""
        ...

    def model_state(self, model: Any) -> dict[str, Any]:
        """Return the parameters and persistent buffers by name; a tied one is the same object under each name."""
        ...

    def optimizer_states(self, model: Any, optimizer: Any) -> list[OptimizerState]:
        """Return the state of an optimizer, or of each optimizer in a chain."""
        ...


@functools.cache
def port() -> Port:
    """Get what the framework in use supplies."""
    return load_port(Port)
