"""What a framework supplies to hp-pipeline."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from hp_platform.extend import load_port


class Port(Protocol):
    """Tensors; `<framework>/port.py`."""

    def is_floating(self, tensor: Any) -> bool:
        """Tell whether the tensor's dtype is floating-point."""
        ...

    def copy(self, tensor: Any) -> Any:
        """Copy a tensor's values to one of its own memory, without its history."""
        ...


@functools.cache
def port() -> Port:
    """Get what the framework in use supplies."""
    return load_port(Port)
