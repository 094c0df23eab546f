"""States saved beside the program, each with a future."""

from __future__ import annotations

import errno
import threading

import pytest
import torch

from hp_checkpoint import CheckpointError, async_save, load, save
from hp_checkpoint.snapshot import Arena
from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_platform import get_platform
from hp_testing import device_type, on_ranks


def state(start):
    mesh = init_device_mesh(device_type(), (get_platform().groups.size(),))
    values = torch.arange(start, start + 9.0, device=device_type())
    return {"model": {"w": distribute_tensor(values, mesh, [Shard(0)])}, "step": start}


def values_in(folder):
    loaded = state(0)
    load(loaded, checkpoint_id=folder)
    return loaded["model"]["w"].full_tensor().tolist(), loaded["step"]


@on_ranks(1, 2)
def test_it_saves_the_state_at_the_call(tmp_path):
    called = threading.Event()
    own = [state(number) for number in (0, 50)]
    responses = [
        async_save(own[0], checkpoint_id=tmp_path / "one", callback=lambda future: called.set()),
        async_save(own[1], checkpoint_id=tmp_path / "two"),
    ]
    for each in own:
        each["model"]["w"].zero_()
    manifests = [response.get_result(timeout=60) for response in responses]
    assert called.wait(60) and all(response.persist_completion.done() for response in responses)
    assert list(manifests[0].parts["model"]) == ["w"]
    assert values_in(tmp_path / "one") == ([*range(9)], 0)
    assert values_in(tmp_path / "two") == ([*range(50, 59)], 50)
    again = async_save(state(7), checkpoint_id=tmp_path / "one")  # replaced by an exchange of folders
    again.get_result(60)
    assert values_in(tmp_path / "one") == ([*range(7, 16)], 7)
    get_platform().collectives.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@on_ranks(2)
def test_errors(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="'model.f' is a builtins.function"):
        async_save({"model": {"f": pytest.raises}}, checkpoint_id=tmp_path / "one")
    save(state(3), checkpoint_id=tmp_path / "one")
    response = async_save({**state(0), "bad": None}, checkpoint_id=tmp_path / "one")
    response.get_result(60)
    if get_platform().groups.rank() == 1:
        monkeypatch.setattr(Arena, "store", full)
    with pytest.raises(CheckpointError, match="async_save failed on 1 of 2 ranks: rank 1: ENOSPC: no space"):
        async_save(state(0), checkpoint_id=tmp_path / "two")
    monkeypatch.undo()
    async_save(state(5), checkpoint_id=tmp_path / "two").get_result(60)
    assert values_in(tmp_path / "two") == ([*range(5, 14)], 5)


def full(*_):
    raise OSError(errno.ENOSPC, "no space")
