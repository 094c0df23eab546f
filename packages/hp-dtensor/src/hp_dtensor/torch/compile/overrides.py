"""Methods of DTensor that torch.compile must take for those of torch.Tensor.

While Dynamo compiles, it reads the sizes and strides of a graph's inputs. These must be the local ones, so the metadata
of a DTensor depends on ``compiler._is_compiling_flag``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch._guards


class _Tracing:
    """The flag for versions of torch that don't have it."""

    @property
    def _is_compiling_flag(self) -> bool:
        return torch._guards.TracingContext.try_get() is not None


compiler: Any = torch.compiler if hasattr(torch.compiler, "_compile_session_context") else _Tracing()


class Override:
    """A method that replaces one of ``torch.Tensor``, and equals it.

    Dynamo refuses to call a method that a tensor subclass overrides, and passes torch's own to ``__torch_function__``.
    Outside of a graph the override is called, without the cost of an interception.

    Args:
        base: torch.Tensor's method.
        function: the override.
    """

    def __init__(self, base: Any, function: Callable[..., Any]) -> None:
        self.base = base
        self.name: str = base.__name__
        self.function = function
        self.__doc__ = function.__doc__

        def traced(*args: Any, **kwargs: Any) -> Any:
            return base(*args, **kwargs)

        function._torchdynamo_inline = traced

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self.function, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self.base or (isinstance(other, Override) and other.base is self.base)

    def __hash__(self) -> int:
        return hash(self.base)


def overrides(base: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turn the decorated method into an ``Override`` of ``base``."""
    return lambda function: Override(base, function)
