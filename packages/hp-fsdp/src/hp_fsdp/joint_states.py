"""A model's state and its optimizers' in one call, as ``torch.distributed.checkpoint.state_dict`` has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hp_fsdp.optimizer_state import get_optimizer_state_dict, set_optimizer_state_dict
from hp_fsdp.state_dict import get_model_state_dict, set_model_state_dict
from hp_fsdp.state_options import StateDictOptions

__all__ = ["get_state_dict", "set_state_dict"]


def get_state_dict(
    model: Any, optimizers: Any, *, submodules: Iterable[Any] | None = None, options: StateDictOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's state and its optimizers': `get_model_state_dict` and `get_optimizer_state_dict`.

    Example:
        >>> states = get_state_dict(model, optimizer)
        >>> torch.distributed.checkpoint.save(dict(zip(("model", "optimizer"), states)), checkpoint_id=path)

    Args:
        model: holds sharded modules, is one, or is not sharded.
        optimizers: one or several; ``()`` for none.
        submodules: deprecated by torch, and refused.
        options: see `StateDictOptions`.

    Raises:
        NotImplementedError: ``submodules``.
    """
    options = StateDictOptions.of(options)
    if submodules:
        raise NotImplementedError(
            "get_state_dict: submodules is not supported, torch deprecates it; call get_model_state_dict(submodule), or"
            " keep the names of the whole state that begin with the submodule's"
        )
    state = get_model_state_dict(model, options=options)
    return state, get_optimizer_state_dict(model, optimizers, options=options)


def set_state_dict(
    model: Any,
    optimizers: Any,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Loads what `get_state_dict` gave: `set_model_state_dict`, then `set_optimizer_state_dict`.

    Args:
        model: with memory, not on the meta device.
        optimizers: one or several; ``()`` for none, whose state is not looked at.
        model_state_dict: the model's state.
        optim_state_dict: the optimizers'.
        options: see `StateDictOptions`.

    Returns:
        ``missing_keys`` and ``unexpected_keys`` of the model's.

    Raises:
        ValueError: names or shapes that do not fit.
    """
    options = StateDictOptions.of(options)
    result = set_model_state_dict(model, model_state_dict, options=options)
    if optimizers:
        set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return result
