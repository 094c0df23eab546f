"""The framework in use supplies what hp_dtensor.port declares."""

from __future__ import annotations

import pytest

from hp_dtensor import port
from hp_dtensor.mesh import device_mesh
from hp_testing.conformance import mismatches

PORTS = {
    port.Tensors: port.tensors,
    port.Gradients: port.gradients,
    port.Functions: port.functions,
    port.Creation: port.creation,
    port.Modules: port.modules,
    device_mesh.Ranks: device_mesh.ranks_port,
    port.Debug: port.debug,
}


@pytest.mark.parametrize("protocol", PORTS, ids=lambda protocol: protocol.__name__)
def test_a_framework_has_what_the_protocol_declares(protocol):
    assert mismatches(protocol, PORTS[protocol]()) == []


def test_what_watches_modules():
    assert mismatches(port.Watched, port.debug().Modules()) == []
