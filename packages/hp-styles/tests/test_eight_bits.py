"""Products in eight bits of experts and of blocks: the numbers that torchao's own casts and products give."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_styles.torch.eight_bits import EmulatedLinear, grouped_product

pytest.importorskip("torchao", reason="needs torchao: nox -s low_precision")

SIZES = (7, 0, 33, 24)
FORMATS = ["float8-rowwise", "mxfp8"]


def operands(sizes: tuple[int, ...] = SIZES) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    rows, weight = torch.randn(sum(sizes), 64).requires_grad_(), torch.randn(len(sizes), 96, 64).requires_grad_()
    return rows, weight, torch.randn(sum(sizes), 96).bfloat16().float()


def run(form: Any, sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The output, and the gradients of rows and weight."""
    rows, weight, gradient = (each.detach().to(dtype) for each in operands(sizes))
    rows, weight = rows.requires_grad_(), weight.requires_grad_()
    out = grouped_product(rows, weight, sizes, False, form=form, emulated=True)
    out.backward(gradient)
    assert rows.grad is not None and weight.grad is not None
    return [out.detach(), rows.grad, weight.grad]


def close(got: torch.Tensor, expected: torch.Tensor, limit: float) -> bool:
    return bool((got - expected).abs().max() <= limit * expected.abs().max())


def test_rows_have_the_scales_of_torchaos_kernels():
    """torchao tests its kernels by these functions of its own."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
    from torchao.prototype.moe_training import utils

    cast = functools.partial(
        tensor_to_scale,
        float8_dtype=torch.float8_e4m3fn,
        scaling_granularity=ScalingGranularity.AXISWISE,
        round_scales_to_power_of_2=True,
    )

    def numbers(values: torch.Tensor, dim: int) -> torch.Tensor:
        scale = cast(values, axiswise_dim=dim)
        return to_fp8_saturated(values * scale, torch.float8_e4m3fn).float() / scale

    rows, weight, gradient = (each.detach() for each in operands())
    out, of_rows, of_weight = run("float8-rowwise")
    right = numbers(weight, 2)
    expected = [part @ right[at].t() for at, part in enumerate(numbers(rows, 1).split(SIZES))]
    assert close(out, torch.cat(expected), 1e-6)
    back = [part @ numbers(weight, 1)[at] for at, part in enumerate(numbers(gradient, 1).split(SIZES))]
    assert close(of_rows, torch.cat(back), 1e-6)
    used = [size for size in SIZES if size]
    ends = torch.tensor(used).cumsum(0).to(torch.int32)
    left, left_scales = utils.torch_to_float8_per_group_colwise(gradient, ends, round_scales_to_power_of_2=True)
    right, right_scales = utils.torch_to_float8_per_group_colwise(rows, ends, round_scales_to_power_of_2=True)
    wide = [
        (data.float().split(used), scales.reshape(len(used), 1, -1))
        for data, scales in ((left, left_scales), (right, right_scales))
    ]
    for at, group in enumerate(group for group, size in enumerate(SIZES) if size):
        one, other = (data[at] / scales[at] for data, scales in wide)
        assert close(of_weight[group], one.t() @ other, 1e-6)
    assert not of_weight[1].any()


def test_blocks_are_those_of_torchaos_emulation():
    """It multiplies in bfloat16, which has the cast numbers exactly, and rounds results to it."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common import KernelPreference

    sizes = (32, 96, 64)
    rows, weight, gradient = operands(sizes)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    kernels: Any = KernelPreference.EMULATED
    out = _to_mxfp8_then_scaled_grouped_mm(rows, weight.transpose(1, 2), ends, kernel_preference=kernels)
    out.backward(gradient.to(out.dtype))
    results = run("mxfp8", sizes)
    for got, expected in zip(results[:2], (out.detach(), rows.grad), strict=True):
        assert expected is not None and close(got, expected.float(), 2**-8)
    assert weight.grad is not None and close(results[2], weight.grad, 2**-8)


