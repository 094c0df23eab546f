"""Fused operators on MindSpore against NumPy in float64, forward and backward; Ascend's calls by their signatures."""

from __future__ import annotations

import inspect

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, ops

from hp_platform import fused, get_platform
from hp_platform.mindspore import fused as primitives
from hp_testing import on_ranks


def same(made, plain, *inputs):
    """Compare the results, and the gradient along a direction with the difference quotient of NumPy's."""
    random = np.random.default_rng(1)
    expected = plain(*inputs)
    slopes = [random.standard_normal(x.shape) for x in expected]
    directions = [random.standard_normal(x.shape) for x in inputs]

    def weighted(*given):
        results = made(*given)
        results = results if isinstance(results, tuple) else (results,)
        return sum((x * Tensor(s.astype(np.float32))).sum() for x, s in zip(results, slopes)), results

    given = [Tensor(x.astype(np.float32)) for x in inputs]
    (_, results), grads = mindspore.value_and_grad(weighted, tuple(range(len(given))), has_aux=True)(*given)
    grads = grads if isinstance(grads, tuple) else (grads,)  # MindSpore unpacks a tuple of one
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got.asnumpy(), want, rtol=1e-4, atol=1e-5)
    step = 1e-5
    ahead, behind = (plain(*(x + h * d for x, d in zip(inputs, directions))) for h in (step, -step))
    wanted = sum(((a - b) / (2 * step) * s).sum() for a, b, s in zip(ahead, behind, slopes))
    found = sum((g.asnumpy() * d).sum() for g, d in zip(grads, directions))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def attend(q, k, v, *, scale, seen):
    """Plain attention with heads first; every key head serves as many query heads."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = np.where(seen, q @ np.swapaxes(k, 2, 3) * scale, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return ((weights / weights.sum(-1, keepdims=True)) @ v,)


@on_ranks(1)
@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("kind", ["full", "causal", "mask"])
@pytest.mark.parametrize("rows", [6, 4])
def test_flash_attention(layout, kind, rows):
    seen, options = np.ones((rows, 6), bool), {}
    if kind == "causal":
        seen, options = np.tril(seen, 6 - rows), {"causal": True}
    elif kind == "mask":
        seen = (draw(2, 1, rows, 6) > -0.5) | np.eye(rows, 6, dtype=bool)
        options = {"mask": Tensor(seen)}
    flash = get_platform().fused.flash_attention

    def made(*inputs):
        if layout == "BNSD":
            return flash(*inputs, layout=layout, scale=0.3, **options)
        return flash(*(x.swapaxes(1, 2) for x in inputs), layout=layout, scale=0.3, **options).swapaxes(1, 2)

    given = draw(2, 4, rows, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8)
    same(made, lambda *x: attend(*x, scale=0.3, seen=seen), *given)


@on_ranks(1)
def test_a_query_that_sees_nothing_finds_zeros_and_spoils_no_other():
    q, k, v = draw(1, 2, 4, 8), draw(1, 2, 4, 8), draw(1, 2, 4, 8)
    seen = np.tril(np.ones((4, 4), bool))
    seen[0] = False
    mask = Tensor(seen)
    found = (
        get_platform()
        .fused.flash_attention(*(Tensor(x.astype(np.float32)) for x in (q, k, v)), layout="BNSD", scale=0.3, mask=mask)
        .asnumpy()
    )
    seen[0] = True
    (expected,) = attend(q, k, v, scale=0.3, seen=seen)
    np.testing.assert_allclose(found[:, :, 1:], expected[:, :, 1:], rtol=1e-4, atol=1e-5)
    assert not found[:, :, 0].any()


@on_ranks(1)
def test_the_norm_of_large_half_precision_numbers():
    x = Tensor(np.full((2, 8), 300.0, np.float16))
    made = get_platform().fused.rms_norm(x, Tensor(np.ones(8, np.float32)))
    assert made.dtype == mindspore.float16
    np.testing.assert_allclose(made.asnumpy(), 1.0, rtol=1e-3)


@on_ranks(1)
def test_the_other_operators():
    def norm(x, weight):
        return (x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * weight,)

    def gated(x):
        gate, up = np.split(x, 2, 1)
        return (gate / (1 + np.exp(-gate)) * up,)

    def turned(q, k, cos, sin):
        return tuple(x * cos + np.concatenate((-x[..., 4:], x[..., :4]), -1) * sin for x in (q, k))

    ours = get_platform().fused
    same(lambda x, w: ours.rms_norm(x, w, 1e-3), norm, draw(2, 3, 8), draw(8))
    same(lambda x: ours.swiglu(x, 1), gated, draw(2, 6, 8))
    same(ours.rotary, turned, draw(2, 5, 4, 8), draw(2, 5, 2, 8), draw(1, 5, 1, 8), draw(1, 5, 1, 8))


def test_what_does_not_fit_is_refused():
    q, k = (Tensor(np.zeros(shape, np.float32)) for shape in [(2, 6, 4, 8), (2, 6, 3, 8)])
    with pytest.raises(ValueError, match=r"q heads divisible by k's, got q \(2, 6, 4, 8\), k \(2, 6, 3, 8\)"):
        fused.flash_attention(q, k, k)
    with pytest.raises(TypeError, match="needs q, k and v of one dtype"):
        fused.flash_attention(q, q.astype(mindspore.float16), q)
    with pytest.raises(ValueError, match=r"weight of shape \(4,\) must equal the last dims"):
        fused.rms_norm(q, Tensor(np.ones(4, np.float32)))
    with pytest.raises(ValueError, match="has an odd size"):
        fused.swiglu(Tensor(np.zeros((2, 3), np.float32)))
    with pytest.raises(ValueError, match=r"cos and sin that broadcast to it, got \(2, 6, 3, 8\)"):
        fused.rotary(q, q, k, k)


def test_ascends_calls_fit_mindspores_signatures(monkeypatch):
    """Ascend is not here: the calls are recorded, with their arguments by MindSpore's own names."""
    calls = {}

    class Ascend:
        class capabilities:
            fused_operators = True

    def recorded(name):
        signature = inspect.signature(getattr(ops, name))

        def call(*args, **kwargs):
            calls[name] = signature.bind(*args, **kwargs).arguments
            return args

        return call

    for name in ("flash_attention_score", "rms_norm", "swiglu", "rotary_position_embedding"):
        monkeypatch.setattr(ops, name, recorded(name))
    monkeypatch.setattr(primitives, "devices", Ascend)
    x = Tensor(np.zeros((2, 6, 4, 8), np.float16))
    fused.flash_attention(x, x, x, causal=True)
    score = calls["flash_attention_score"]
    assert (score["head_num"], score["input_layout"], score["sparse_mode"]) == (4, "BSND", 3)
    assert score["attn_mask"].shape == (2048, 2048)
    assert score["attn_mask"][0, :2].asnumpy().tolist() == [False, True]  # true is hidden
    fused.flash_attention(x, x, x, mask=Tensor(np.ones((1, 6, 6), bool)))
    score = calls["flash_attention_score"]
    assert score["attn_mask"].shape == (2, 1, 6, 6)
    assert not score["attn_mask"].asnumpy().any()
    fused.rms_norm(x, Tensor(np.ones(8, np.float16)), 1e-3)
    fused.swiglu(x, 1)
    fused.rotary(x, x, x, x)
    assert calls["rms_norm"]["epsilon"] == 1e-3
    assert calls["swiglu"]["dim"] == 1
    assert set(calls["rotary_position_embedding"]) == {"x", "cos", "sin"}
    with pytest.raises(TypeError, match="flash_attention on Ascend takes float16, bfloat16, got Float32"):
        fused.flash_attention(*[x.astype(mindspore.float32)] * 3)
