"""Methods of sharded modules that gather parameters as forward does."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from hp_fsdp.spans import INSIDE
from hp_fsdp.torch.hooks import run_forward
from hp_fsdp.torch.module import HSDPModule

__all__ = ["register_fsdp_forward_method"]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a sharded module gather the module's parameters, as its forward does.

    The parameters stay gathered until the method returns, whatever it calls in between: its own forward, or modules
    inside, each of which gathers its own group. All ranks must call it, and make the same calls in it.

    Example:
        >>> fully_shard(model)
        >>> register_fsdp_forward_method(model, "generate")      # T5 calls its encoder outside of model.forward
        >>> model.generate(ids)

    Args:
        module: a module that `fully_shard` was called on; another one is left as it is, as torch does.
        method_name: the method's name.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, HSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}, got {method!r}"
        )

    @functools.wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        group = module._hsdp_group

        def run(*args: Any, **kwargs: Any) -> Any:
            former, group.span = group.span, INSIDE
            try:
                return method(*args, **kwargs)
            finally:
                group.span = former

        return run_forward(module, run, args, kwargs)

    setattr(module, method_name, gathered)
