"""Devices and random generators of PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import hp_platform
from hp_platform import get_platform
from hp_platform.devices import Devices
from hp_platform.torch.devices import empty_on_host, host_observers
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
def test_a_stream_gets_a_share_of_the_cores_or_every_rank_is_told_why_not():
    platform = get_platform()
    devices, stream = platform.devices, platform.devices.stream()
    if devices.kind == "cpu":
        with pytest.raises(RuntimeError, match=r"limited to some cores on an NPU or a GPU; this is a CPU"):
            devices.share(stream, cube=8)
        with pytest.raises(RuntimeError, match="this is a CPU"):
            devices.cores()
        return
    module, cores = devices.device_module(), devices.cores()
    with devices.share(stream, cube=8) as limited:
        assert (limited is stream) == (devices.kind == "npu")
        with module.stream(limited):
            tensor = torch.ones(2, device=devices.current_device())
            platform.collectives.all_reduce(tensor, group=torch.distributed.group.WORLD)
        if devices.kind == "npu":
            assert module.get_stream_limit(stream) == {"cube_core_num": 8, "vector_core_num": cores["vector"]}
    if devices.kind == "npu":
        assert module.get_stream_limit(stream) == {"cube_core_num": cores["cube"], "vector_core_num": cores["vector"]}
    module.current_stream().wait_stream(stream)
    assert tensor.tolist() == [2, 2]


class Recorded:
    """Calls of functions of a framework that this machine lacks, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.module = SimpleNamespace()
        monkeypatch.setattr(Devices, "kind", kind)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: self.module)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)

    def function(self, name: str, result: object = None):
        def called(*args: object, **options: object) -> object:
            self.calls.append((name, *args, *options.items()))
            return result

        return called


@pytest.fixture
def npu(monkeypatch):
    """A stand-in for `torch.npu`, of 20 cube and 40 vector cores."""
    recorded = Recorded(monkeypatch, "npu")
    limits = {"cube_core_num": 20, "vector_core_num": 40}
    recorded.module.get_device_limit = recorded.function("get_device_limit", limits)
    recorded.module.set_stream_limit = recorded.function("set_stream_limit")
    recorded.module.reset_stream_limit = recorded.function("reset_stream_limit")
    return recorded


def test_a_share_on_an_npu_is_a_limit_of_the_stream(npu):
    devices, asked = get_platform().devices, ("get_device_limit", 3)
    assert devices.cores() == {"cube": 20, "vector": 40}
    share = devices.share("a stream", cube=20, vector=1)
    assert share.stream == "a stream" and npu.calls == [asked, asked, ("set_stream_limit", "a stream", 20, 1)]
    share.give_back()
    share.give_back()
    assert npu.calls[3:] == [("reset_stream_limit", "a stream")]
    npu.calls.clear()
    with pytest.raises(KeyError), devices.share("a stream", vector=8) as stream:
        npu.calls.append((stream,))
        raise KeyError
    assert npu.calls == [
        asked, ("set_stream_limit", "a stream", -1, 8), ("a stream",), ("reset_stream_limit", "a stream")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "error", "match"),
    [
        ({}, ValueError, r"no number of cores is given; this device has {'cube': 20, 'vector': 40}"),
        ({"cube": 0}, ValueError, "cube=0 on a device with .* expected 1 to 20"),
        ({"cube": 8, "vector": 41}, ValueError, "vector=41 on a device with .* expected 1 to 40"),
        ({"cube": 8.0}, TypeError, "cube is 8.0, expected an int"),
        ({"vector": True}, TypeError, "vector is True, expected an int"),
    ],
)
def test_a_share_that_a_device_cannot_give_is_refused(npu, numbers, error, match):
    with pytest.raises(error, match=match):
        get_platform().devices.share("a stream", **numbers)
    assert npu.calls == [("get_device_limit", 3)]


def test_a_share_on_a_gpu_is_the_stream_of_a_green_context(monkeypatch):
    recorded = Recorded(monkeypatch, "cuda")
    given, limited = (SimpleNamespace(wait_stream=recorded.function(f"{name} waits")) for name in ("given", "limited"))
    green = SimpleNamespace(Stream=lambda: limited)
    context = SimpleNamespace(create=recorded.function("create", green), Stream=None)
    contexts = SimpleNamespace(SUPPORTED=True, GreenContext=context)
    recorded.module.get_device_properties = lambda index: SimpleNamespace(multi_processor_count=132)
    recorded.module.green_contexts = contexts
    monkeypatch.setattr(torch.cuda, "green_contexts", contexts)
    devices = get_platform().devices
    assert devices.cores() == {"cube": 132}
    with devices.share(given, cube=16) as stream:
        assert stream is limited
        assert recorded.calls == [("create", ("num_sms", 16), ("device_id", 3)), ("limited waits", given)]
    assert recorded.calls[2:] == [("given waits", limited)]
    devices.share(given, cube=16)
    assert recorded.calls[3:] == [("limited waits", given)]  # one context is kept for each number
    with pytest.raises(ValueError, match=r"vector=8 on a device with {'cube': 132} cores, .* all of one kind, cube"):
        devices.share(given, cube=16, vector=8)
    with pytest.raises(ValueError, match="cube=133 on a device with .* expected 1 to 132"):
        devices.share(given, cube=133)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("npu", "torch.npu has no set_stream_limit"),
        ("cuda", "no green contexts with streams"),
        ("xpu", "it has no way to do so on xpu"),
    ],
)
def test_a_framework_without_shares_is_named(monkeypatch, kind, missing):
    recorded = Recorded(monkeypatch, kind)
    with pytest.raises(RuntimeError, match=rf"torch 2.* can't limit a stream to some cores: .*{missing}"):
        get_platform().devices.share("a stream", cube=8)
    recorded.module.green_contexts = SimpleNamespace(SUPPORTED=False)
    with pytest.raises(RuntimeError, match=missing):
        get_platform().devices.share("a stream", cube=8)


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
