"""Running a model wholly in float64 and without chance, also where its code asks for float32 or draws dropout."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_DRAWS = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.bernoulli}
_DRAWS |= {torch.multinomial, torch.normal, torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_}
_GROUPED = tuple(
    function for owner, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if (function := getattr(owner, name, None))
)


class Float64(TorchFunctionMode):
    """Inside, explicit requests for float32 give float64, and dropout keeps everything.

    Models raise a norm's or a softmax's input to float32 for accuracy. In a float64 comparison that loses accuracy, and
    would hide every error below 1e-7. A mode sees calls before any tensor subclass does. Grouped products have no
    kernel for float64, so they are one product a group. Which elements dropout drops is a draw of a generator that two
    programs don't share; that it was left out is in `notes`.

    Attributes:
        notes: changes to the model's computation, and what it draws at random, each once.
        trains: the model runs, and is not being built.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.trains = False

    def __enter__(self) -> Float64:
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if item is torch.float32 else item for item in args)
        kwargs = {key: torch.float64 if item is torch.float32 else item for key, item in (kwargs or {}).items()}
        if func in _DROPOUTS:
            return self._without_dropout(func, args, kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            self._note("scaled_dot_product_attention", kwargs["dropout_p"])
            kwargs["dropout_p"] = 0.0
        if self.trains and func is torch.rand and args in ((()), ([],), ((),)) and kwargs.get("generator") is None:
            self._say("torch.rand([]), as layers are dropped by, gave 0.5: two programs don't draw alike")
            return torch.tensor(0.5, dtype=kwargs.get("dtype") or torch.float64, device=kwargs.get("device"))
        if self.trains and func in _DRAWS and kwargs.get("generator") is None:
            self._say(f"{func.__name__} was called: two programs don't draw alike, so differences may be of chance")
        if func in _GROUPED and args[0].dtype is torch.float64:
            return _grouped_product(*args, **kwargs)
        return func(*args, **kwargs)

    def _without_dropout(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["training"] and bound.arguments["p"]:
            self._note(func.__name__, bound.arguments["p"])
        return bound.arguments["input"]

    def _note(self, name: str, p: float) -> None:
        self._say(f"{name} of p = {p:g} was set to 0: two programs don't draw alike")

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """`grouped_mm` of a (rows, k) and b (groups, k, columns): each run of rows times its group's matrix."""
    ends = offs.tolist()
    parts = [a[start:end] @ b[group] for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    product = torch.cat([*parts, a.new_zeros(len(a) - ends[-1], b.shape[-1])])
    return product if bias is None else product + bias
