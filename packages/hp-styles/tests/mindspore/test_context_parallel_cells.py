"""Cells that are passed q, k and v of a sharded sequence: outputs and gradients of one process."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hp_dtensor import init_device_mesh, parallelize_value_and_grad
from hp_platform import get_platform
from hp_styles import ContextParallel, context_parallel_shard, context_parallel_unshard, parallelize_module
from hp_testing import device_type, on_ranks

LENGTH, HEADS, SIZE = 8, 4, 3


class Attention(nn.Cell):
    """Attention of [batch, sequence, heads, head size]."""

    parallel_kind = "attention"

    def __init__(self, is_causal: bool):
        super().__init__()
        self.is_causal = is_causal

    def construct(self, q, k, v):
        q, k, v = (mint.permute(x, (0, 2, 1, 3)) for x in (q, k, v))
        shared = [i * k.shape[1] // q.shape[1] for i in range(q.shape[1])]
        k, v = (ops.stack([x[:, i] for i in shared], 1) for x in (k, v))
        scores = mint.matmul(q, mint.transpose(k, 2, 3)) * SIZE**-0.5
        if self.is_causal:
            hidden = Tensor(np.triu(np.ones(scores.shape[2:], dtype=np.bool_), 1))
            scores = mint.where(hidden, Tensor(float("-inf"), scores.dtype), scores)
        weights = mint.exp(scores - mint.max(scores, -1, True)[0])
        weights = weights / mint.sum(weights, -1, True)
        return mint.permute(mint.matmul(weights, v), (0, 2, 1, 3))


def tensors(kv_heads: int, dtype=np.float64) -> list[Tensor]:
    random = np.random.default_rng(0)
    shapes = (HEADS, kv_heads, kv_heads, HEADS)
    return [Tensor(random.standard_normal((2, LENGTH, heads, SIZE)).astype(dtype)) for heads in shapes]


def differentiated(cell, q, k, v, weights):
    run = parallelize_value_and_grad(lambda q, k, v: (cell(q, k, v) * weights).sum(), (0, 1, 2))
    return run(q, k, v)


def compare(style: ContextParallel, kv_heads: int, causal: bool, dtype=np.float64, tolerance=1e-12) -> None:
    mesh = init_device_mesh(device_type(), (get_platform().groups.size(),), mesh_dim_names=("cp",))
    balance = style.settings.load_balance
    single, cell = Attention(causal), Attention(causal)
    parallelize_module(cell, mesh, style)
    whole = tensors(kv_heads, dtype)
    expected, gradients = differentiated(single, *whole)
    parts = context_parallel_shard(whole, mesh, load_balance=balance)
    got, own = differentiated(cell, *parts)
    get_platform().collectives.all_reduce(got, group=mesh.get_group())
    np.testing.assert_allclose(got.asnumpy(), expected.asnumpy(), rtol=tolerance)
    for one, other in zip(own, gradients, strict=True):
        back = context_parallel_unshard(one, mesh, load_balance=balance)
        np.testing.assert_allclose(back.asnumpy(), other.asnumpy(), rtol=tolerance, atol=tolerance)


def named(**options) -> ContextParallel:
    return ContextParallel(qkv_indices=(0, 1, 2), **options)


@on_ranks(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("load_balance", [False, True])
@pytest.mark.parametrize("degree", [None, 1])
def test_two_ranks(degree, load_balance, causal):
    for kv_heads in (4, 2, 1):
        compare(named(ulysses_degree=degree, load_balance=load_balance), kv_heads, causal)


@on_ranks(4)
@pytest.mark.parametrize("degrees", [(2, 2), (2, 1), (1, 2), (1, 4)], ids=["2x2x1", "2x1x2", "1x2x2", "1x4x1"])
def test_heads_inner_and_outer_rings(degrees):
    ulysses, inner = degrees
    compare(named(ulysses_degree=ulysses, inner_ring_degree=inner, load_balance=True), 2, True)


@on_ranks(2)
def test_low_precision():
    compare(named(ulysses_degree=1), 2, True, np.float32, 1e-5)


class Masked(Attention):
    def __init__(self, p: float):
        super().__init__(True)
        self.drop = nn.Dropout(p=p)

    def construct(self, q, k, v, mask=None):
        return self.drop(super().construct(q, k, v))


@on_ranks(2)
def test_what_attention_in_the_place_of_a_cell_would_leave_out_is_refused():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("cp",))
    q, k, v, _ = context_parallel_shard(tensors(2), mesh)
    cell, dropping = (parallelize_module(Masked(p), mesh, named(ulysses_degree=1)) for p in (0.0, 0.5))
    cell(q, k, v)
    cell(q, k, v, mask=None)
    for args, kwargs, text in (((q,), {}, r"inputs \[3\]"), ((), {"mask": q}, r"inputs \['mask'\]")):
        with pytest.raises(NotImplementedError, match=rf"Cell Masked: around a ring of 2 ranks .* without the {text}"):
            cell(q, k, v, *args, **kwargs)
    dropping.set_train(False)
    dropping(q, k, v)
    dropping.set_train()
    with pytest.raises(NotImplementedError, match="without the dropout of drop: leave that out, or take ulysses_de"):
        dropping(q, k, v)
    whole = parallelize_module(Masked(0.5), mesh, named())
    assert whole(q, k, v).shape == q.shape


class Other(Attention):
    parallel_kind = "other"


@on_ranks(2)
def test_what_is_refused():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("cp",))
    with pytest.raises(
        NotImplementedError, match="the Cell Attention: MindSpore's attention is not intercepted; apply"
    ):
        parallelize_module(Attention(True), mesh, ContextParallel())
    for style in (named(), ContextParallel(qkv_kwarg_names=("q", "k", "v"))):
        parallelize_module(Attention(True), mesh, style)
    with pytest.raises(NotImplementedError, match="the Cell Other: around a ring of 2 ranks .*parallel_kind = 'atten"):
        parallelize_module(Other(True), mesh, named(ulysses_degree=1))
    parallelize_module(Other(True), mesh, named())
    cell = parallelize_module(Attention(True), mesh, named(ulysses_degree=1))
    with pytest.raises(RuntimeError, match="Attention already has a context parallel style"):
        parallelize_module(cell, mesh, named())
    rank = get_platform().groups.rank()
    q, k, v, _ = context_parallel_shard(tensors(2), mesh)
    with pytest.raises(ValueError, match="parts of different shapes, or differ in is_causal"):
        cell(*(x[:, : 4 - 2 * rank] for x in (q, k, v)))
    with pytest.raises(TypeError, match="q is Float64, k Float32|ranks .1. refuse this step"):
        cell(q, k.astype(ms.float32) if rank else k, v)
    odd = parallelize_module(Attention(True), mesh, named(load_balance=True))
    with pytest.raises(ValueError, match="load_balance needs two equal chunks per rank, but q of shape .2, 3, 4, 3."):
        odd(*(x[:, :3] for x in (q, k, v)))
    with pytest.raises(ValueError, match="3 query heads .* do not divide over a Ulysses group of 2 ranks"):
        parallelize_module(Attention(True), mesh, named())(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="a sequence of length 6 .* into 4 chunks; pad it to 8"):
        context_parallel_shard(tensors(2)[0][:, :6], mesh, load_balance=True)
