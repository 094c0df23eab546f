"""Saves by the ranks that are left; those that are lost do nothing here, and nobody's connections are broken."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
from torch import nn

from hp_checkpoint import Checkpointer, CheckpointError
from hp_checkpoint.emergency_save import Survivors, join, meet
from hp_checkpoint.extend import LastWords, faults
from hp_dtensor import init_device_mesh
from hp_fsdp import full_state_dict, fully_shard
from hp_platform import get_backend, get_platform
from hp_testing import device_type, on_ranks

LATE = 60.0


def together(work, ranks):
    """Run ``work(rank)`` of several ranks in threads; return results and errors by rank."""
    results = {}

    def run(rank):
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_meet_without_the_lost(tmp_path):
    def work(rank):
        join(tmp_path / "words", rank, {"lost": [1] if rank == 3 else []})
        return meet(tmp_path / "words", rank, 4, (), time.monotonic() + LATE)

    results = together(work, (0, 2, 3))
    assert results[0] == results[2] == results[3] == {0: {"lost": []}, 2: {"lost": []}, 3: {"lost": [1]}}
    join(tmp_path / "words", 1, {"lost": []})  # it was thought to be lost, and is slow
    with pytest.raises(CheckpointError, match=r"the ranks \[0, 2, 3\] have begun without rank 1"):
        meet(tmp_path / "words", 1, 4, (), time.monotonic() + LATE)


def test_survivors_hear_of_each_others_errors(tmp_path):
    def work(rank):
        ranks = Survivors(tmp_path, rank, 3, [1, 2], time.monotonic() + LATE)
        assert ranks.agree(lambda: str(rank).encode(), "look") == [b"", b"1", b"2"]
        assert ranks.first(lambda: b"lead", "look") == b"lead"
        try:
            ranks.agree(lambda: b"" if rank == 1 else 1 / 0, "divide")
        finally:
            ranks.leave()

    results = together(work, (1, 2))
    texts = {str(error) for error in results.values()}
    assert texts == {"divide failed on 1 of 3 ranks: rank 2: ZeroDivisionError: division by zero"}
    assert not tmp_path.exists()


def trained(mesh_shape):
    """Return a model after a step, sharded over the last axis and replicated over the others, and its optimizer."""
    names = ("dp_replicate", "dp_shard")[-len(mesh_shape) :]
    mesh = init_device_mesh(device_type(), mesh_shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)).to(device_type())
    fully_shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6, device=device_type())).sum().backward()
    optimizer.step()
    return model, optimizer


def stay_connected(monkeypatch):
    """Keep the tests' process groups, where a run breaks its own."""
    monkeypatch.setattr("hp_platform.groups.can_disconnect", lambda: True)
    monkeypatch.setattr("hp_platform.groups.disconnect", lambda: None)


def say(words, step, **options):
    """Say last words on this rank, and return those of the first rank on every rank; None is a lost rank."""
    platform, own = get_platform(), ""
    if step != "lost":
        own = words.save(step, **options)
    everyone = [None] * platform.groups.size()
    torch.distributed.all_gather_object(everyone, own)
    (text,) = [each for each in everyone if each]
    return text


@on_ranks(4, timeout=120)
@pytest.mark.parametrize("torn", [False, True])
def test_replicas_save_for_a_lost_rank(monkeypatch, tmp_path, torn):
    stay_connected(monkeypatch)
    model, optimizer = trained((2, 2))
    rank = get_platform().groups.rank()
    with Checkpointer(tmp_path / "run", background=False) as checkpoints:
        words = LastWords(checkpoints, model, optimizer, within=LATE)
        truth = full_state_dict(model)
        # Rank 3 is lost, or has begun an update; rank 1 has what it had.
        step = (None if torn else "lost") if rank == 3 else 7
        text = say(words, step, saved=0, lost=() if torn else (3,), data={"sample": 56})
        assert text == f"the ranks that are left saved step 7, whole and verified: {checkpoints.path(7)}"
        assert checkpoints.steps() == [7] and not faults(checkpoints.path(7))
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000007"]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert checkpoints.load(model, optimizer).data == {"sample": 56}
        for name, value in full_state_dict(model).items():
            assert torch.equal(value, truth[name]), name


@on_ranks(2, timeout=120)
def test_what_nobody_has_is_named(monkeypatch, tmp_path):
    stay_connected(monkeypatch)
    model, optimizer = trained((2,))
    rank = get_platform().groups.rank()
    with Checkpointer(tmp_path / "run", background=False) as checkpoints:
        checkpoints.save(4, model, optimizer)
        words = LastWords(checkpoints, model, optimizer, within=LATE)
        text = say(words, "lost" if rank == 0 else 7, saved=4, lost=(0,))
        assert "step 7 can't be saved without rank 0: " in text
        assert re.search(r"the ranks' shards of '0\.(weight|bias)' have \d+ of its (60|10) elements", text)
        assert text.endswith("; the newest checkpoint is step 4")
        assert checkpoints.steps() == [4]


@on_ranks(2, timeout=120)
def test_tensors_of_a_lost_rank_alone_are_named(monkeypatch, tmp_path):
    """Two stages of a pipeline."""
    stay_connected(monkeypatch)
    rank = get_platform().groups.rank()
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path / "run", background=False) as checkpoints:
        words = LastWords(checkpoints, model, optimizer, within=LATE)
        text = say(words, "lost" if rank == 1 else 7, saved=0, lost=(1,))
    assert text.startswith("step 7 can't be saved without rank 1: 2 of 4 tensors were there alone, as 'stage1.bias'")


@on_ranks(2, timeout=120)
def test_ranks_at_different_steps_save_none(monkeypatch, tmp_path):
    stay_connected(monkeypatch)
    model, optimizer = trained((2,))
    rank = get_platform().groups.rank()
    with Checkpointer(tmp_path / "run", background=False) as checkpoints:
        words = LastWords(checkpoints, model, optimizer, within=LATE)
        text = say(words, 7 + rank, saved=0)
        assert "the ranks [0] are not at this step" in text and "the ranks [1] are not at this step" in text
        assert checkpoints.steps() == []


@on_ranks(1)
def test_buffers_that_a_forward_may_have_changed_are_not_saved(monkeypatch, tmp_path):
    stay_connected(monkeypatch)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path / "run", background=False) as checkpoints:
        text = LastWords(checkpoints, model, optimizer, within=LATE).save(7, saved=0)
    assert text.startswith("nothing was saved: a forward of the next step may have changed the model's buffers, as '1.")
    assert text.endswith("; there is no checkpoint")


@on_ranks(2)
def test_ranks_that_cannot_meet_say_that_they_saved_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("hp_platform.groups.can_disconnect", lambda: False)
    model, optimizer = trained((2,))
    rank = get_platform().groups.rank()
    with Checkpointer(tmp_path / "run", background=False) as checkpoints:
        words = LastWords(checkpoints, model, optimizer, within=LATE)
        text = words.save(7, saved=0)
        checkpoints.save(4, model, optimizer)
        later = words.save(7, saved=4)
    backend = get_backend()
    assert text == (
        f"rank {rank} saved nothing: the others may wait for it in a collective of {backend}, which one rank can't"
        " break, and would not come; there is no checkpoint"
    )
    assert later.endswith("; the newest checkpoint is step 4") and checkpoints.steps() == [4]
