"""Saves beside the training: the same files, of the state at the call; writers that are busy, fail or are killed."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from hp_checkpoint import Checkpointer, CheckpointError
from hp_checkpoint.disk import storage
from hp_checkpoint.disk.manifest import Keep, steps_in
from hp_checkpoint.disk.storage import Arena
from hp_checkpoint.saving import background
from hp_checkpoint.saving.writer_process import _gathered
from hp_dtensor import init_device_mesh
from hp_fsdp import fully_shard
from hp_platform import LostRankError, get_platform
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
@pytest.mark.parametrize("layout", ["files", "shards"])
def test_it_writes_the_state_at_the_call(tmp_path, layout):
    model, optimizer = training()
    with Checkpointer(tmp_path / "front", background=False, layout=layout) as front:
        front.save(1, model, optimizer, extra={"a": 1})
    with Checkpointer(tmp_path / "back", keep=Keep(last=1), layout=layout) as back:
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


@on_ranks(2)
@pytest.mark.parametrize("beside", [True, False])
def test_a_save_after_the_close(tmp_path, beside):
    model, _ = training()
    with Checkpointer(tmp_path / "run", background=beside) as checkpoints:
        checkpoints.save(1, model)
    with pytest.raises(RuntimeError, match=r"step 2 comes after close\(\); make another Checkpointer\('.*run'\)"):
        checkpoints.save(2, model)
    checkpoints.close()
    assert checkpoints.load(model).step == 1 and checkpoints.steps() == [1]
    with Checkpointer(checkpoints.folder, background=beside) as another:
        another.save(2, model)
    assert another.steps() == [1, 2]


def test_the_error_of_another_writer(tmp_path):
    (tmp_path / "rank-1.failed").write_text("ENOSPC: No space left on device: model.safetensors")
    with pytest.raises(RuntimeError, match="the writers of 1 of 2 ranks failed: rank 1: ENOSPC: No space left on dev"):
        _gathered(tmp_path, 2)


@on_ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_has_no_memory_for_the_copy(tmp_path, monkeypatch, failing):
    """The other writers, which have their jobs, end them, so that the next save neither waits nor meets them."""
    model, _ = training()
    with Checkpointer(tmp_path / "run") as checkpoints:
        if get_platform().groups.rank() == failing:
            monkeypatch.setattr(Arena, "store", no_memory)
        with pytest.raises(CheckpointError, match=f"failed on 1 of 2 ranks: rank {failing}: MemoryError: 8 GiB"):
            checkpoints.save(1, model)
        monkeypatch.undo()
        checkpoints.save(2, model).wait()
        assert checkpoints.steps() == [2]


def no_memory(*_):
    raise MemoryError("8 GiB")


@on_ranks(1)
def test_an_interrupted_wait(tmp_path, monkeypatch):
    """The writer still reads the copy: the next save waits for it."""
    model, _ = training()
    with Checkpointer(tmp_path / "run") as checkpoints:
        os.kill(writer_of(checkpoints), signal.SIGSTOP)
        pending = checkpoints.save(1, model)
        monkeypatch.setattr(background, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, model)
        monkeypatch.undo()
        assert not pending.settled
        os.kill(writer_of(checkpoints), signal.SIGCONT)
        checkpoints.save(2, model)
    assert steps_in(tmp_path / "run") == [1, 2]


def interrupt(*_, **__):
    raise KeyboardInterrupt


@on_ranks(2)
def test_a_rank_that_raises_alone(tmp_path):
    """It doesn't wait for the others at the end of the block, and they don't for it; the save under way is ended."""
    model, _ = training()
    checkpoints = Checkpointer(tmp_path / "run")
    process = checkpoints._writer._process
    if get_platform().groups.rank() == 1:
        with pytest.raises(ZeroDivisionError), checkpoints:
            checkpoints.save(1, model)
            raise ZeroDivisionError
    else:
        checkpoints.save(1, model)
    get_platform().collectives.barrier()  # not one of a save
    if get_platform().groups.rank() == 0:
        checkpoints._writer.leave()
    assert process.wait() == 0
    get_platform().collectives.barrier()
    assert checkpoints.steps() == [1]


@on_ranks(1)
def test_signals_to_all_processes_of_a_job(tmp_path):
    """A cluster that stops a job sends them to the writer as well, which the job's last save needs."""
    model, _ = training()
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, model).wait()
        writer = writer_of(checkpoints)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(writer, number)
        checkpoints.save(2, model).wait()
        assert writer_of(checkpoints) == writer


