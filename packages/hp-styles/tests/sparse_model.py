"""DeepSeek's sparse attention in plain torch, for one device: what its context parallelism is compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_testing import device_type

T = torch.Tensor
HEADS, SIZE, ROPE, LENGTH, VOCABULARY, SELECTED = 4, 3, 2, 16, 11, 3
DIM = HEADS * SIZE


def options() -> dict[str, Any]:
    return {"dtype": torch.float64, "device": device_type()}


def linear(out: int) -> nn.Linear:
    return nn.Linear(DIM, out, bias=False, **options())


def visible(scores: T, positions: T | None) -> T:
    """Scores [batch, queries, keys] of later tokens become -inf."""
    queries, keys = scores.shape[1:]
    places = torch.arange(queries, device=scores.device) if positions is None else positions
    later = torch.arange(keys, device=scores.device) > places[:, None]
    return scores.masked_fill(later, -torch.inf)


def index_scores(query: T, key: T, weights: T) -> T:
    return torch.einsum("bqhk,bqh->bqk", torch.einsum("bqhd,bkd->bqhk", query, key).relu(), weights)


def of_selected(x: T, selected: T) -> T:
    """[batch, queries, selected, size] of x, [batch, keys, size]; of -1, the first."""
    batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
    return x[batch, selected.clamp(0)]


class Indexer(nn.Module):
    """The highest scores' tokens of each query; -1 where it sees fewer."""

    def forward(self, query: T, key: T, weights: T, positions: T | None = None) -> T:
        found = visible(index_scores(query, key, weights), positions).topk(SELECTED, -1)
        return found.indices.masked_fill(found.values == -torch.inf, -1)


class Attention(nn.Module):
    """Attends to what was selected."""

    def forward(self, query: T, key: T, value: T, query_rope: T, key_rope: T, selected: T) -> T:
        logits = torch.einsum("bqhd,bqkd->bqhk", query, of_selected(key, selected))
        logits = logits + torch.einsum("bqhd,bqkd->bqhk", query_rope, of_selected(key_rope, selected))
        weights = logits.masked_fill(selected[:, :, None] < 0, -torch.inf).softmax(-1)
        return torch.einsum("bqhk,bqkd->bqhd", weights, of_selected(value, selected))


class MaskedAttention(nn.Module):
    """The same by a mask over all keys, with a mask for what is later."""

    def forward(
        self, query: T, key: T, value: T, query_rope: T, key_rope: T, selected: T, positions: T | None = None
    ) -> T:
        logits = torch.einsum("bqhd,bkd->bqhk", query, key) + torch.einsum("bqhd,bkd->bqhk", query_rope, key_rope)
        mask = torch.full((*selected.shape[:2], key.shape[1] + 1), -torch.inf, dtype=logits.dtype, device=key.device)
        mask = mask.scatter(-1, selected.where(selected >= 0, key.shape[1]), 0.0)[..., :-1]
        weights = (logits + visible(mask, positions)[:, :, None]).softmax(-1)
        return torch.einsum("bqhk,bkd->bqhd", weights, value)


class Loss(nn.Module):
    """The divergence of the indexer's distribution from attention's, summed over heads, among what was selected."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, query: T, key: T, query_index: T, key_index: T, weights: T, *, positions: T | None = None) -> T:
        scores = visible(index_scores(query_index, key_index, weights), positions)
        found = scores.topk(SELECTED, -1)
        seen = found.values > -torch.inf
        logits = torch.einsum("bqhd,bqkd->bqhk", query, of_selected(key, found.indices))
        target = logits.masked_fill(~seen[:, :, None], -torch.inf).softmax(-1).mean(2)
        ours = found.values.log_softmax(-1)
        terms = torch.where(seen, target * (target.clamp(1e-9).log() - ours.masked_fill(~seen, 0.0)), 0.0).sum(-1)
        return terms if self.reduction == "none" else terms.mean() if self.reduction == "mean" else terms.sum()


class Block(nn.Module):
    """Projections, indexer, attention to a latent that is keys and values, and the indexer's loss."""

    def __init__(self, masked: bool = False, reduction: str = "mean") -> None:
        super().__init__()
        self.latent, self.latent_norm = linear(SIZE), nn.LayerNorm(SIZE, **options())
        self.rope, self.q, self.q_rope, self.o = linear(ROPE), linear(DIM), linear(HEADS * ROPE), linear(DIM)
        self.index_k, self.index_q, self.index_w = linear(SIZE), linear(DIM), linear(HEADS)
        self.indexer, self.loss = Indexer(), Loss(reduction)
        self.core = MaskedAttention() if masked else Attention()

    def forward(self, x: T) -> tuple[T, T, T]:
        latent = self.latent_norm(self.latent(x))
        key_index, query_index, weights = self.index_k(x), self.index_q(x).unflatten(-1, (HEADS, -1)), self.index_w(x)
        q, q_rope = self.q(x).unflatten(-1, (HEADS, -1)), self.q_rope(x).unflatten(-1, (HEADS, -1))
        selected = self.indexer(query_index, key_index, weights)
        out = self.core(q, latent, latent, q_rope, self.rope(x).cos(), selected=selected)
        loss = self.loss(q.detach(), latent.detach(), query_index, key_index=key_index, weights=weights)
        return self.o(out.flatten(2)), selected, loss


class Model(nn.Module):
    """Tokens and their positions, two blocks, logits; with what was selected and the sum of the indexers' losses."""

    def __init__(self, masked: bool = False, recompute: str = "") -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(n, DIM, **options()) for n in (VOCABULARY, LENGTH))
        self.layers = nn.ModuleList([Block(masked) for _ in range(2)])
        self.head = nn.Linear(DIM, VOCABULARY, **options())
        self.recompute = recompute

    def forward(self, ids: T, places: T) -> tuple[T, list[T], T]:
        x, chosen, losses = self.tokens(ids) + self.places(places), [], []
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                out, selected, loss = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")  # type: ignore
            else:
                out, selected, loss = layer(x)
            x = x + out
            chosen.append(selected)
            losses.append(loss)
        return self.head(x), chosen, losses[0] + losses[1]


def batch() -> dict[str, T]:
    ids = torch.randint(VOCABULARY, (2, LENGTH + 1), device=device_type())
    return {"ids": ids[:, :-1], "places": torch.arange(LENGTH, device=device_type())[None], "targets": ids[:, 1:]}


def total(logits: T, targets: T, index_loss: T) -> T:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.3 * index_loss
