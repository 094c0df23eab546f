"""The iteration: its formula in float64, its singular values, and that the batch is no part of the result."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from hp_optim.muon.rules import NS_VARIANTS, Orthogonalization
from hp_optim.torch.newton_schulz import compute_dtype, orthogonalize

pytestmark = pytest.mark.framework("torch")
SHAPES = [(4, 4), (6, 13), (13, 6), (8, 64), (64, 8), (1, 5)]


def formula(matrix: torch.Tensor, steps: Any, epsilon: float) -> torch.Tensor:
    """One matrix in float64, as it is written in papers."""
    x = matrix.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / (x.norm() + epsilon)
    for a, b, c in steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def conditioned(rows: int, columns: int, condition: float, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    small = min(rows, columns)
    u, _ = torch.linalg.qr(torch.randn(rows, small, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(columns, small, dtype=torch.float64))
    return u * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), small, dtype=torch.float64) @ v.T


@pytest.mark.parametrize("variant", NS_VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gram", [None, False, True])
@pytest.mark.parametrize("steps", [1, 5, 7])
def test_float64_equals_the_formula(variant: str, shape: tuple[int, int], gram: bool | None, steps: int):
    settings = Orthogonalization.of(variant, None, steps, 1e-10, 0.2)
    torch.manual_seed(1)
    batch = torch.randn(3, *shape, dtype=torch.float64)
    result = orthogonalize(batch, settings.coefficients, settings.epsilon, gram=gram)
    truth = torch.stack([formula(each, settings.coefficients, settings.epsilon) for each in batch])
    torch.testing.assert_close(result, truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [*SHAPES, (24, 100), (128, 128)])
def test_a_matrix_has_the_same_bits_in_any_batch(shape: tuple[int, int], dtype: torch.dtype):
    torch.manual_seed(2)
    batch = torch.randn(7, *shape).to(dtype)
    steps = NS_VARIANTS["asym5"]
    together = orthogonalize(batch, steps, 1e-10)
    for number, each in enumerate(batch):
        assert torch.equal(together[number], orthogonalize(each[None], steps, 1e-10)[0])
    assert torch.equal(together[2:5], orthogonalize(batch[2:5].clone(), steps, 1e-10))


@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (64, 100)])
@pytest.mark.parametrize("condition", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("variant", ["asym5", "polar_express"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_are_near_one(shape: tuple[int, int], condition: float, variant: str, dtype: torch.dtype):
    matrix = conditioned(*shape, condition).float()[None]
    settings = Orthogonalization.of(variant, None, 5, 1e-10, 0.2)
    result = orthogonalize(matrix, settings.coefficients, settings.epsilon, dtype=dtype)
    assert result.dtype is dtype
    values, rounding = torch.linalg.svdvals(result.double()), 2 * torch.finfo(dtype).eps
    assert 0.85 - rounding < values.min() and values.max() < 1.15 + rounding


@pytest.mark.parametrize("variant", NS_VARIANTS)
@pytest.mark.parametrize("condition", [10.0, 100.0, 1e5])
def test_gram_matrices_in_bfloat16_are_as_accurate_as_direct_products(variant: str, condition: float):
    """Five steps without a restart give singular values of 30."""
    matrix = conditioned(32, 128, condition)[None]
    steps = Orthogonalization.of(variant, None, 5, 1e-10, 0.2).coefficients
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    ours = torch.linalg.svdvals(orthogonalize(matrix, steps, 1e-10, gram=True, **options).double())
    direct = torch.linalg.svdvals(orthogonalize(matrix, steps, 1e-10, gram=False, **options).double())
    torch.testing.assert_close(ours, direct, rtol=0, atol=0.06)


def test_no_gradient_has_no_direction():
    result = orthogonalize(torch.zeros(2, 3, 8), NS_VARIANTS["asym5"], 1e-10)
    assert torch.equal(result, torch.zeros(2, 3, 8))


def test_many_matrices_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(3)
    batch = torch.randn(5, 4, 6)
    together = orthogonalize(batch, NS_VARIANTS["legacy"], 1e-10)
    monkeypatch.setattr("hp_optim.torch.newton_schulz._CACHED", 50)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert torch.equal(orthogonalize(batch, NS_VARIANTS["legacy"], 1e-10), together)


def test_the_dtype_of_products():
    cpu = torch.device("cpu")
    assert [compute_dtype(each, cpu) for each in (torch.float64, torch.float32, torch.bfloat16)] == [
        torch.float64,
        torch.float32,
        torch.float32,
    ]
    assert compute_dtype(torch.float32, torch.device("cuda")) is torch.bfloat16
    assert compute_dtype(torch.float64, cpu, "bfloat16") is torch.bfloat16
    assert compute_dtype(torch.float32, torch.device("cuda"), "float32") is torch.float32


def test_coefficients_of_more_and_fewer_steps():
    asym = NS_VARIANTS["asym5"]
    assert Orthogonalization.of("asym5", None, 3, 1e-10, 0.2).coefficients == asym[:3]
    assert Orthogonalization.of("asym5", None, 6, 1e-10, 0.2).coefficients == (*asym, asym[-1])
    assert Orthogonalization.of("legacy", (2, -1.5, 0.5), 2, 1e-10, 0.2).coefficients == ((2.0, -1.5, 0.5),) * 2
    assert Orthogonalization.of("legacy", [(2, -1, 0), (3, 0, 1)], 2, 1e-10, 0.2).coefficients[1] == (3.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"variant": "asym"},
            r"ns_variant must be one of asym5, legacy, polar_express, got 'asym'. Did you mean 'asym5'",
        ),
        ({"dtype": "half"}, r"ns_dtype must be None or one of float64, float32, bfloat16, got 'half'"),
        ({"steps": 0}, r"ns_steps must be a whole number from 1 to 99, got 0"),
        ({"epsilon": 0.0}, r"ns_epsilon must be positive, for a gradient may be zero; got 0.0"),
        ({"rms": -1.0}, r"matched_adamw_rms must be positive, got -1.0"),
        ({"coefficients": (1.0, 2.0)}, r"must be three numbers, or three for each step; got \(1.0, 2.0\)"),
        ({"coefficients": [(1.0, 2.0, 3.0)] * 3}, r"has 3 triples for 5 steps; pass one, or 5"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], text: str):
    good: dict[str, Any] = {"variant": "asym5", "coefficients": None, "steps": 5, "epsilon": 1e-10, "rms": 0.2}
    with pytest.raises(ValueError, match=text) as caught:
        Orthogonalization.of(**{**good, **options})
    if meant := re.search(r"Did you mean '(\w+)'", str(caught.value)):
        assert Orthogonalization.of(**{**good, "variant": meant[1]}).coefficients == NS_VARIANTS["asym5"]
    if "coefficients" in options:
        one = (1.0, 2.0, 3.0)
        for mended in (one, [one], [one] * 5):
            assert Orthogonalization.of(**{**good, "coefficients": mended}).coefficients == (one,) * 5
