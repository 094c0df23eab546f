"""Devices and random generators of PyTorch."""

from __future__ import annotations

import pytest
import torch

import hp_platform
from hp_platform import get_platform
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
