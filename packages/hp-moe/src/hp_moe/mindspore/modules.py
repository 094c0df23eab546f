"""Mixtures of experts for models of one's own, on MindSpore; the docstrings are those of `hp_moe.torch.modules`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hp_moe.layer.checks import check_bias
from hp_moe.layer.experts import compute, describe
from hp_moe.layer.modules import MixtureArguments, RouterArguments
from hp_moe.mindspore.balance import add_counts, attach_loss, balance_loss
from hp_moe.mindspore.exchange import Spread
from hp_moe.mindspore.port import order, swiglu


class FeedForward(nn.Cell):
    """SwiGLU: ``w2(silu(w1(x)) * w3(x))``."""

    def __init__(self, dim: int, hidden_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = mint.nn.Linear(dim, hidden_dim, bias), mint.nn.Linear(dim, hidden_dim, bias)
        self.w2 = mint.nn.Linear(hidden_dim, dim, bias)

    def construct(self, x: Tensor) -> Tensor:
        return self.w2(swiglu((self.w1(x), self.w3(x)), None))


class GroupedExperts(nn.Cell):
    """Experts, each a ``FeedForward`` without biases."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, use_grouped_mm: bool = False) -> None:
        super().__init__()
        self.num_experts, self.use_grouped_mm = num_experts, use_grouped_mm
        for name, shape in {"w1": (hidden_dim, dim), "w2": (dim, hidden_dim), "w3": (hidden_dim, dim)}.items():
            bound = shape[1] ** -0.5
            drawn = np.random.uniform(-bound, bound, (num_experts, *shape)).astype(np.float32)
            setattr(self, name, Parameter(Tensor(drawn), name=name))

    def construct(
        self,
        x: Tensor,
        counts: Tensor | Sequence[int],
        scores: Tensor | None = None,
        beside: Callable[[], Any] | None = None,
    ) -> Any:
        numbers: Any = counts
        sizes = numbers.asnumpy().tolist() if isinstance(counts, Tensor) else list(numbers)
        out = compute(self, describe(self), x, sizes, lambda name: getattr(self, name))
        out = out if scores is None else out * scores.unsqueeze(-1).astype(out.dtype)
        return out if beside is None else (out, beside())


class TokenChoiceTopKRouter(RouterArguments, nn.Cell):
    """Each token chooses the experts of its highest scores; of equal scores the lower expert."""

    _linear = mint.nn.Linear

    def construct(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if expert_bias is not None:
            check_bias(self.num_experts, expert_bias.shape)
        logits = self.gate(x)
        logits = logits if logits.dtype == mindspore.float64 else logits.astype(mindspore.float32)
        scores = mint.sigmoid(logits) if self.score_func == "sigmoid" else mint.softmax(logits, -1)
        ranking = scores.asnumpy()
        if expert_bias is not None:
            ranking = ranking + expert_bias.asnumpy().astype(ranking.dtype)
        chosen = Tensor(self._best(ranking, self.top_k))
        return ops.gather_elements(scores, 1, chosen) * self.route_scale, chosen, scores

    def _best(self, ranking: Any, count: int) -> Any:
        if self.num_expert_groups is not None:
            groups = ranking.reshape(len(ranking), self.num_expert_groups, -1)
            sums = np.sort(groups, -1)[..., -2:].sum(-1)
            kept = np.argsort(-sums, -1, kind="stable")[:, : self.num_limited_groups]
            mask = np.ones_like(sums, bool)
            np.put_along_axis(mask, kept, False, 1)
            ranking = np.where(mask[..., None], -np.inf, groups).reshape(ranking.shape)
        return np.argsort(-ranking, -1, kind="stable")[:, :count]


class MoE(MixtureArguments, nn.Cell):
    """A mixture of experts, in place of a feed-forward layer."""

    _parts = TokenChoiceTopKRouter, GroupedExperts

    def _make_counts(self, experts: int) -> None:
        self.expert_bias = Parameter(Tensor(np.zeros(experts, np.float32)), name="expert_bias", requires_grad=False)
        self.tokens_per_expert = np.zeros(experts, np.int64)

    def construct(self, x: Tensor) -> Tensor:
        top_k = self.router.top_k
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen, scores = self.router(tokens, self.expert_bias)
        counts = np.bincount(chosen.asnumpy().reshape(-1), minlength=self.router.num_experts)
        add_counts(self, counts)
        if self.load_balance_coeff is not None:
            loss = balance_loss(scores, counts, top_k, self.sequence_partition_group)
            weights = attach_loss(weights, loss * self.load_balance_coeff)
        places, inverse = order(chosen.asnumpy().reshape(-1))
        rows = Spread.apply(tokens, places, inverse, top_k)
        own = Spread.apply(weights.reshape(-1, 1).astype(tokens.dtype), places, inverse, 1)
        if self.score_before_experts:
            out = self.experts(rows * own, counts.tolist())
        else:
            out = self.experts(rows, counts.tolist(), own.reshape(-1))
        total = mint.sum(Spread.apply(out, inverse, places, 1).reshape(-1, top_k, x.shape[-1]), 1)
        if self.shared_expert is not None:
            total = total + self.shared_expert(tokens)
        return total.reshape(x.shape)


def register_experts(name: str = "grouped_linear") -> str:
    """Raise: transformers' models do not run on MindSpore."""
    raise NotImplementedError(
        f"register_experts: cannot register {name!r}: transformers' models are PyTorch's; GroupedExperts has grouped"
        " products on MindSpore"
    )
