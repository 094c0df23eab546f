"""Saves beside the training: the same files, of the state at the call; writers that are busy, fail or are killed."""

from __future__ import annotations

import hashlib
import os
import signal

import pytest
import torch
from torch import nn

from hp_checkpoint import Checkpointer, CheckpointError
from hp_checkpoint.retention import Keep, steps_in
from hp_checkpoint.writer import _gathered
from hp_dtensor import init_device_mesh
from hp_fsdp import fully_shard
from hp_platform import get_platform
from hp_testing import device_type, on_ranks


def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5)).to(device_type())
    fully_shard(model, init_device_mesh(device_type(), (get_platform().groups.size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6, device=device_type())).sum().backward()
    optimizer.step()
    return model, optimizer


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def writer_of(checkpoints):
    return checkpoints._writer._process.pid


@on_ranks(1, 2)
def test_it_writes_the_state_at_the_call(tmp_path):
    model, optimizer = training()
    with Checkpointer(tmp_path / "front", background=False) as front:
        front.save(1, model, optimizer, extra={"a": 1})
    with Checkpointer(tmp_path / "back", keep=Keep(last=1)) as back:
        pending = back.save(1, model, optimizer, extra={"a": 1})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        committed = pending.wait()
        assert committed.folder == back.path(1) and pending.done() and pending.wait() is committed
        assert hashes(back.path(1)) == hashes(front.path(1))
        back.save(2, model, optimizer)
        back.save(3, model, optimizer)
    assert steps_in(tmp_path / "back") == [3] and [p.name for p in (tmp_path / "back").iterdir()] == ["step-00000003"]


@on_ranks(2)
def test_a_busy_writer(tmp_path):
    """Whichever rank's it is, all ranks do the same."""
    model, _ = training()
    for busy in ("skip", "error"):
        with Checkpointer(tmp_path / busy, busy=busy) as checkpoints:
            if get_platform().groups.rank() == 1:
                os.kill(writer_of(checkpoints), signal.SIGSTOP)
            checkpoints.save(1, model)
            if busy == "skip":
                assert checkpoints.save(2, model).wait().folder is None
            else:
                with pytest.raises(RuntimeError, match="step 2 is to be saved while the save before it is under way"):
                    checkpoints.save(2, model)
            if get_platform().groups.rank() == 1:
                os.kill(writer_of(checkpoints), signal.SIGCONT)
        assert steps_in(tmp_path / busy) == [1]
    with pytest.raises(ValueError, match="busy must be 'wait', 'skip' or 'error', got 'no'"):
        Checkpointer(tmp_path, busy="no")


@on_ranks(2)
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_writer_is_named_and_replaced(tmp_path, killed):
    model, _ = training()
    checkpoints = Checkpointer(tmp_path / "run")
    checkpoints.save(1, model).wait()
    before = hashes(checkpoints.path(1))
    if get_platform().groups.rank() == killed:
        os.kill(writer_of(checkpoints), signal.SIGSTOP)
    pending = checkpoints.save(2, model)
    if get_platform().groups.rank() == killed:
        os.kill(writer_of(checkpoints), signal.SIGKILL)
    text = f"save failed on 1 of 2 ranks: rank {killed}: the writer process ended with status -9 during the save"
    with pytest.raises(CheckpointError, match=text):
        checkpoints.save(3, model)  # nobody has to wait for an error to hear of it
    with pytest.raises(CheckpointError, match=text):
        pending.wait()
    checkpoints.save(4, model).wait()
    checkpoints.close()
    assert steps_in(tmp_path / "run") == [1, 4] and hashes(checkpoints.path(1)) == before


def test_the_error_of_another_writer(tmp_path):
    (tmp_path / "rank-1.failed").write_text("ENOSPC: No space left on device: model.safetensors")
    with pytest.raises(RuntimeError, match="the writers of 1 of 2 ranks failed: rank 1: ENOSPC: No space left on dev"):
        _gathered(tmp_path, 2)
