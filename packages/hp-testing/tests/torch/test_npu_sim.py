"""What the simulated NPU does where a device would fail."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from hp_platform import get_platform
from hp_testing import RankError, device_type, on_ranks, run_ranks
from hp_testing.npu_sim import communicators, loading

pytestmark = pytest.mark.device

simulated = pytest.mark.skipif(
    "HYPER_PARALLEL_NPU_SIM" not in os.environ, reason="of the simulated NPU: --backend torch-npu-sim"
)


@simulated
@on_ranks(1)
def test_a_device_has_no_more_memory_than_it_has():
    free, total = torch.npu.mem_get_info()
    assert 0 < free <= total
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device="npu")
    assert torch.ones(3, device="npu").sum().item() == 3


@simulated
@on_ranks(1)
@pytest.mark.parametrize("hidden", ["window", "added", "causal", "nothing"])
def test_attention_is_the_hosts(hidden):
    inputs = [torch.randn(2, 3, 7, 4, dtype=torch.float64) for _ in range(3)]
    place = torch.arange(7)
    window = (place[:, None] >= place) & (place[:, None] - place < 3)
    masks = {"window": window, "added": torch.randn(7, 7, dtype=torch.float64)}

    def attend(device):
        leaves = [tensor.detach().to(device).requires_grad_() for tensor in inputs]
        mask = masks[hidden].to(device) if hidden in masks else None
        attention = torch.nn.functional.scaled_dot_product_attention
        output = attention(*leaves, attn_mask=mask, is_causal=hidden == "causal")
        output.square().sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    for on_device, on_host in zip(attend("npu"), attend("cpu")):
        assert on_device.device.type == "npu"
        torch.testing.assert_close(on_device.cpu(), on_host)


@simulated
@on_ranks(1)
def test_views_in_place_are_the_hosts():
    changes = [
        lambda tensor: tensor.transpose_(0, 2),
        lambda tensor: tensor.squeeze_(1).t_(),
        lambda tensor: tensor.swapdims_(0, 1).unsqueeze_(-1),
        lambda tensor: tensor.as_strided_((2, 3), (1, 5), 4),
    ]
    for change in changes:
        host = torch.arange(24.0).reshape(4, 1, 6)
        device = host.npu()
        whole = device.view(-1)
        assert change(device) is device
        change(host)
        assert device.stride() == host.stride() and device.storage_offset() == host.storage_offset()
        device.mul_(2), host.mul_(2)
        assert torch.equal(device.cpu(), host) and torch.equal(whole.cpu(), host.as_strided((24,), (1,), 0))


def lose_a_rank():
    platform = get_platform()
    rank, tensor = platform.groups.rank(), torch.ones(4, device=device_type())
    platform.collectives.all_reduce(tensor, group=torch.distributed.group.WORLD)
    assert communicators()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    platform.collectives.all_reduce(tensor, group=torch.distributed.group.WORLD)


@simulated
def test_ranks_that_lose_a_peer_in_a_collective_fail():
    with pytest.raises(RankError) as failure:
        run_ranks(3, lose_a_rank)
    told = str(failure.value)
    assert "--- rank 1 ---\ndied of signal SIGKILL" in told
    assert "in lose_a_rank" in told and "rank 1 of the group" in told and "has died" in told
    assert "had not returned" not in told


def test_processes_may_build_at_the_same_time(tmp_path, monkeypatch):
    both = threading.Barrier(2)
    folders = []

    def compile_slowly(target, scratch):
        (target / "library").write_text("compiled")
        both.wait(10)

    monkeypatch.setattr(loading, "_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(loading, "_fingerprint", lambda: "version")
    monkeypatch.setattr(loading, "_build", compile_slowly)
    threads = [threading.Thread(target=lambda: folders.append(loading.built())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / "cache" / "version"] * 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["version"]
    assert loading.built().joinpath("library").read_text() == "compiled"
