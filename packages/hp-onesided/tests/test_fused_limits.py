"""The limits of an NPU's fused operators, each violated once."""

from __future__ import annotations

from typing import Any

import pytest

from hp_onesided.fused import mc2_limit

RIGHT = {"op": "gather", "shape": (4096, 1024, 512), "dtype": "bfloat16", "ranks": 8, "generation": "A2"}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "float32"}, "npu_all_gather_base_mm takes float16 and bfloat16, got float32"),
    "few features": ({"shape": (8, 255, 8)}, "npu_all_gather_base_mm takes 256 to 65534 input features, got 255"),
    "many features": ({"shape": (8, 65535, 8)}, "npu_all_gather_base_mm takes 256 to 65534 input features, got 65535"),
    "three ranks": ({"ranks": 3}, "npu_all_gather_base_mm takes (2, 4, 8) ranks on A2, got 3"),
    "sixteen on A2": ({"ranks": 16}, "npu_all_gather_base_mm takes (2, 4, 8) ranks on A2, got 16"),
    "sixty-four on A3": (
        {"ranks": 64, "generation": "A3"},
        "npu_all_gather_base_mm takes (2, 4, 8, 16, 32) ranks on A3, got 64",
    ),
    "scatter from sixteen on": (
        {"op": "scatter", "ranks": 16, "generation": "A3"},
        "npu_mm_reduce_scatter_base fails from 16 ranks on, got 16",
    ),
    "no rows": ({"shape": (0, 512, 8)}, "npu_all_gather_base_mm takes no product without elements, got 0 rows and 8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_violated_limit_is_named(name: str) -> None:
    changed, text = WRONG[name]
    assert str(mc2_limit(**{**RIGHT, **changed})).startswith(text)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"op": "scatter"},
        {"dtype": "float16", "shape": (1, 256, 1)},
        {"shape": (1, 65534, 1)},
        {"ranks": 32, "generation": "A3"},
    ],
    ids=str,
)
def test_what_is_within_the_limits_is_taken(changed: dict[str, Any]) -> None:
    assert mc2_limit(**{**RIGHT, **changed}) is None
