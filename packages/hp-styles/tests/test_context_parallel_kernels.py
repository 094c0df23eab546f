"""The kernels that give attention and its normaliser, each against the plain products in float64."""

from __future__ import annotations

import pytest
import torch

from hp_styles.torch.context.ring import KERNELS, kernel_for
from hp_testing import device_type

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]
PLAIN = KERNELS[-1]


def _given(dtype: torch.dtype, rows: int, columns: int) -> list[torch.Tensor]:
    made = (torch.randn(2, 40, 3, 8, device=device_type(), dtype=torch.float64).to(dtype) for _ in range(4))
    q, k, v, grad = (x.transpose(1, 2) for x in made)
    return [q[:, :, :rows], k[:, :, :columns], v[:, :, -columns:], grad[:, :, -rows:]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns", "causal"), [(6, 6, True), (33, 33, True), (7, 34, False), (40, 3, False)])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_equals_plain_products(kernel, dtype, rows, columns, causal) -> None:
    q, k, v, grad = _given(dtype, rows, columns)
    if not kernel.takes(q, k, v):
        assert kernel_for(q, k, v) is not kernel
        return
    exact = [x.double().detach().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT * 0.4
    if causal:
        scores = scores.masked_fill(torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    want = scores.softmax(-1) @ exact[2]
    want.backward(grad.double())
    out, lse = kernel.forward(q, k, v, causal, 0.4)
    made = kernel.backward(grad, q, k, v, out, lse.contiguous(), causal, 0.4)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.08}[dtype]
    assert out.dtype == dtype and out.shape == q.shape
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=tolerance)
    for found, wanted in zip((out, *made), (want, *(x.grad for x in exact)), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)


def test_what_no_fused_kernel_takes_is_computed_by_products() -> None:
    q, k, v, _ = _given(torch.float64, 4, 4)
    assert kernel_for(q, k, v[..., :3]) is PLAIN or device_type() == "cuda"
    if device_type() == "cpu":
        assert kernel_for(q, k, v).name == "flash, CPU"
