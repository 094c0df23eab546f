"""A rank that dies while all save or load: the others name it, none waits, and what was saved before is whole."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_checkpoint import load
from hp_checkpoint.retention import steps_in
from hp_testing import target
from hp_testing.processes import rank_processes

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
import dying_rank

pytestmark = pytest.mark.framework("torch")
RANKS = 4
QUICK = (
    "saves: a write",
    "saves beside the training: its writer has the copy",
    "loads: a read",
    "loads: another one's unit is there",
)
STAGES = [pytest.param(each, marks=() if each in QUICK else pytest.mark.thorough) for each in dying_rank.STAGES]


@contextmanager
def ranks_of(folder: Path, stage: str, *, doomed: int, killed: bool, hosts: str) -> Iterator[tuple[Any, Any]]:
    if lacking := target.missing():
        pytest.skip(lacking)
    preload = ["hp_testing.torch.ranks", "hp_dtensor", "hp_checkpoint", "dying_rank"]
    arguments = RANKS, stage, doomed, killed, hosts, folder
    with rank_processes(dying_rank.main, RANKS, *arguments, preload=preload) as (processes, connections):
        port = connections[0].recv()
        for connection in connections[1:]:
            connection.send(port)
        yield processes, connections


def outcomes(connections: list[Connection], doomed: int) -> list[tuple[str, tuple[int, ...]]]:
    others = [connection for rank, connection in enumerate(connections) if rank != doomed]
    return [connection.recv()[:2] for connection in others if connection.poll(40)]


def assert_first_is_whole(folder: Path) -> None:
    state = {"model": {"w": np.zeros((dying_rank.ROWS, 1000), np.float32)}}
    load(state, checkpoint_id=folder / "step-00000001", no_dist=True, verify="all")
    assert (state["model"]["w"] == dying_rank.values().numpy()).all()


@pytest.mark.parametrize("stage", STAGES)
def test_the_others_name_it(tmp_path, stage):
    folder = tmp_path / "run"
    hosts = "0011" if stage.endswith("hosts") else "0000"
    with ranks_of(folder, stage, doomed=2, killed=True, hosts=hosts) as (_, connections):
        assert outcomes(connections, 2) == [("LostRankError", (2,))] * 3
    complete = [1]
    if stage.endswith("its writer has the copy"):  # the writers need no rank
        complete = [1, 2]
        for _ in range(400):
            if steps_in(folder) == complete:
                break
            time.sleep(0.1)
    assert steps_in(folder) == complete
    if not stage.endswith("the copy") or len(complete) == 2:
        assert sorted(path.name for path in folder.iterdir()) == [f"step-0000000{step}" for step in complete]
    assert_first_is_whole(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["loads: a read", "loads: an exchange between hosts"])
def test_the_first_rank(tmp_path, stage):
    """It has the store."""
    with ranks_of(tmp_path / "run", stage, doomed=0, killed=True, hosts="0101") as (_, connections):
        assert outcomes(connections, 0) == [("LostRankError", (0,))] * 3
    assert_first_is_whole(tmp_path / "run")


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["loads: a read", "loads: it has copied another one's unit"])
def test_all_are_killed_at_once(tmp_path, stage):
    """The memory that they share has no name, so nothing of it outlives them."""
    with ranks_of(tmp_path / "run", stage, doomed=2, killed=False, hosts="0000") as (processes, connections):
        assert connections[2].poll(40) and connections[2].recv() == "there"
        for process in processes:
            own = Path(f"/proc/{process.pid}")
            used = [line.partition("/")[2] for line in (own / "maps").read_text().splitlines()]
            used += [str(each.readlink()).lstrip("/") for each in (own / "fd").iterdir()]
            assert any(each.startswith("memfd:hp-checkpoint") for each in used)
            assert not [each for each in used if each.startswith("dev/shm") and not each.endswith("(deleted)")]
    assert_first_is_whole(tmp_path / "run")
