"""States saved beside the program, each with a future."""

from __future__ import annotations

import errno
import threading

import pytest
import torch

from hp_checkpoint import Checkpointer, CheckpointError, async_save, load, save
from hp_checkpoint.disk.storage import Arena
from hp_checkpoint.saving.background import _committed
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


@on_ranks(1, 2)
def test_of_saves_of_one_folder_the_last_one_stays(tmp_path):
    """Whatever saves last: beside the program, in it, or a Checkpointer's for a step."""
    target = tmp_path / "step-00000001"
    responses = [async_save(state(number), checkpoint_id=target) for number in range(4)]
    assert [response.persist_completion.done() for response in responses[:3]] == [True] * 3
    assert [sorted(response.get_result(60).parts) for response in responses] == [["model"]] * 4
    assert values_in(target) == ([*range(3, 12)], 3)
    async_save(state(5), checkpoint_id=target)
    save(state(10), checkpoint_id=target)
    assert values_in(target) == ([*range(10, 19)], 10)
    model = torch.nn.Linear(1, 1, bias=False).to(device_type())
    async_save(state(5), checkpoint_id=target)
    with Checkpointer(tmp_path) as own, Checkpointer(tmp_path) as other:
        own.save(1, model, data=9)
        other.save(1, model, data=10)
    assert other.load(model).data == 10
    get_platform().collectives.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@on_ranks(1)
def test_a_save_that_another_process_replaces_is_named(tmp_path):
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointError, match="new: it was complete, and another process has replaced it"):
        _committed(tmp_path / "part", tmp_path / "new", 0, True)
    with pytest.raises(CheckpointError, match="failed on another rank: that rank has its error, or another process"):
        _committed(tmp_path / "part", tmp_path / "new", 0, False)


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