@on_ranks(1)
def test_the_training_comes_first(tmp_path):
    """Linux divides processors by priorities among processes of one session, and evenly between sessions."""
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, training()[0]).wait()
        writer = writer_of(checkpoints)
        assert os.getpriority(os.PRIO_PROCESS, writer) > os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getsid(writer) == os.getsid(0) and os.getpgid(writer) != os.getpgid(0)


@on_ranks(1, 2)
@pytest.mark.parametrize("beside", [True, False])
def test_a_save_after_an_older_checkpoint_stays(tmp_path, beside):
    """Where later ones can't be read, or were left on purpose."""
    model, _ = training()
    with Checkpointer(tmp_path / "run", keep=Keep(last=1), background=beside) as checkpoints:
        for step in (100, 300, 200, 250):
            checkpoints.save(step, model).wait()
    assert steps_in(tmp_path / "run") == [250, 300]


@on_ranks(1, 2)
@pytest.mark.parametrize("beside", [True, False])
def test_the_best_stay(tmp_path, beside):
    """Known from the disk after a restart; NaN is never among them, and of equal ones the older stays."""
    model, _ = training()
    run, nan = tmp_path / "run", float("nan")
    for metrics in ({1: 3.0, 2: nan, 3: 1.5}, {4: 2.0, 5: 1.5, 6: float("inf")}, {7: 9, 8: nan}):
        with Checkpointer(run, keep=Keep(last=1, best=2), background=beside) as checkpoints:
            for step, metric in metrics.items():
                checkpoints.save(step, model, metric=metric)
    assert steps_in(run) == [3, 5, 8]
    with Checkpointer(run, keep=Keep(last=1, best=1, better="larger"), background=beside) as checkpoints:
        checkpoints.save(9, model, metric=np.float32(1.25))
        checkpoints.save(10, model, metric=0.5)
    assert steps_in(run) == [3, 10]


@on_ranks(1, 2)
def test_metrics_that_are_none(tmp_path):
    model, _ = training()
    rank, size = get_platform().groups.rank(), get_platform().groups.size()
    with Checkpointer(tmp_path / "run", keep=Keep(best=2), background=False) as checkpoints:
        with pytest.raises(
            ValueError, match=r"save: Keep\(last=2, .*best=2, .*\) compares metrics; pass metric=, such"
        ):
            checkpoints.save(1, model)
        with pytest.raises(
            TypeError, match=r"metric must be a number, got tensor\(1.\); of a tensor pass its item\(\)"
        ):
            checkpoints.save(1, model, metric=torch.tensor(1.0))
        if size > 1:
            with pytest.raises(ValueError, match="ranks save different metrics: rank 0: 1.0, rank 1: 'nan'; all save"):
                checkpoints.save(1, model, metric=float("nan") if rank else 1.0)
            with pytest.raises(CheckpointError, match="failed on 1 of 2 ranks: rank 1: save: Keep.* compares metrics"):
                checkpoints.save(1, model, metric=None if rank else 1.0)
        assert checkpoints.steps() == []
        checkpoints.save(1, model, metric=torch.tensor(1.0).item())
        assert checkpoints.steps() == [1]


@on_ranks(1)
def test_an_interrupted_removal(tmp_path, monkeypatch):
    """What is left of a checkpoint is none; its step can be saved again."""
    model, _ = training()
    with Checkpointer(tmp_path, keep=Keep(last=1), background=False) as checkpoints:
        checkpoints.save(1, model)
        monkeypatch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, model)
        monkeypatch.undo()
        assert checkpoints.steps() == [2]
        checkpoints.save(1, model)
        assert checkpoints.steps() == [1, 2]
        monkeypatch.setattr(storage, "_NEW", 0.0)
        checkpoints.save(3, model)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@on_ranks(1)
def test_a_save_outlives_a_rank(tmp_path, monkeypatch):
    """The lost rank's writer goes on, so that of rank 0 commits."""
    model, _ = training()
    with Checkpointer(tmp_path / "run") as checkpoints:
        pending = checkpoints.save(1, model)
        process = checkpoints._writer._process
        monkeypatch.setattr(pending._ranks, "agree", lose)
        for _ in range(2):
            with pytest.raises(LostRankError, match="rank 1"):
                pending.wait()
        assert process.wait() == 0 and checkpoints.steps() == [1]
        checkpoints.save(2, model)
    assert steps_in(tmp_path / "run") == [1, 2]


def lose(*_):
    raise LostRankError("rank 1 has ended", (1,))


def test_a_reply_that_nobody_reads_is_no_failure():
    read, write = os.pipe()
    os.close(read)
    program = "from hp_checkpoint.saving import writer_process; writer_process._reply(end=True)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=600)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
