"""The port of the framework in use has what hp_moe.port declares."""

from __future__ import annotations

from hp_moe.port import Port, port
from hp_testing.conformance import mismatches


def test_port():
    assert mismatches(Port, port()) == []
