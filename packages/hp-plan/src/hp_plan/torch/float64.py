"""Running a model wholly in float64, also where its code asks for float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Inside, explicit requests for float32 give float64.

    Models raise a norm's or a softmax's input to float32 for accuracy. In a float64 comparison that loses accuracy, and
    would hide every error below 1e-7. A mode sees calls before any tensor subclass does.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if item is torch.float32 else item for item in args)
        kwargs = {key: torch.float64 if item is torch.float32 else item for key, item in (kwargs or {}).items()}
        return func(*args, **kwargs)
