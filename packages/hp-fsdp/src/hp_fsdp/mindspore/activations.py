"""watch_activations: PyTorch's for now."""

from __future__ import annotations

from typing import NoReturn

from mindspore import nn

__all__ = ["watch_activations"]


def watch_activations(model: nn.Cell) -> NoReturn:
    """Not supported on MindSpore yet.

    Raises:
        NotImplementedError: always; MindSpore has no hooks for what its autograd saves.
    """
    raise NotImplementedError(
        "watch_activations is not supported on MindSpore yet; mindspore.runtime.max_memory_allocated() tells the peak"
        " of a device, of all kinds together"
    )
