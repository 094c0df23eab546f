"""explain: PyTorch's for now."""

from __future__ import annotations

from typing import Any, NoReturn

from mindspore import nn

__all__ = ["explain"]


def explain(
    model: nn.Cell, *, optimizer: Any = None, inputs: Any = None, activations: Any = None, path: Any = None
) -> NoReturn:
    """Not supported on MindSpore yet.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "explain is not supported on MindSpore yet; hp_dtensor.debug.CommDebugMode tells what a step communicates"
    )
