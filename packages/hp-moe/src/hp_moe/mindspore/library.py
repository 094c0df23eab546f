"""Implementations of the experts of transformers, whose models are PyTorch's."""

from __future__ import annotations


def register_experts(name: str = "grouped_linear") -> str:
    """Raise: transformers' models do not run on MindSpore."""
    raise NotImplementedError(
        f"register_experts: cannot register {name!r}: transformers' models are PyTorch's; GroupedExperts has grouped"
        " products on MindSpore"
    )
