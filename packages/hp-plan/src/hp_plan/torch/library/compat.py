"""What torchao does in float32, done in float64 while a plan is verified: told by the frames that call."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_plan.sections import PrecisionSection
from hp_styles.torch.extend import grouped_product

_FRAMES = 12
"""Frames between a cast and the function that it is for: those of other modes."""


def products_in_float64(section: PrecisionSection) -> contextlib.AbstractContextManager[Any]:
    """Inside, torchao scales, casts and emulates products in float64 where it does so in float32.

    Scales that are powers of two are computed in float32, which gives the same ones.
    """
    return _Float64Products() if section.formats else contextlib.nullcontext()


class _Float64Products(TorchDispatchMode):
    """It sees what backward does, too, in whatever way backward was called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and all(hasattr(each, "_orig_dtype") for each in args):
            left, right = (each._data.double() / each._scale for each in args)
            return torch.mm(left, right).to(args[0]._orig_dtype)
        to_single = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.float32
        if to_single and args[0].dtype is torch.float64:
            frame = _casts(sys._getframe(1), ("torchao.float8.",))
            if frame is not None and not frame.f_locals.get("round_scales_to_power_of_2", False):
                return args[0].clone()
        return func(*args, **(kwargs or {}))


def casts() -> bool:
    """Tell whether torchao calls what calls this, perhaps through other modes, or what emulates it does."""
    return _casts(sys._getframe(2), ("torchao.", grouped_product.__module__)) is not None


def _casts(frame: Any, where: tuple[str, ...]) -> Any:
    """Return the first of a frame and those around it in which something of `where` casts; None if there is none.

    Backward reads what was saved, which may be a block that is computed again there; what it casts is in calls.
    """
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if frame.f_globals.get("__name__", "").startswith(where) and frame.f_code.co_name != "backward":
            return frame
        frame = frame.f_back
    return None
