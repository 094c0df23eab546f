"""Balance of experts' loads: counts, biases that follow them, and the auxiliary loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hp_moe.layer.checks import check_counted_together
from hp_platform import get_platform

T = torch.Tensor


def count(layer: Any, counts: T) -> None:
    """Add counts of a forward to a layer's, in training, and not where backward computes a block again."""
    if layer.training and not recomputes():
        layer.tokens_per_expert.add_(counts)


def recomputes() -> bool:
    """Tell whether backward is computing a forward again."""
    return torch._C._current_graph_task_id() != -1


def update_expert_bias(moe: nn.Module, lr: float = 1e-3, *, group: Any = None) -> None:
    """Raise the bias of experts with fewer tokens than the mean, lower that of those with more; counts begin anew.

    Once a step, on all ranks. Counts are integers summed over all ranks, so that biases stay the same on each. Source:
    Wang et al., arXiv:2408.15664, algorithm 1.

    Args:
        moe: a ``MoE``, or a model with some.
        lr: how much a bias changes.
        group: the ranks whose tokens count; None is all.

    Raises:
        ValueError: there is no ``MoE`` inside, or ranks of the group have others.
    """
    layers = dict(_layers(moe))
    sizes = {name: len(layer.expert_bias) for name, layer in layers.items()}
    check_counted_together("update_expert_bias", moe, sizes, "MoE inside, which has biases to update.", group)
    groups, collectives = get_platform().groups, get_platform().collectives
    counts = torch.cat([layer.tokens_per_expert for layer in layers.values()])
    if groups.is_initialized():
        collectives.all_reduce(counts, group=groups.default_group() if group is None else group)
    with torch.no_grad():
        for layer, own in zip(layers.values(), counts.split(list(sizes.values())), strict=True):
            layer.expert_bias += lr * torch.sign(own.sum() - own * len(own))
            layer.tokens_per_expert.zero_()


def _layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, child in module.named_modules():
        if isinstance(getattr(child, "expert_bias", None), torch.Tensor) and hasattr(child, "tokens_per_expert"):
            yield name, child


def balance_loss(scores: T, counts: T, top_k: int, group: Any = None) -> T:
    """Compute ``experts * sum(share of tokens * mean score)``: 1 where all are equal.

    Args:
        scores: ``[tokens, experts]``; each token's are divided by their sum.
        counts: tokens that chose each expert.
        top_k: choices a token.
        group: ranks with further tokens of the same sequences; None is none.
    """
    tokens = torch.tensor(len(scores), device=scores.device)
    size = 1
    if group is not None:
        size = get_platform().groups.size(group)
        together = torch.cat([counts, tokens.view(1)])
        get_platform().collectives.all_reduce(together, group=group)
        counts, tokens = together[:-1], together[-1]
    shares = counts / (tokens * top_k)
    means = (scores / scores.sum(-1, keepdim=True)).sum(0) / tokens
    # A rank's part of the loss of all; ranks' gradients are averaged, as those of other losses are.
    return size * scores.shape[1] * (shares * means).sum()


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """An auxiliary loss beside the graph: its gradient is added where backward comes through."""

    scale: float | T = 1.0

    @classmethod
    def set_loss_scale(cls, scale: float | T) -> None:
        """Set the factor of auxiliary losses' gradients, such as that of a loss scaler, or 1 over micro-batches."""
        cls.scale = scale

    @staticmethod
    def forward(ctx: Any, output: T, loss: T) -> T:
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, T]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss) * MoEAuxLossAutoScaler.scale


def attach_loss(output: T, loss: T) -> T:
    """Return the output; backward through it also runs backward from the loss."""
    return MoEAuxLossAutoScaler.apply(output, loss)
