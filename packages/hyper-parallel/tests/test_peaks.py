"""What devices can do, by the names that they give themselves."""

from __future__ import annotations

import pytest

from hyper_parallel.reports.run_metadata import known_peak


@pytest.mark.parametrize(
    ("device", "teraflops"),
    [
        ("NVIDIA H800", 989),
        ("NVIDIA H800 PCIe", 756),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312),
    ],
)
def test_the_peak_is_that_of_the_variant(device, teraflops):
    assert known_peak(device, "bfloat16") == teraflops * 1e12


def test_a_device_that_nobody_knows_has_no_peak():
    assert known_peak("NVIDIA A1000", "bfloat16") is None
