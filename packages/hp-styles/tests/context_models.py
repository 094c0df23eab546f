"""The model whose attention the tests of context parallelism cut, its data, and its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import init_device_mesh
from hp_platform import get_platform
from hp_testing import device_type

HEADS, SIZE, LENGTH, VOCABULARY = 4, 2, 16, 11
DIM = HEADS * SIZE


class Attention(nn.Module):
    """Projections and torch's attention, written for one device."""

    def __init__(self, kv_heads: int, causal: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.float64, "device": device_type(), "bias": False}
        self.q, self.o = nn.Linear(DIM, DIM, **options), nn.Linear(DIM, DIM, **options)
        self.k, self.v = nn.Linear(DIM, kv_heads * SIZE, **options), nn.Linear(DIM, kv_heads * SIZE, **options)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, -1, SIZE).transpose(1, 2) for each in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


class Model(nn.Module):
    """Tokens and their positions, two layers, logits."""

    def __init__(self, kv_heads: int = HEADS, causal: bool = True, recompute: str = "") -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.float64, "device": device_type()}
        self.tokens, self.places = (nn.Embedding(n, DIM, **options) for n in (VOCABULARY, LENGTH))
        self.layers = nn.ModuleList([Attention(kv_heads, causal) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(DIM, **options) for _ in range(2)])
        self.head = nn.Linear(DIM, VOCABULARY, **options)
        self.recompute = recompute

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers[index](self.norms[index](x))

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(places)
        for index in range(2):
            again = {"use_reentrant": self.recompute == "reentrant"}
            recomputed = self.recompute and torch.is_grad_enabled()
            x = checkpoint(self.layer, index, x, **again) if recomputed else self.layer(index, x)
        return self.head(x)


def context_mesh() -> Any:
    return init_device_mesh(device_type(), (dist.get_world_size(),), ("cp",))


def random_batch(length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (2, length + 1), device=device_type())
    places = torch.arange(length, device=device_type())[None]
    return {"ids": ids[:, :-1], "places": places, "targets": ids[:, 1:]}


def sum_over_ranks(x: torch.Tensor, group: Any = None) -> None:
    get_platform().collectives.all_reduce(x, group=group or dist.group.WORLD)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
