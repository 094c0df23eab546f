"""Values in lists and tuples, as deep as they go.

Note [No closure calls itself]
    A function inside another one that calls itself is held by its own cell. It, and each tensor, module and group that
    it sees, then live until Python's collector runs. So what walks nested values is a function of a module and is
    handed what it needs. ``python docs/structure.py --check`` finds closures that call themselves or each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``function`` to a value, or to the items of lists and tuples of their own kind.

    Example:
        >>> map_nested(lambda item: item + 1, [1, (2, [3])])
        [2, (3, [4])]
    """
    if not isinstance(value, (list, tuple)):
        return function(value)
    items = [map_nested(function, item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
