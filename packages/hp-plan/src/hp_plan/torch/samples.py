"""Which samples are a rank's, and the loss of some."""

from __future__ import annotations

import torch
from torch import nn

from hp_plan.plan import ParallelPlan
from hp_platform import get_platform


def data_parallel_rows(plan: ParallelPlan) -> slice:
    """Which samples of the global batch are this rank's; tensor parallel ranks are neighbours with the same ones."""
    parts = plan.mesh.data_parallel
    count = plan.data.batch_size // parts
    part = get_platform().groups.rank() // (plan.mesh.world_size // parts)
    return slice(part * count, (part + 1) * count)


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
