"""Which part of the program runs an operator: frames of torch's, and of what plays the program, are passed over."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

from hp_dtensor.torch.extend import Modules

_PLAYS = (__package__, "hp_platform.torch.dry")
_TORCH = str(Path(torch.__file__).parent)


def running_module(modules: Modules) -> str:
    """Return the name of the module that runs; "" outside of modules."""
    return modules.place(sys._getframe(1))[1]


def calling_line() -> str:
    """Return the file and line that called an operator, such as "transformers/masking_utils.py:776"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_TORCH) or frame.f_globals["__name__"].startswith(_PLAYS)
    ):
        frame = frame.f_back
    return "" if frame is None else f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def _short(path: str) -> str:
    """Return a path from the library or package on."""
    return path.rpartition("site-packages/")[2].rpartition("/src/")[2]
