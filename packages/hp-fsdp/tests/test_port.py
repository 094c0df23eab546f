"""The port of the framework in use has what hp_fsdp.port declares."""

from __future__ import annotations

import pytest

from hp_fsdp import port
from hp_testing.conformance import mismatches


@pytest.mark.parametrize(
    ("protocol", "get"),
    [
        (port.Explaining, port.explaining),
        (port.GradNorms, port.grad_norms),
        (port.ModelStates, port.model_states),
        (port.Optimizers, port.optimizers),
        (port.Sharding, port.sharding),
    ],
)
def test_all_primitives_are_there(protocol, get):
    assert mismatches(protocol, get()) == []
