"""The port of the framework in use has what hp_platform.port declares, and a lack of it would be seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Protocol

import pytest

from hp_platform import port
from hp_testing.conformance import mismatches

ROLES = {
    "collectives": port.Collectives,
    "groups": port.Groups,
    "devices": port.Devices,
    "random": port.Random,
    "fused": port.Fused,
}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_all_primitives(role):
    assert mismatches(ROLES[role], getattr(port.port(), role)) == []


def test_the_port_has_all_roles():
    assert mismatches(port.Port, port.port()) == []
    assert {name for name in vars(port.Port) if name in ROLES} == set(ROLES)


class Sends(Protocol):
    TIMEOUTS: bool

    def send(self, tensor: object, dst: int) -> None: ...


def test_what_differs_is_told():
    def send(tensor, dst):
        pass

    def swapped(dst, tensor):
        pass

    def more(tensor, dst, tag):
        pass

    assert mismatches(Sends, SimpleNamespace(TIMEOUTS=False, send=send)) == []
    assert mismatches(Sends, SimpleNamespace(send=send)) == ["TIMEOUTS: missing"]
    wrong = "send: takes (dst, tensor), the protocol says (tensor, dst)"
    assert mismatches(Sends, SimpleNamespace(TIMEOUTS=True, send=swapped)) == [wrong]
    wrong = "send: takes (tensor, dst, tag), the protocol says (tensor, dst)"
    assert mismatches(Sends, SimpleNamespace(TIMEOUTS=True, send=more)) == [wrong]
