"""Mixtures of experts for models of one's own, and their grouped products for models of transformers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hp_moe.layer.checks import check_bias
from hp_moe.layer.experts import compute, describe
from hp_moe.layer.modules import MixtureArguments, RouterArguments
from hp_moe.torch.balance import add_counts, attach_loss, balance_loss
from hp_moe.torch.port import count, message, not_finite, order, slots, spread

T = torch.Tensor


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1(x)) * w3(x))``. Source: Shazeer, arXiv:2002.05202.

    Args:
        dim: size of inputs and outputs.
        hidden_dim: size in between.
        bias: of the three layers.
    """

    def __init__(self, dim: int, hidden_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden_dim, bias), nn.Linear(dim, hidden_dim, bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias)

    def forward(self, x: T) -> T:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GroupedExperts(nn.Module):
    """Experts, each a ``FeedForward`` without biases.

    Args:
        dim: size of inputs and outputs.
        hidden_dim: size in between.
        num_experts: of them.
        use_grouped_mm: take torch's grouped product where it has one for the dtype; else a product an expert.
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, use_grouped_mm: bool = False) -> None:
        super().__init__()
        self.num_experts, self.use_grouped_mm = num_experts, use_grouped_mm
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's weights as ``nn.Linear`` draws its own."""
        with torch.no_grad():
            for weight in (self.w1, self.w2, self.w3):
                bound = weight.shape[2] ** -0.5
                weight.uniform_(-bound, bound)

    def forward(
        self, x: T, counts: T | Sequence[int], scores: T | None = None, beside: Callable[[], Any] | None = None
    ) -> Any:
        """Compute rows by their experts.

        Args:
            x: ``[rows, dim]``, ordered by expert.
            counts: rows of each expert.
            scores: ``[rows]``, what a row's result is multiplied by; None is 1.
            beside: computed meanwhile, where rows travel between ranks.

        Returns:
            ``[rows, dim]``, and what ``beside`` returned if there is one.
        """
        sizes = counts.tolist() if isinstance(counts, torch.Tensor) else list(counts)
        out = compute(self, describe(self), x, sizes, lambda name: getattr(self, name))
        out = out if scores is None else out * scores.unsqueeze(-1).to(out.dtype)
        return out if beside is None else (out, beside())


class TokenChoiceTopKRouter(RouterArguments, nn.Module):
    """Each token chooses the experts of its highest scores; of equal scores the lower expert.

    Args:
        dim: size of tokens.
        num_experts: to choose from.
        top_k: choices a token.
        score_func: ``"sigmoid"`` or ``"softmax"`` of the logits, in float32 or above.
        num_expert_groups: cut the experts into so many groups, and choose from ``num_limited_groups`` of them, those
            whose two highest scores have the highest sums. Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
        num_limited_groups: see ``num_expert_groups``.
        route_scale: factor of the scores.

    Raises:
        ValueError: numbers that do not fit each other.
    """

    _linear = nn.Linear

    def forward(self, x: T, expert_bias: T | None = None) -> tuple[T, T, T]:
        """Route tokens.

        Args:
            x: ``[tokens, dim]``.
            expert_bias: ``[experts]``, added to the scores for the choice alone.

        Returns:
            The scores of the chosen experts and their numbers, ``[tokens, top_k]`` each, and all scores, ``[tokens,
            experts]``, before ``route_scale``.

        Raises:
            ValueError: a bias of another shape.
        """
        if expert_bias is not None:
            check_bias(self.num_experts, expert_bias.shape)
        logits = self.gate(x)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        scores = logits.sigmoid() if self.score_func == "sigmoid" else logits.softmax(-1)
        with torch.no_grad():
            ranking = scores if expert_bias is None else scores + expert_bias.to(scores.dtype)
            if self.num_expert_groups is not None:
                ranking = self._limited(ranking, self.num_expert_groups)
            chosen = ranking.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        return scores.gather(1, chosen) * self.route_scale, chosen, scores

    def _limited(self, ranking: T, count: int) -> T:
        """Leave the experts of the best groups."""
        groups = ranking.unflatten(1, (count, -1))
        best = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(-1)
        chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, : self.num_limited_groups]
        mask = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        return groups.masked_fill(mask.unsqueeze(-1), float("-inf")).flatten(1)


class MoE(MixtureArguments, nn.Module):
    """A mixture of experts, in place of a feed-forward layer.

    Args:
        dim: size of tokens.
        hidden_dim: of each expert.
        num_experts: of them.
        top_k: choices a token.
        score_before_experts: multiply tokens by their scores before the experts, not results after them.
        load_balance_coeff: of an auxiliary loss that evens out the experts' loads; it is added to backward, not to the
            output. None is none. Source: Fedus et al., Switch Transformers, arXiv:2101.03961, equation 4.
        sequence_partition_group: ranks that have parts of the same sequences: that loss is of the whole ones.
        shared_expert: a module for all tokens, whose output is added.
        router_kwargs: further arguments of ``TokenChoiceTopKRouter``.
        use_grouped_mm: see ``GroupedExperts``.

    Attributes:
        expert_bias: ``[experts]``, a buffer that ``update_expert_bias`` changes.
        tokens_per_expert: ``[experts]``, a buffer: counts since its last change.
    """

    expert_bias: T
    tokens_per_expert: T

    _parts = TokenChoiceTopKRouter, GroupedExperts

    def _make_counts(self, experts: int) -> None:
        self.register_buffer("expert_bias", torch.zeros(experts, dtype=torch.float32))
        self.register_buffer("tokens_per_expert", torch.zeros(experts, dtype=torch.int64), persistent=False)

    def forward(self, x: T) -> T:
        """Compute tokens ``[..., dim]``."""
        tokens = x.flatten(0, -2)
        weights, chosen, scores = self.router(tokens, self.expert_bias)
        counts = torch.bincount(chosen.flatten(), minlength=self.router.num_experts)
        add_counts(self, counts)
        if self.load_balance_coeff is not None and torch.is_grad_enabled():
            loss = balance_loss(scores, counts, self.router.top_k, self.sequence_partition_group)
            weights = attach_loss(weights, loss * self.load_balance_coeff)
        places, inverse = order(chosen.flatten())
        rows = spread(tokens, places, inverse, self.router.top_k)
        own = spread(weights.reshape(-1, 1).to(tokens.dtype), places, inverse, 1)
        arguments = (rows * own, counts) if self.score_before_experts else (rows, counts, own.flatten())
        shared = None
        if self.shared_expert is None:
            out = self.experts(*arguments)
        else:
            out, shared = self.experts(*arguments, beside=functools.partial(self.shared_expert, tokens))
        total = spread(out, inverse, places, 1).unflatten(0, (-1, self.router.top_k)).sum(1)
        if shared is not None:
            total = total + shared
        return total.view(x.shape)


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
