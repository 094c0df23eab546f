"""What `[precision]` says where there is no torchao, or a device that it has no products for."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hp_plan import ParallelPlan, lint
from hp_plan.torch.library.low_precision import TORCHAO

PLAN = {"model": {"config": "LlamaConfig"}, "data": {"sequence_length": 32, "batch_size": 2}}


@pytest.mark.device
@pytest.mark.not_on("torch-cpu", "torch-cuda", reason="it is of NPUs")
@pytest.mark.parametrize(
    ("precision", "text"),
    [
        (
            {"linear": "float8-tensorwise"},
            "of NPUs Ascend 950 alone multiplies float8, and torchao is untested there; ",
        ),
        (
            {"linear": "mxfp8"},
            "of NPUs Ascend 950 alone multiplies float8, and torchao's casts to it are kernels for CUDA; ",
        ),
        (
            {"experts": "float8-rowwise"},
            "Ascend 910 (A2, A3) multiplies int8, for inference: torch_npu has no gradients",
        ),
    ],
)
def test_npus_are_refused_with_what_they_have(precision: dict[str, str], text: str):
    found = "\n".join(map(str, lint(ParallelPlan.from_dict({**PLAN, "precision": precision}))))
    assert text in found and "torchao is not installed" not in found


def test_the_advice_names_what_the_extra_installs():
    table = tomllib.loads((Path(__file__).parents[2] / "hyper-parallel" / "pyproject.toml").read_text("utf-8"))
    assert TORCHAO in table["project"]["optional-dependencies"]["fp8"]
