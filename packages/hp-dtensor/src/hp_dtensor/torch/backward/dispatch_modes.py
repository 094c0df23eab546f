"""Callers that need a tensor's local shape during backward, unlike the user's code.

Note [Shapes in checkpoints]
torch's non-reentrant checkpoints record the shape of each tensor that an operation saves, and compare it with the shape
of the tensor that the recomputed operation saves. The first is recorded inside the local operation. The second is read
during backward, where a DTensor that requires no gradient, and so was saved as it is, would report its global shape.
Tensors saved outside of a local operation, for a nested checkpoint or a user's function, are saved with interception
off as well: Note [Custom autograd functions] in `hp_dtensor.torch.backward.autograd_functions`.

Note [Shapes in dispatch modes]
``__torch_dispatch__`` of a mode sees local operations. In forward, interception is off around them. In backward it is
on, and a tensor that was saved as a DTensor arrives as one; the mode must see its local shape.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.utils._python_dispatch
import torch.utils.checkpoint

_modes: Any = torch.utils._python_dispatch
_NOTED = getattr(getattr(torch.utils.checkpoint, "_default_meta_extractor", None), "__code__", None)
"""The code that records shapes: Note [Shapes in checkpoints]."""


def local_asked(frame: Any) -> bool:
    """Tell whether a caller during backward needs the local shape.

    Args:
        frame: the caller's frame.
    """
    return frame.f_code is _NOTED or (_modes.is_in_torch_dispatch_mode() and in_a_mode(frame))


def in_a_mode(frame: Any) -> bool:
    """Tell whether a frame is ``__torch_dispatch__`` or was called from there."""
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False


_NOTHING = contextlib.nullcontext()


def without_modes() -> Any:
    """Return a context that hides calls from active modes: a counter of operations must not count our queries."""
    return _modes._disable_current_modes() if _modes.is_in_torch_dispatch_mode() else _NOTHING
