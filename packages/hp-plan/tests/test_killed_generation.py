"""A rank that is killed while it generates is named by the others."""

from __future__ import annotations

from multiprocessing.connection import wait

import killed_generation
import pytest

from hp_testing.pools import target
from hp_testing.pools.processes import rank_processes

pytestmark = pytest.mark.framework("torch")
RANKS, DOOMED, LIMIT = 2, 1, 120.0


@pytest.mark.parametrize(
    ("axis", "memory"),
    [
        ("pp", None),
        ("dp_shard", 0),  # gathered for each token
        pytest.param("dp_shard", None, marks=pytest.mark.thorough),  # gathered once: it is missed in the step after
        pytest.param("tp", None, marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_is_killed_is_named(axis, memory):
    if lacking := target.missing():
        pytest.skip(lacking)
    preload = ["hp_testing.torch.ranks", "hp_plan", "killed_generation"]
    arguments = (RANKS, DOOMED, axis, memory)
    with rank_processes(killed_generation.main, RANKS, *arguments, preload=preload) as (processes, connections):
        connections[1].send(connections[0].recv())
        assert wait([connections[0]], LIMIT), "it waits on"
        name, lost, text = connections[0].recv()
        for process in processes:
            process.join(LIMIT)
        codes = [process.exitcode for process in processes]
    assert (name, lost) == ("LostRankError", (DOOMED,)), text
    assert f"rank {DOOMED} was lost: its process has ended" in text
    assert codes == [1, -9]
