"""Who asks for a tensor's shape during backward: the user's code, or what sees local operations.

Note [What a checkpoint compares]
torch's checkpoints without reentrance note the shape of each tensor that an operation saves, and compare it with the
shape of the tensor that is saved when the operation runs again. The first is noted inside of the local operation, the
second is read during backward, where a DTensor that needs no gradient, and so was saved as it is, would tell its global
shape. What is saved from outside of a local operation, for a checkpoint within the checkpoint or for a user's function,
is saved with interception off as well: Note [Functions of the user's own] in `hp_dtensor.torch.backward.own_functions`.

Note [What a mode is handed]
``__torch_dispatch__`` of a mode is handed local operations. Forward, interception is off around them; backward, it is
on, and a tensor that was saved as a DTensor is handed over as one: to the mode it has to be its local part.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.utils._python_dispatch
import torch.utils.checkpoint

__all__ = ["in_a_mode", "local_asked", "without_modes"]

_modes: Any = torch.utils._python_dispatch
_NOTED = getattr(getattr(torch.utils.checkpoint, "_default_meta_extractor", None), "__code__", None)
"""What notes shapes: Note [What a checkpoint compares]."""


def local_asked(frame: Any) -> bool:
    """Whether what asks, during backward, wants the shape of the local part.

    Args:
        frame: the caller's.
    """
    return frame.f_code is _NOTED or (_modes.is_in_torch_dispatch_mode() and in_a_mode(frame))


def in_a_mode(frame: Any) -> bool:
    """Whether a frame is one of ``__torch_dispatch__`` or was called from there."""
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False


_NOTHING = contextlib.nullcontext()


def without_modes() -> Any:
    """Return a context that hides calls from active modes: a counter of operations must not count our queries."""
    return _modes._disable_current_modes() if _modes.is_in_torch_dispatch_mode() else _NOTHING
