"""Optimizer states by the names of parameters: PyTorch's for now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from mindspore import nn

__all__ = ["get_optimizer_state_dict", "set_optimizer_state_dict"]


def get_optimizer_state_dict(model: nn.Cell, optimizers: Any, *, options: Any = None) -> NoReturn:
    """Not supported on MindSpore yet.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "get_optimizer_state_dict is not supported on MindSpore yet; an optimizer is a Cell there, whose own parameters"
        " hold its states: optimizer.parameters_dict()"
    )


def set_optimizer_state_dict(
    model: nn.Cell, optimizers: Any, optim_state_dict: Mapping[str, Any], *, options: Any = None
) -> NoReturn:
    """Not supported on MindSpore yet.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "set_optimizer_state_dict is not supported on MindSpore yet; load the optimizer's own parameters, a Cell's"
    )
