"""What depends on torch's own code: callers in torch that need a tensor's local part, unlike the user's code.

Tested with torch 2.13. A caller is known by its frame, because torch passes nothing that tells it apart.

Note [Shapes in checkpoints]
torch's non-reentrant checkpoints record the shape of each tensor that an operation saves, and compare it with the shape
of the tensor that the recomputed operation saves. The first is recorded inside the local operation. The second is read
during backward, where a DTensor that requires no gradient, and so was saved as it is, would report its global shape.
Tensors saved outside of a local operation, for a nested checkpoint or a user's function, are saved with interception
off as well: Note [Custom autograd functions] in `hp_dtensor.torch.backward.autograd_functions`.

Note [Shapes in dispatch modes]
``__torch_dispatch__`` of a mode sees local operations. In forward, interception is off around them. In backward it is
on, and a tensor that was saved as a DTensor arrives as one; the mode must see its local shape.

Note [Operators in compiled graphs]
A compiled graph saw DTensors as their local parts when it was made. torch turns interception off while it runs some
graphs forward, and none backward, and a graph calls operators (``torch.ops``), on what are local parts already.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch.utils._python_dispatch
import torch.utils.checkpoint

_modes: Any = torch.utils._python_dispatch
_NOTED = getattr(getattr(torch.utils.checkpoint, "_default_meta_extractor", None), "__code__", None)
"""The code that records shapes: Note [Shapes in checkpoints]."""
_MODE = "__torch_dispatch__"
_GRAPHS = "_aot_autograd/runtime_wrappers.py"
"""The end of the name of the file that runs compiled graphs: Note [Operators in compiled graphs]."""


def local_asked() -> bool:
    """Tell whether the caller of a DTensor's property during backward needs the local shape."""
    frame = sys._getframe(2)
    return frame.f_code is _NOTED or (_modes.is_in_torch_dispatch_mode() and _in_a_mode(frame))


def _in_a_mode(frame: Any) -> bool:
    while frame is not None:
        if frame.f_code.co_name == _MODE:
            return True
        frame = frame.f_back
    return False


def is_local_call() -> bool:
    """Tell whether the caller of `dispatch` has local parts already: a compiled graph, or ``__torch_dispatch__``."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        code = frame.f_code
        if code.co_name == _MODE or code.co_filename.endswith(_GRAPHS):
            return True
        frame = frame.f_back
    return False


_NOTHING = contextlib.nullcontext()


def without_modes() -> Any:
    """Return a context that hides calls from active modes: a counter of operations must not count our queries."""
    return _modes._disable_current_modes() if _modes.is_in_torch_dispatch_mode() else _NOTHING
