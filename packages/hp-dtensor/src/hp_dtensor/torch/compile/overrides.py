"""What of DTensor torch.compile has to find as it is in torch.Tensor.

While Dynamo compiles, it reads sizes and strides of the tensors that go into a graph: these are the local tensor's, so
what a DTensor says of itself depends on ``compiler._is_compiling_flag``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

__all__ = ["Override", "compiler", "overrides"]


class _Tracing:
    """For a torch that keeps no such flag while Dynamo compiles."""

    @property
    def _is_compiling_flag(self) -> bool:
        guards: Any = torch._guards  # type: ignore[attr-defined]
        return guards.TracingContext.try_get() is not None


compiler: Any = torch.compiler if hasattr(torch.compiler, "_compile_session_context") else _Tracing()


class Override:
    """A method that stands in for one of ``torch.Tensor``, and equals it.

    Dynamo refuses to call a method that a tensor subclass overrides, and hands torch's own to ``__torch_function__``.
    Outside of a graph the override is called, without the cost of an interception.

    Args:
        base: torch.Tensor's method.
        function: what is called.
    """

    def __init__(self, base: Any, function: Callable[..., Any]) -> None:
        self.base = base
        self.name: str = base.__name__
        self.function = function
        self.__doc__ = function.__doc__

        def traced(*args: Any, **kwargs: Any) -> Any:
            return base(*args, **kwargs)

        function._torchdynamo_inline = traced  # type: ignore[attr-defined]

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
