"""The port of PyTorch has what hp_onesided.port declares."""

from __future__ import annotations

import pytest

from hp_onesided.port import Port, port
from hp_testing.conformance import mismatches

pytestmark = pytest.mark.framework("torch")


def test_port():
    assert mismatches(Port, port()) == []
