"""What is put around a module's forward: outside of what is there, or next to the forward itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


class Around(functools.partial[Any]):
    """A function that is called with a forward and its arguments in the place of the forward, which is bound last."""


def wrap_inside(module: nn.Module, around: Callable[..., Any]) -> None:
    """Make `around` what is nearest to a module's own forward: inside of checkpoints, which run it again."""
    outer: list[Any] = []
    forward: Any = module.forward
    while isinstance(forward, Around):
        *bound, own = forward.args  # a partial of a partial is one
        outer.append(functools.partial(forward.func, *bound))
        forward = own
    for each in (around, *reversed(outer)):
        forward = Around(each, forward)
    module.forward = forward
