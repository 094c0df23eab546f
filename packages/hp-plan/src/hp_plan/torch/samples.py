"""The loss of some samples."""

from __future__ import annotations

import torch
from torch import nn

from hp_plan.plan import ParallelPlan


def forward_loss(plan: ParallelPlan, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of predicting each token from those before it, as a causal language model returns it.

    Args:
        plan: tells whether the model is transformers' own.
        model: called with `input_ids` and `labels`, returns a mapping with `loss`.
        tokens: (samples, sequence length).
    """
    # transformers fills a key-value cache unless told that nothing is generated.
    options = {"use_cache": False} if plan.model.config is not None else {}
    return model(input_ids=tokens, labels=tokens, **options)["loss"]
