"""Grouped products, against a product a group."""

from __future__ import annotations

import pytest
import torch

from hp_platform.frames import frame
from hp_platform.torch.grouped import grouped_linear
from hp_platform.torch.heavy import DeferredGradients
from hp_testing import device_type

pytestmark = pytest.mark.framework("torch")


def case(dtype, transposed):
    torch.manual_seed(0)
    x = torch.randn(9, 8, dtype=dtype, device=device_type(), requires_grad=True)
    shape = (4, 8, 12) if transposed else (4, 12, 8)
    return x, torch.randn(*shape, dtype=dtype, device=device_type(), requires_grad=True), [3, 0, 5, 1]


def reference(x, weight, sizes, transposed):
    pairs = zip(x.split(sizes), weight, strict=True)
    return torch.cat([rows @ (matrix if transposed else matrix.t()) for rows, matrix in pairs])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float64, True), (torch.float32, True), (torch.float32, False)])
@pytest.mark.parametrize("deferred", [False, True])
def test_groups_equal_products_of_their_own(dtype, kernel, transposed, deferred):
    x, weight, sizes = case(dtype, transposed)
    expected = reference(x, weight, sizes, transposed)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (x, weight), grad)
    queue = DeferredGradients()
    with frame(weights=queue if deferred else None):
        out = grouped_linear(x, weight, sizes, transposed=transposed, kernel=kernel)
    out.backward(grad)
    if deferred:
        assert weight.grad is None and len(queue) == 1
        queue.run()
    for got, wanted in zip((out, x.grad, weight.grad), (expected, *gradients), strict=True):
        torch.testing.assert_close(got, wanted)
    assert not weight.grad[1].any()  # a group without rows


def test_no_rows_at_all():
    weight = torch.randn(2, 12, 8, dtype=torch.float64, device=device_type(), requires_grad=True)
    x = torch.zeros(0, 8, dtype=torch.float64, device=device_type(), requires_grad=True)
    grouped_linear(x, weight, [0, 0]).sum().backward()
    assert x.grad.shape == (0, 8) and not weight.grad.any()


@pytest.mark.parametrize(
    ("sizes", "transposed", "text"),
    [
        ([3, 6], False, r"4 groups need as many sizes that add up to 9 rows, got 2 that add up to 9"),
        ([3, 0, 5, 2], False, r"add up to 9 rows, got 4 that add up to 10"),
        ([3, 0, 5, 1], True, r"weight \[groups, in, out\], got \(9, 8\) and \(4, 12, 8\)"),
    ],
)
def test_what_does_not_fit_is_refused(sizes, transposed, text):
    x, weight, _ = case(torch.float64, False)
    with pytest.raises(ValueError, match=text):
        grouped_linear(x, weight, sizes, transposed=transposed)


def test_more_rows_than_32_bits_count_are_refused(monkeypatch):
    x, weight = torch.zeros(1, 4).expand(2**31, 4), torch.zeros(1, 4, 4)
    with pytest.raises(
        ValueError, match="2147483648 rows are more than 2147483647, which its kernels count in 32 bits"
    ):
        grouped_linear(x, weight, [2**31])
    monkeypatch.setattr("hp_platform.torch.grouped._MOST_ROWS", 5)
    x, weight = torch.randn(9, 4), torch.randn(2, 4, 4)
    with pytest.raises(ValueError, match="9 rows are more .* call it for some of them at a time"):
        grouped_linear(x, weight, [3, 6])
    parts = [grouped_linear(x[:5], weight, [3, 2]), grouped_linear(x[5:], weight, [0, 4])]
    torch.testing.assert_close(torch.cat(parts), torch.cat([x[:3] @ weight[0].mT, x[3:] @ weight[1].mT]))
