"""register_sharding, which is for PyTorch."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["register_sharding"]


def register_sharding(op: Any) -> NoReturn:
    """Not on MindSpore.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"register_sharding({op!r}) is for PyTorch: on MindSpore bind the kernel in hp_dtensor.mindspore.functions (one"
        " line), write a DFunction, or run the operation on local tensors with custom_shard"
    )