def test_a_linear_layer_of_blocks_is_torchaos():
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common import KernelPreference

    torch.manual_seed(0)
    kernels: Any = KernelPreference.EMULATED
    reference, layer = MXFP8Linear(64, 96, kernel_preference=kernels), EmulatedLinear(64, 96)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(4, 16, 64)
    for net in (reference, layer):
        net(x).square().mean().backward()
    assert close(layer(x), reference(x), 1e-6)
    for one, other in zip(layer.parameters(), reference.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and close(one.grad, other.grad, 1e-6)


def test_torchaos_function_gets_groups_that_kernels_take(monkeypatch: pytest.MonkeyPatch):
    """It emulates its kernels here, which assert shapes and layouts alike."""
    from torchao.prototype.moe_training import mxfp8_grouped_mm
    from torchao.quantization.quantize_.common import KernelPreference

    name = "_to_mxfp8_then_scaled_grouped_mm"
    emulates: Any = functools.partial(getattr(mxfp8_grouped_mm, name), kernel_preference=KernelPreference.EMULATED)
    monkeypatch.setattr(mxfp8_grouped_mm, name, emulates)
    rows, weight, gradient = operands()
    out = grouped_product(rows, weight, SIZES, False, form="mxfp8", emulated=False)
    out.backward(gradient)
    assert rows.grad is not None and weight.grad is not None
    for got, expected in zip((out.detach(), rows.grad, weight.grad), run("mxfp8"), strict=True):
        assert got.dtype is torch.float32 and close(got, expected, 2**-7)


def test_torchaos_function_of_rows_gets_groups_that_kernels_take(monkeypatch: pytest.MonkeyPatch):
    """Its kernels are for GPUs: what they are called with is what they ask for."""
    from torchao.prototype.moe_training import fp8_grouped_mm
    from torchao.prototype.moe_training.utils import _is_column_major

    name = "_to_fp8_rowwise_then_scaled_grouped_mm"
    signature = inspect.signature(getattr(fp8_grouped_mm, name))

    def multiply(*args: Any, **named: Any) -> torch.Tensor:
        left, right, ends = (given := signature.bind(*args, **named).arguments)["A"], given["B_t"], given["offs"]
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        assert given["pad_token_groups_for_grouped_mm"] is False and ends.dtype is torch.int32
        assert all(size and size % 16 == 0 for size in sizes) and _is_column_major(right) and left.is_contiguous()
        out = grouped_product(left, right.transpose(1, 2), sizes, False, form="float8-rowwise", emulated=True)
        return out.bfloat16()

    monkeypatch.setattr(fp8_grouped_mm, name, multiply)
    rows, weight, _ = operands()
    turned = weight.detach().transpose(1, 2).contiguous()
    out = grouped_product(rows, turned, SIZES, True, form="float8-rowwise", emulated=False)
    assert out.dtype is torch.float32 and close(out.detach(), run("float8-rowwise")[0], 2**-8)


@pytest.mark.parametrize("form", FORMATS)
def test_zeros_after_a_group_change_nothing(form: str):
    """So groups can be padded for kernels: Note [Groups in blocks]."""
    rows, weight, gradient = (each.detach() for each in operands())
    padded = [-(-size // 32) * 32 for size in SIZES]
    pad = [F.pad(torch.arange(1, size + 1), (0, to - size)) for size, to in zip(SIZES, padded, strict=True)]
    own = torch.cat(pad) > 0
    left = torch.zeros(sum(padded), 64)
    left[own] = rows
    weight.requires_grad_()
    out = grouped_product(left, weight, padded, False, form=form, emulated=True)  # type: ignore[arg-type]
    back = torch.zeros(sum(padded), 96)
    back[own] = gradient
    out.backward(back)
    expected = run(form)
    assert close(out[own].detach(), expected[0], 1e-6) and weight.grad is not None
    assert close(weight.grad, expected[2], 1e-6)


@pytest.mark.parametrize("form", FORMATS)
def test_a_transposed_weight_and_float64(form: str):
    rows, weight, gradient = (each.detach().double() for each in operands())
    weight = weight.transpose(1, 2).contiguous().requires_grad_()
    rows.requires_grad_()
    out = grouped_product(rows, weight, SIZES, True, form=form, emulated=True)  # type: ignore[arg-type]
    out.backward(gradient)
    expected = run(form)
    assert rows.grad is not None and weight.grad is not None
    for got, single in zip((out, rows.grad, weight.grad.transpose(1, 2)), expected, strict=True):
        assert got.dtype is torch.float64 and close(got.detach(), single.double(), 1e-6)
