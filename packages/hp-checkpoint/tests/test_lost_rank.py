"""A rank that dies while all save: the others say so, and the checkpoint before it is whole."""

from __future__ import annotations

import dying_rank
import numpy as np
import pytest

from hp_checkpoint import load
from hp_checkpoint.disk.manifest import steps_in
from hp_testing.pools import target
from hp_testing.pools.processes import rank_processes

pytestmark = pytest.mark.framework("torch")


def test_the_others_name_it(tmp_path):
    if lacking := target.missing():
        pytest.skip(lacking)
    ranks, doomed = 4, 2
    preload = ["hp_testing.torch.ranks", "hp_dtensor", "hp_checkpoint", "dying_rank"]
    with rank_processes(dying_rank.main, ranks, ranks, doomed, str(tmp_path), preload=preload) as (_, connections):
        port = connections[0].recv()
        for connection in connections[1:]:
            connection.send(port)
        outcomes = [connections[rank].recv() for rank in range(ranks) if rank != doomed and connections[rank].poll(40)]
    assert [outcome[:2] for outcome in outcomes] == [("LostRankError", (doomed,))] * 3
    assert steps_in(tmp_path) == [1] and [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    state = {"model": {"w": np.zeros(4000, np.float32)}}
    load(state, checkpoint_id=tmp_path / "step-00000001", no_dist=True, verify="all")
    assert (state["model"]["w"] == np.arange(4000)).all()
