"""Devices and random generators of MindSpore."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, ops

import hp_platform
from hp_platform import get_platform
from hp_testing import as_array, device_type, on_ranks


@on_ranks(1)
def test_devices():
    devices = get_platform().devices
    assert devices.kind == device_type()
    assert devices.kind in devices.present() and devices.count >= 1
    assert Tensor(np.ones(1, np.float32)).device == devices.current_device()
    assert devices.host_device() == "CPU" and devices.kind_of(devices.host_device()) == "cpu"
    devices.reset_peak_memory()
    before = devices.peak_memory()
    kept = Tensor(np.ones(64 << 20, np.uint8))
    assert devices.peak_memory() - before > 40 << 20
    del kept
    devices.synchronize()
    devices.empty_cache()


@on_ranks(1)
def test_streams_are_asked_for_before_one_is_made():
    devices = get_platform().devices
    if devices.capabilities.streams:
        devices.stream()
        return
    with pytest.raises(RuntimeError, match="no streams on CPU: check get_platform"):
        devices.stream()
    assert not devices.capabilities.pinned_memory and not devices.capabilities.native_collectives


@on_ranks(2)
def test_manual_seed_makes_ranks_draw_alike():
    platform = get_platform()
    mindspore.set_seed(platform.groups.rank())
    hp_platform.manual_seed(7)
    assert platform.random.seeded() == 7
    ops.standard_normal((2,))
    state = platform.random.get_state("CPU")
    drawn = ops.standard_normal((4,))
    gathered = Tensor(np.zeros(8, np.float32))
    platform.collectives.all_gather(gathered, drawn, group=platform.groups.new_group([0, 1]))
    first, second = np.split(as_array(gathered), 2)
    assert first.tolist() == second.tolist()
    assert ops.standard_normal((4,)).asnumpy().tolist() != first.tolist()
    platform.random.set_state("CPU", state)
    assert ops.standard_normal((4,)).asnumpy().tolist() == first.tolist()
