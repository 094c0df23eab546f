"""The contents of a Cell's tensors and of its inputs: compared by digests, and overwritten."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

from hp_dtensor import DTensor
from hp_plan.mindspore.models import named_parameters


def named(model: nn.Cell) -> Iterator[tuple[str, Parameter]]:
    """List parameters, running statistics among them, each once."""
    seen: set[int] = set()
    for name, parameter in named_parameters(model):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def describe(tensor: Tensor) -> str:
    """Return shape and dtype as a text."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).lower()}"


def is_comparable(value: Any) -> bool:
    """Return True for a plain tensor."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for each tensor that differs where contents do."""
    return [_digest(tensor) for tensor in tensors]


def _digest(tensor: Tensor) -> int:
    wide = tensor.astype(mindspore.float32) if tensor.dtype == mindspore.bfloat16 else tensor
    data = np.ascontiguousarray(wide.asnumpy()).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def overwrite(tensor: Parameter, fill: Callable[[Tensor], Any]) -> None:
    """Let a function write to memory with the tensor's contents, and keep what it wrote."""
    memory = Tensor(tensor.asnumpy(), tensor.dtype) if tensor.dtype != mindspore.bfloat16 else tensor.value().copy()
    fill(memory)
    tensor.set_data(memory)
