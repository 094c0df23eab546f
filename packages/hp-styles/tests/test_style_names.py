"""Styles by name, and a whole transformer with its activations sharded along the sequence between the blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_styles import ColwiseParallel, ParallelStyle, loss_parallel, parallelize_module, sequence_parallel_plan
from hp_styles.names import ALIASES, STYLES, named_style
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()
OPTIONS: dict[str, Any] = {"dtype": torch.float64, "device": device_type()}


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False, **OPTIONS) for _ in range(4))
        self.q_norm, self.heads = nn.RMSNorm(dim // heads, **OPTIONS), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = (m(x).view(batch, length, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, **OPTIONS), nn.LayerNorm(dim, **OPTIONS)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential()
        self.mlp.add_module("up", nn.Linear(dim, 3 * dim, **OPTIONS))
        self.mlp.add_module("act", nn.GELU())
        self.mlp.add_module("down", nn.Linear(3 * dim, dim, **OPTIONS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 11, dim: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim, **OPTIONS)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim, **OPTIONS), nn.Linear(dim, vocabulary, bias=False, **OPTIONS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


PLAN = {
    "layers.*.attention.[qkv]": "colwise",
    "layers.*.attention.o": "rowwise",
    "layers.*.attention.q_norm": "replicated_with_grad_allreduce",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
    "head": "colwise",
}
NORMS = ["layers.*.norm1", "layers.*.norm2", "norm"]
TENSOR = {**PLAN, "embed": "embedding_rowwise", **dict.fromkeys(NORMS, "replicate")}


@on_ranks(2, 4)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_transformer_by_names_equals_one_process(sequence: bool, ranks: int) -> None:
    model, mesh = Transformer(), init_device_mesh(device_type(), (ranks,), ("tp",))
    reference = copy.deepcopy(model)
    tokens = torch.randint(0, 11, (2, 6), device=device_type())
    targets = torch.randint(0, 11, (2, 6), device=device_type())
    want = F.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten())
    want.backward()
    plan = sequence_parallel_plan(PLAN, norms=NORMS, embedding="embed") if sequence else TENSOR
    parallelize_module(model, mesh, plan)
    seen: list[Any] = []
    model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out.placements))
    with count_collectives() as forward, loss_parallel():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    with count_collectives() as backward:
        loss.backward()
    assert seen == [(Shard(1) if sequence else R,)]
    torch.testing.assert_close(loss.full_tensor(), want, rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(p.grad, DTensor), name
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-12, msg=name)
    # 4 sums in the blocks, that of the embedding, the loss's 2; backward the head's input and, at its end, the
    # partial gradients of the parameters that are replicated
    if sequence:
        gather = "all_gather" if 6 % ranks == 0 else "all_to_all"
        assert dict(forward) == {"reduce_scatter": 5, gather: 5, "all_reduce": 2}
        assert backward["reduce_scatter"] == 5 and backward[gather] == 5 and backward["all_reduce"] == 1
    else:
        assert dict(forward) == {"all_reduce": 7} and backward["all_reduce"] == 6


@on_ranks(2)
def test_a_name_is_its_style() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tp",))
    linear = parallelize_module(nn.Linear(4, 6, **OPTIONS), mesh, "colwise_rep")
    out = linear(torch.ones(3, 4, **OPTIONS))
    assert linear.weight.placements == (Shard(0),) and out.placements == (R,)
    linear = parallelize_module(nn.Linear(4, 6, **OPTIONS), mesh, "rowwise_rep")
    out = linear(torch.ones(3, 4, **OPTIONS))
    assert linear.weight.placements == (Shard(1),) and out.placements == (R,)
    model = nn.ModuleDict({"a": nn.Linear(4, 4, **OPTIONS), "b": nn.Linear(4, 4, **OPTIONS)})
    parallelize_module(model, mesh, {"a": "colwise", "b": ColwiseParallel()})
    x = distribute_tensor(torch.ones(3, 4, **OPTIONS), mesh, [R])
    assert type(model["a"](x)) is DTensor and type(model["b"](x)) is torch.Tensor


def test_every_name_makes_a_style() -> None:
    others = {name for each in STYLES.values() for name in (each.counterpart, each.scattered) if name is not None}
    assert others | set(ALIASES.values()) <= set(STYLES)
    assert all(isinstance(named_style(name), ParallelStyle) for name in [*STYLES, *ALIASES])
    assert named_style("colwise") is not named_style("colwise"), "a style of each module"


@on_ranks(1)
def test_names_that_are_none() -> None:
    mesh, model = init_device_mesh(device_type(), (1,), ("tp",)), nn.Linear(2, 2, **OPTIONS)
    with pytest.raises(ValueError, match="unknown style 'colwize'; did you mean colwise"):
        parallelize_module(model, mesh, {"": "colwize"})
    with pytest.raises(ValueError, match="unknown style 'moe'; the names are colwise, colwise_gather_output"):
        parallelize_module(model, mesh, "moe")
    with pytest.raises(TypeError, match="'o' must have the name of a style, .* got a ColwiseParallel"):
        sequence_parallel_plan({"o": ColwiseParallel()}, norms=[])  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="the norm 'norm' is 'replicate' in the plan; name it once"):
        sequence_parallel_plan({"norm": "replicate"}, norms=["norm"])
