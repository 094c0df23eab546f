"""The port of the framework in use has what hp_styles.port declares."""

from __future__ import annotations

from types import FunctionType

from hp_platform import get_platform
from hp_styles import port
from hp_testing.conformance import mismatches

# Styles that MindSpore has not refuse with the arguments that they get.
TORCH_ONLY = {"run_replicated", "run_pointwise", "run_experts", "divide_inside"}


def test_modules():
    refused = TORCH_ONLY if get_platform().name == "mindspore" else set()
    assert {line.partition(":")[0] for line in mismatches(port.Modules, port.modules())} == refused
    assert all(callable(getattr(port.modules(), name)) for name in TORCH_ONLY)


def test_context_parallelism():
    if get_platform().name == "torch":
        assert mismatches(port.Context, port.context()) == []
    else:
        names = [
            name for name, value in vars(port.Context).items() if isinstance(value, FunctionType) and name[0] != "_"
        ]
        assert names and all(callable(getattr(port.context(), name)) for name in names)
