"""What our code names of torch_npu is there, and what is misspelt is found."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hp_testing import device_type, on_ranks
from hp_testing.torch.npu_contract import broken, broken_in, uses

pytestmark = [
    pytest.mark.device,
    pytest.mark.framework("torch"),
    pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed"),
]

PACKAGES = Path(__file__).parents[2]


def loaded() -> None:
    if device_type() != "npu":
        pytest.skip("torch_npu is loaded with --backend torch-npu and torch-npu-sim")


@on_ranks(1)
def test_torch_npu_has_all_that_our_code_names():
    loaded()
    count, problems = broken_in(sorted(PACKAGES.glob("*/src")))
    assert problems == []
    assert count >= 4


@on_ranks(1)
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("torch_npu.npu_swiglu(x, dim=-1)", None),
        ("torch_npu.npu_swiglu(x, axis=-1)", "does not take 1 positional arguments and the keywords ['axis']"),
        ("torch_npu.npu_swiglu(x, -1, 2)", "does not take 3 positional arguments"),
        ("torch_npu.npu_swigloo(x)", "torch_npu has no attribute npu_swigloo"),
        ("torch.ops.npu.npu_rms_norm(x, weight, epsilon=1e-6)", None),
        ("torch.ops.npu.npu_rms_norm(x, weight, eps=1e-6)", "the keywords ['eps']"),
        ("torch.ops.npu.npu_rms_nrm(x, weight)", "there is no operator torch.ops.npu.npu_rms_nrm"),
        ("torch.npu.Stream(priority=-1)", None),
        ("torch.npu.curent_stream()", "torch.npu has no attribute curent_stream"),
        ("torch.npu.set_device(0, 1)", "torch.npu.set_device: too many positional arguments"),
        ("_torch_npu().npu_rotary_mul(x, cos, sin, mode='half')", "the keywords ['mode']"),
    ],
)
def test_what_is_misspelt_is_found(line, problem):
    loaded()
    found = broken(uses(f"def f(x, weight, cos, sin):\n    return {line}\n", "ours.py"))
    if problem is None:
        assert found == []
    else:
        (told,) = found
        assert told.startswith("ours.py:2: ") and problem in told
