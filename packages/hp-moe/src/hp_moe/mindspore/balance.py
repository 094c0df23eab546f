"""Balance of experts' loads on MindSpore; the docstrings are those of `hp_moe.torch.balance`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mindspore import Tensor, _Function, mint, nn
from mindspore.graph.api import _pynative_executor

from hp_moe.layer.checks import check_counted_together
from hp_platform import get_platform
from hp_platform.extend import reduce_numbers


def add_counts(layer: Any, counts: np.ndarray) -> None:
    """Add counts of a forward to a layer's, in training, and not where backward computes a Cell again."""
    if layer.training and not recomputes():
        layer.tokens_per_expert += counts


def recomputes() -> bool:
    """Tell whether backward is computing a Cell again."""
    return _pynative_executor.get_current_autodiff_engine_id() != -1


def update_expert_bias(moe: nn.Cell, lr: float = 1e-3, *, group: Any = None) -> None:
    """Raise the bias of experts with fewer tokens than the mean, lower that of those with more; counts begin anew."""
    layers = dict(_layers(moe))
    sizes = {name: len(layer.tokens_per_expert) for name, layer in layers.items()}
    check_counted_together("update_expert_bias", moe, sizes, "MoE inside, which has biases to update.", group)
    groups, at = get_platform().groups, 0
    counts = np.concatenate([layer.tokens_per_expert for layer in layers.values()]).tolist()
    if groups.is_initialized():
        counts = reduce_numbers(counts, "sum", groups.default_group() if group is None else group)
    for layer in layers.values():
        own = np.array(counts[at : at + len(layer.tokens_per_expert)])
        at += len(own)
        changed = layer.expert_bias.asnumpy() + lr * np.sign(own.sum() - own * len(own)).astype(np.float32)
        layer.expert_bias.set_data(Tensor(changed.astype(np.float32)))
        layer.tokens_per_expert[:] = 0


def _layers(module: nn.Cell) -> Iterator[tuple[str, Any]]:
    for name, child in module.cells_and_names():
        if hasattr(child, "expert_bias") and hasattr(child, "tokens_per_expert"):
            yield name, child


def balance_loss(scores: Tensor, counts: Any, top_k: int, group: Any = None) -> Tensor:
    """Compute ``experts * sum(share of tokens * mean score)``: 1 where all are equal."""
    tokens, size = scores.shape[0], 1
    if group is not None:
        size = get_platform().groups.size(group)
        *counts, tokens = reduce_numbers([*counts, tokens], "sum", group)
    shares = Tensor((np.asarray(counts) / (tokens * top_k)).astype(np.float64)).astype(scores.dtype)
    means = mint.sum(scores / mint.sum(scores, -1, keepdim=True), 0) / tokens
    return size * scores.shape[1] * mint.sum(shares * means)


class MoEAuxLossAutoScaler(_Function):
    """An auxiliary loss beside the graph: its gradient is added where backward comes through."""

    scale: float = 1.0

    @classmethod
    def set_loss_scale(cls, scale: float) -> None:
        """Set the factor of auxiliary losses' gradients, such as that of a loss scaler, or 1 over micro-batches."""
        cls.scale = scale

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return output * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, Tensor(np.asarray(MoEAuxLossAutoScaler.scale)).astype(ctx.dtype)


def attach_loss(output: Tensor, loss: Tensor) -> Tensor:
    """Return the output; backward through it also runs backward from the loss."""
    return MoEAuxLossAutoScaler.apply(output, loss)


def global_auxiliary_loss(model: nn.Cell, *, group: Any = None) -> Any:
    """Refuse: it is for transformers' models.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "global_auxiliary_loss is for transformers' models, which run on PyTorch: use MoE(load_balance_coeff=...,"
        " sequence_partition_group=...)"
    )
