"""The loss of some samples."""

from __future__ import annotations

from mindspore import Tensor, nn

from hp_plan.plan import ParallelPlan


def forward_loss(plan: ParallelPlan, model: nn.Cell, tokens: Tensor) -> Tensor:
    """The loss of predicting each token from those before it, as a causal language model returns it.

    Args:
        plan: of the model.
        model: called with `input_ids` and `labels`, returns a mapping with `loss`.
        tokens: (samples, sequence length).
    """
    return model(tokens, tokens)["loss"]
