"""The port of the framework in use has what hp_checkpoint.port declares."""

from __future__ import annotations

from hp_checkpoint.port import Port, port
from hp_testing.conformance import mismatches


def test_port():
    assert mismatches(Port, port()) == []
