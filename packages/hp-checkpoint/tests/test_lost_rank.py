"""A rank that dies while all save, or stream weights: the others say so, and the checkpoint before it is whole."""

from __future__ import annotations

from typing import Any

import dying_rank
import numpy as np
import pytest

from hp_checkpoint import load
from hp_checkpoint.disk.manifest import steps_in
from hp_testing.pools import target
from hp_testing.pools.processes import rank_processes

pytestmark = pytest.mark.framework("torch")


def outcomes(function: Any, ranks: int, doomed: int, *arguments: Any) -> list[Any]:
    """Run a function on ranks, one of which is killed; return what the others send."""
    if lacking := target.missing():
        pytest.skip(lacking)
    preload = ["hp_testing.torch.ranks", "hp_dtensor", "hp_checkpoint", "dying_rank"]
    with rank_processes(function, ranks, ranks, doomed, *arguments, preload=preload) as (_, connections):
        port = connections[0].recv()
        for connection in connections[1:]:
            connection.send(port)
        return [connections[rank].recv() for rank in range(ranks) if rank != doomed and connections[rank].poll(40)]


def test_the_others_name_it(tmp_path):
    found = outcomes(dying_rank.main, 4, 2, str(tmp_path))
    assert [outcome[:2] for outcome in found] == [("LostRankError", (2,))] * 3
    assert steps_in(tmp_path) == [1] and [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    state = {"model": {"w": np.zeros(4000, np.float32)}}
    load(state, checkpoint_id=tmp_path / "step-00000001", no_dist=True, verify="all")
    assert (state["model"]["w"] == np.arange(4000)).all()


def test_the_others_of_a_stream_name_it():
    assert outcomes(dying_rank.stream, 3, 1) == [("LostRankError", (1,))] * 2
