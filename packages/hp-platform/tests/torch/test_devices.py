"""Devices and random generators of PyTorch."""

from __future__ import annotations

import pytest
import torch

import hp_platform
from hp_platform import get_platform
from hp_platform.torch.host import empty_on_host, host_observers
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device


@on_ranks(1)
def test_devices():
    devices = get_platform().devices
    assert devices.kind == devices.current_device().type == device_type()
    assert devices.kind in devices.present() and devices.count >= 1
    devices.set_device(0)
    devices.reset_peak_memory()
    before = devices.peak_memory()
    kept = torch.ones(64 << 20, dtype=torch.uint8, device=devices.current_device())
    assert devices.peak_memory() - before > 40 << 20
    del kept
    stream = devices.stream()
    with devices.device_module().stream(stream):
        tensor = torch.ones(2, device=devices.current_device())
    devices.device_module().current_stream().wait_stream(stream)
    devices.synchronize()
    devices.empty_cache()
    assert tensor.sum().item() == 2


def test_memory_of_the_host():
    devices, told = get_platform().devices, []
    host_observers.append(told.append)
    try:
        memory = empty_on_host(6, torch.int16)
    finally:
        host_observers.remove(told.append)
    assert memory.shape == (6,) and memory.dtype == torch.int16 and memory.device == devices.host_device()
    assert memory.is_pinned() == devices.capabilities.pinned_memory
    assert not empty_on_host(6, torch.int16, pin=False).is_pinned()
    assert not empty_on_host(6, torch.int16, from_host=True).is_pinned()
    assert [each is memory for each in told] == [True]


@on_ranks(2)
def test_manual_seed_makes_ranks_draw_alike():
    platform = get_platform()
    device = platform.devices.current_device()
    torch.manual_seed(platform.groups.rank())
    hp_platform.manual_seed(7)
    assert platform.random.seeded() == 7
    state = platform.random.get_state(device)
    drawn = torch.rand(4, device=device)
    gathered = torch.empty(8, device=device)
    platform.collectives.all_gather(gathered, drawn, group=torch.distributed.group.WORLD)
    assert torch.equal(gathered[:4], gathered[4:])
    platform.random.set_state(device, state)
    assert torch.equal(torch.rand(4, device=device), drawn)
