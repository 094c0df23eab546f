"""What a module with styles says where it is pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["NotPickled", "hook"]


class NotPickled:
    """Belongs to one process and its meshes: it can be copied with the module that has it, not pickled.

    Args:
        function: what ``call`` calls.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self.function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> NotPickled:
        return self

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError(
            "a module with parallel styles cannot be pickled, nor saved with torch.save: its hooks belong to this"
            " process and its mesh. Save module.state_dict(), each rank its own or {name: x.full_tensor()} of all, and"
            " load it into a module that is built and parallelized again; copy.deepcopy(module) copies it"
        )


def hook(function: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a style: the function, as a method, which every framework takes for a hook."""
    return NotPickled(function).call
