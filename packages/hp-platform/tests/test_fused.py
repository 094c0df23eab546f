"""Fused operators against plain math in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch

from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]


def same(fused, plain, *inputs: torch.Tensor) -> None:
    """Compare the results and the gradients, the fused ones in float32 on the device."""
    given = [x.to(device_type(), torch.float32).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    made, expected = fused(*given), plain(*exact)
    made, expected = [[x] if isinstance(x, torch.Tensor) else list(x) for x in (made, expected)]
    slopes = [torch.randn_like(x) for x in expected]
    torch.autograd.backward(made, [slope.to(device_type(), torch.float32) for slope in slopes])
    torch.autograd.backward(expected, slopes)
    for got, want in zip([*made, *(x.grad for x in given)], [*expected, *(x.grad for x in exact)]):
        torch.testing.assert_close(got.detach().cpu().double(), want.detach(), rtol=1e-4, atol=1e-5)


def attend(q, k, v, *, scale, seen):
    """Plain attention with heads first; every key head serves as many query heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    return logits.softmax(-1) @ v


@on_ranks(1)
@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("kind", ["full", "causal", "mask"])
@pytest.mark.parametrize("rows", [6, 4])
def test_flash_attention(layout, kind, rows):
    q, k, v = torch.randn(2, 4, rows, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    seen = torch.ones(rows, 6, dtype=torch.bool)
    options = {}
    if kind == "causal":
        seen, options = seen.tril(6 - rows), {"causal": True}
    elif kind == "mask":
        seen = (torch.rand(2, 1, rows, 6) > 0.3).logical_or(torch.eye(rows, 6, dtype=torch.bool))
        options = {"mask": seen.to(device_type())}
    flash = get_platform().fused.flash_attention

    def fused(*inputs):
        if layout == "BNSD":
            return flash(*inputs, layout=layout, scale=0.3, **options)
        return flash(*(x.transpose(1, 2) for x in inputs), layout=layout, scale=0.3, **options).transpose(1, 2)

    same(fused, lambda *x: attend(*x, scale=0.3, seen=seen), q, k, v)


@on_ranks(1)
@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 1), (4, 6, 6), (1, 6, 6), (2, 1, 1, 6)])
def test_masks_of_every_shape_that_broadcasts(shape):
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    seen = torch.rand(shape) > 0.4
    seen[..., 0] = True
    mask = seen.to(device_type())
    flash = get_platform().fused.flash_attention
    same(
        lambda *x: flash(*x, layout="BNSD", scale=0.3, mask=mask), lambda *x: attend(*x, scale=0.3, seen=seen), q, k, v
    )


@on_ranks(1)
def test_rms_norm():
    def plain(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight

    fused = get_platform().fused.rms_norm
    same(lambda x, w: fused(x, w, 1e-3), plain, torch.randn(2, 3, 8), torch.randn(8))


@on_ranks(1)
@pytest.mark.parametrize("dim", [-1, 1])
def test_swiglu(dim):
    def plain(x):
        gate, up = x.chunk(2, dim)
        return gate * gate.sigmoid() * up

    same(lambda x: get_platform().fused.swiglu(x, dim), plain, torch.randn(2, 6, 8))


@on_ranks(1)
def test_rotary():
    def plain(q, k, cos, sin):
        turned = [torch.cat((-x[..., 4:], x[..., :4]), -1) for x in (q, k)]
        return q * cos + turned[0] * sin, k * cos + turned[1] * sin

    angles = torch.randn(1, 5, 1, 8)
    same(
        get_platform().fused.rotary, plain, torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), angles.cos(), angles.sin()
    )


@on_ranks(1)
def test_what_does_not_fit_is_refused():
    fused = get_platform().fused
    q, k = (torch.zeros(shape, device=device_type()) for shape in [(2, 6, 4, 8), (2, 6, 3, 8)])
    with pytest.raises(ValueError, match=r"q heads divisible by k's, got q \(2, 6, 4, 8\), k \(2, 6, 3, 8\)"):
        fused.flash_attention(q, k, k)
    with pytest.raises(ValueError, match="Unknown layout 'SBH'; expected one of BSND, BNSD"):
        fused.flash_attention(q, q, q, layout="SBH")
    mask = torch.ones(6, 6, dtype=torch.bool, device=device_type())
    with pytest.raises(ValueError, match="causal=True or a mask, not both: include causality in the mask"):
        fused.flash_attention(q, q, q, causal=True, mask=mask)
    x = torch.randn(2, 6, 4, 8, device=device_type())
    torch.testing.assert_close(
        fused.flash_attention(x, x, x, mask=mask.tril()), fused.flash_attention(x, x, x, causal=True)
    )
    with pytest.raises(TypeError, match="needs q, k and v of one dtype"):
        fused.flash_attention(q, q.half(), q)
    with pytest.raises(ValueError, match=r"weight of shape \(4,\) must equal the last dims of x, \(2, 6, 4, 8\)"):
        fused.rms_norm(q, torch.ones(4, device=device_type()))
    with pytest.raises(ValueError, match=r"dim -1 of shape \(2, 3\) has an odd size"):
        fused.swiglu(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"cos and sin that broadcast to it, got \(6, 8\)"):
        fused.rotary(q, q, torch.ones(6, 8), torch.ones(6, 8))
    with pytest.raises(ValueError, match=r"swiglu: dim 9 is out of range for shape \(2, 4\)"):
        fused.swiglu(torch.zeros(2, 4), 9)
    with pytest.raises(TypeError, match="needs a bool mask, True where a query may attend, got torch.float32"):
        fused.flash_attention(q, q, q, mask=torch.ones(6, 6))
    with pytest.raises(ValueError, match=r"mask of shape \(5, 6\) does not broadcast to \(2, 4, 6, 6\)"):
        fused.flash_attention(q, q, q, mask=torch.ones(5, 6, dtype=torch.bool))
    if device_type() == "npu":
        with pytest.raises(TypeError, match="swiglu on an NPU takes float16, bfloat16 or float32, got torch.float64"):
            fused.swiglu(q.double())
