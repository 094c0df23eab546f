"""What symmetric memory of devices refuses, and what it asks PyTorch for: by a stand-in, not on a device."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from test_symmetric import world

from hp_onesided import Signal, SymmetricMemory
from hp_onesided.torch import symmetric_cuda
from hp_platform import get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.not_on("torch-cuda", "torch-npu", "torch-npu-sim", reason="a stand-in for the device's memory")


class StandIn:
    """`torch.distributed._symmetric_memory` and its handle, of one rank on the host; it notes what is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.calls.append(("empty", nbytes, dtype, device))
        self.memory = torch.full((nbytes,), 7, dtype=dtype)
        return self.memory

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> StandIn:
        assert tensor is self.memory and group == world()
        return self

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
        self.calls.append(("get_buffer", rank))
        return self.memory.view(dtype)[storage_offset:].view(-1)[: torch.Size(sizes).numel()].view(sizes)

    def put_signal(self, rank: int, channel: int) -> None:
        self.calls.append(("put_signal", rank, channel))

    def wait_signal(self, rank: int, channel: int, timeout_ms: int) -> None:
        self.calls.append(("wait_signal", rank, channel, timeout_ms))

    def barrier(self, channel: int) -> None:
        self.calls.append(("barrier", channel))


def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(symmetric_cuda, "importlib", types.SimpleNamespace(import_module=lambda _: found))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return found


@on_ranks(1)
def test_memory_of_a_gpu_is_pytorchs(monkeypatch):
    found = stand_in(monkeypatch)
    with SymmetricMemory(world(), 64, slots=4, device="cuda:0") as memory:
        memory.local((2,), torch.float32, 8).fill_(3.0)
        assert memory.peer(0, (4,), torch.float32).tolist() == [0.0, 0.0, 3.0, 3.0]
        signal = Signal(memory, 2)
        signal.add(0)
        signal.wait(2, rank=0, limit=1.5)
        signal.wait(2, rank=0)
        with pytest.raises(ValueError, match="on cuda a signal counts up by one at a time, got n=2"):
            signal.add(0, n=2)
        with pytest.raises(RuntimeError, match="collectives go over symmetric memory of the host alone"):
            memory.all_reduce(torch.ones(2))
        with pytest.raises(RuntimeError, match="rank 0: the group has symmetric memory already"):
            SymmetricMemory(world(), 64, device="cuda")
    buffers = [("get_buffer", 0)] * 2
    waits = [("wait_signal", 0, 2, 1500)] * 2
    empty = ("empty", 64, torch.uint8, torch.device("cuda:0"))
    assert found.calls == [empty, ("barrier", 4), *buffers, ("put_signal", 0, 2), *waits, ("barrier", 4)]
    with pytest.raises(RuntimeError, match="the symmetric memory is closed"):
        memory.barrier()
    SymmetricMemory(world(), 64, device="cuda").close()  # the group has none any more


@on_ranks(2)
def test_what_a_device_lacks_is_refused_on_all_ranks(monkeypatch):
    stand_in(monkeypatch)
    with pytest.raises(RuntimeError, match="there is none on npu:0; it is made on cpu and cuda"):
        SymmetricMemory(world(), 64, device="npu:0")
    with pytest.raises(ValueError, match="rank 0 asks for 64 bytes, rank 1 for 128"):
        SymmetricMemory(world(), 64 << get_platform().groups.rank(), device="cuda")
    with pytest.raises(RuntimeError, match="256 slots of 2 ranks need more than the 512 words of its signal pad"):
        SymmetricMemory(world(), 64, slots=256, device="cuda")
    if get_platform().groups.rank() == 1:
        monkeypatch.delattr(StandIn, "rendezvous")
    with pytest.raises(RuntimeError, match="rank 1: torch.distributed._symmetric_memory of torch .* has no rendezvous"):
        SymmetricMemory(world(), 64, device="cuda")
