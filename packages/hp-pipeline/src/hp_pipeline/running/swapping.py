"""Saved tensors of stages on the host, moved by steps of the schedule."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hp_pipeline.orders.steps import MetaStepType
from hp_pipeline.port import Swapper
from hp_pipeline.running.slices import Flow

_T = MetaStepType

MOVES: dict[_T, Callable[[Flow], None]] = {
    _T.OFFLOAD: lambda flow: flow.swap.launch_offload(),
    _T.WAIT_OFFLOAD: lambda flow: flow.swap.wait_offload(),
    _T.LOAD: lambda flow: flow.swap.launch_load(),
    _T.WAIT_LOAD: lambda flow: flow.swap.wait_load(),
}
"""What each type of step does with what a forward has saved."""


def swapper_of(swap: Any) -> Swapper | None:
    """Return what moves saved tensors.

    Args:
        swap: True for hp-offload's, False for none, or an object with its method ``saving``.

    Raises:
        ModuleNotFoundError: hp-offload is not installed.
        TypeError: another object.
    """
    if swap is True:
        try:
            return importlib.import_module("hp_offload").SwapManager()
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "swap=True moves saved tensors by hp-offload, which is not installed: pip install hp-offload, or pass"
                " an object with a method saving(name, module)."
            ) from error
    if swap is False or swap is None:
        return None
    if not callable(getattr(swap, "saving", None)):
        raise TypeError(
            f"swap is True, False, or an object with a method saving(name, module), as hp_offload.SwapManager() is; got"
            f" {type(swap).__name__}."
        )
    return swap
