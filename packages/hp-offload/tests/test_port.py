"""The port of the framework in use has what hp_offload.port declares."""

from __future__ import annotations

from hp_offload.port import Link, Port, link, port
from hp_testing.conformance import mismatches


def test_port():
    assert mismatches(Port, port()) == []


def test_link():
    assert mismatches(Link, link()) == []
