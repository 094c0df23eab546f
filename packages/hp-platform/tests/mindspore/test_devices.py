"""Devices and random generators of MindSpore."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, ops

import hp_platform
from hp_platform import get_platform
from hp_platform.devices import Devices
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
def test_a_cpu_has_no_shares_of_its_cores():
    devices = get_platform().devices
    if devices.kind != "cpu":
        pytest.skip("of the CPU")
    with pytest.raises(RuntimeError, match=r"limited to some cores on an NPU or a GPU; this is a CPU"):
        devices.share(None, cube=8)


def test_a_share_on_ascend_is_a_limit_of_the_stream(monkeypatch):
    calls = []

    def record(name, result=None):
        return lambda *args: (calls.append((name, *args)), result)[1]

    monkeypatch.setattr(Devices, "kind", "npu")
    limits = {"cube_core_num": 20, "vector_core_num": 40}
    monkeypatch.setattr(mindspore.runtime, "get_device_limit", record("device", limits))
    monkeypatch.setattr(mindspore.runtime, "set_stream_limit", record("set"))
    monkeypatch.setattr(mindspore.runtime, "reset_stream_limit", record("reset"))
    devices = get_platform().devices
    with devices.share("a stream", cube=8) as stream:
        assert stream == "a stream" and calls == [("device", 0), ("set", "a stream", 8, -1)]
    assert calls[2:] == [("reset", "a stream")]
    with pytest.raises(ValueError, match="vector=41 on a device with .* expected 1 to 40"):
        devices.share("a stream", vector=41)


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
