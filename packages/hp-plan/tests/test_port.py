"""The port of the framework in use has what hp_plan.port declares."""

from __future__ import annotations

import pytest

from hp_plan import port
from hp_testing.conformance import mismatches


@pytest.mark.parametrize(
    ("protocol", "get"), [(port.Models, port.models), (port.Build, port.build), (port.DryRuns, port.dry_runs)]
)
def test_all_primitives_are_there(protocol, get):
    assert mismatches(protocol, get()) == []
