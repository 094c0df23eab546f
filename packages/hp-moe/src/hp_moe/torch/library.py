"""Grouped products as an implementation of the experts of transformers, for experts that are not spread over ranks."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from hp_moe.layer.experts import compute, describe
from hp_moe.torch.port import count, message, not_finite, order, slots, spread

T = torch.Tensor


def register_experts(name: str = "grouped_linear") -> str:
    """Add an implementation of experts to those that transformers chooses from by name; nothing of it is replaced.

    It multiplies the rows of all experts in one kernel where torch has one for the dtype, else by products whose
    backward costs no more, float64 among them. It saves the inputs of the products alone, and adds results up in the
    order of a token's choices.

        config = Qwen3MoeConfig(experts_implementation=register_experts())

    Args:
        name: that configurations choose it by.

    Returns:
        The name.

    Raises:
        ImportError: there is no transformers, or one without a registry of experts.
        ValueError: the name is that of another implementation.
    """
    try:
        registry: Any = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    except (ImportError, AttributeError) as error:
        raise ImportError("register_experts needs transformers: pip install 'transformers>=5'") from error
    if name == "eager" or registry.get(name, experts_forward) is not experts_forward:
        raise ValueError(f"register_experts: {name!r} is another implementation of transformers; choose another name.")
    registry.register(name, experts_forward)
    return name


def experts_forward(module: Any, hidden_states: T, top_k_index: T, top_k_weights: T) -> T:
    """Compute the sum over choices of weight times expert, for each token.

    Args:
        module: of experts, all of them on this rank.
        hidden_states: ``[tokens, hidden]``.
        top_k_index: ``[tokens, choices]``, numbers of experts.
        top_k_weights: ``[tokens, choices]``.

    Raises:
        RuntimeError: transformers spreads the experts over ranks itself.
        ValueError: numbers that are no expert's, or weights that are not finite.
    """
    own, choices = describe(module), top_k_index.shape[-1]
    if getattr(module, "_is_expert_parallel", False):
        raise RuntimeError(
            f"{own.name}: transformers spreads these experts over ranks itself; take hp_moe.ExpertParallel in its"
            " place, or experts_implementation='grouped_mm'."
        )
    places, unknown = slots(top_k_index, tuple(range(own.experts)))
    told = [count(places, own.experts), unknown, not_finite(top_k_weights)]
    *sizes, unknown, infinite = message(told, places).tolist()
    if unknown or infinite:
        raise ValueError(
            f"{own.name}: {unknown} choices are none of {own.experts} experts, whose numbers go from 0 to"
            f" {own.experts - 1}, and {infinite} weights are not finite: look at the router."
        )
    there, back = order(places)
    rows = spread(hidden_states, there, back, choices)
    weights = spread(top_k_weights.reshape(-1, 1).to(hidden_states.dtype), there, back, 1)
    out = compute(module, own, rows, sizes, lambda name: getattr(module, name), weights)
    return spread(out, back, there, 1).unflatten(0, (-1, choices)).sum(1).to(hidden_states.dtype)
