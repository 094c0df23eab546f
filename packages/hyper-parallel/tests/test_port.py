"""The port of the framework in use has what hyper_parallel.port declares."""

from __future__ import annotations

import pytest

from hp_testing.conformance import mismatches
from hyper_parallel import port


@pytest.mark.parametrize(
    ("protocol", "get"),
    [
        (port.Launcher, port.launcher),
        (port.Process, port.rank_process),
        (port.Training, port.training),
        pytest.param(port.Copying, port.copying, marks=pytest.mark.framework("torch")),
    ],
)
def test_all_primitives_are_there(protocol, get):
    assert mismatches(protocol, get()) == []
