"""A rank that ends in the middle of a step ends the others, with an error that names it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from multiprocessing.connection import wait
from typing import Any

import lost_ranks
import pytest

from hp_testing.pools import target
from hp_testing.pools.processes import rank_processes

pytestmark = pytest.mark.framework("torch")

LIMIT = 30.0  # half of the groups' timeout
CASES = [
    ("forward", 3, 0),
    ("backward", 4, 0),
    ("hsdp backward", 4, 3),
    ("clip_grad_norm_", 3, 0),
]
MORE = [
    ("forward", 4, 2),
    ("backward", 3, 1),
    ("deterministic backward", 4, 2),
    ("full_state_dict", 3, 2),
    ("redistribute", 4, 1),
]


@pytest.mark.parametrize(
    ("case", "ranks", "doomed"), [*CASES, *(pytest.param(*each, marks=pytest.mark.thorough) for each in MORE)]
)
def test_a_killed_rank_is_named(case: str, ranks: int, doomed: int):
    if lacking := target.missing():
        pytest.skip(lacking)
    preload = ["hp_testing.torch.ranks", "hp_dtensor", "hp_fsdp", "lost_ranks"]
    begin = time.monotonic()
    with rank_processes(lost_ranks.main, ranks, ranks, case, doomed, preload=preload) as (processes, connections):
        port = connections[0].recv()
        for connection in connections[1:]:
            connection.send(port)
        outcomes = {rank: _outcome(connections[rank], begin) for rank in range(ranks) if rank != doomed}
        for process in processes:
            process.join(max(0.0, begin + LIMIT - time.monotonic()))
        codes = [process.exitcode for process in processes]
    for rank, (kind, lost, text) in outcomes.items():
        assert (kind, lost) == ("LostRankError", (doomed,)), f"rank {rank}: {kind}: {text}"
        assert f"rank {doomed} was lost: its process has ended" in text
        assert f"failed on rank {rank}" in text
    assert codes == [-9 if rank == doomed else 1 for rank in range(ranks)]


def _outcome(connection: Any, begin: float) -> tuple[str, Any, str]:
    with contextlib.suppress(EOFError):
        if wait([connection], max(0.0, begin + LIMIT - time.monotonic())):
            return connection.recv()
        return "nothing", None, f"had not ended after {LIMIT:g} s"
    return "nothing", None, "ended without a word"


def test_programs_end_by_themselves_where_one_raises():
    """Whole interpreters, with nothing that catches the error or destroys the groups."""
    if lacking := target.missing():
        pytest.skip(lacking)
    ranks, doomed = 2, 1
    begin = time.monotonic()
    program = [sys.executable, lost_ranks.__file__]
    first = subprocess.Popen(
        [*program, "0", str(ranks), "0", str(doomed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    programs = [first]
    try:
        assert first.stdout
        port = first.stdout.readline().strip()
        for rank in range(1, ranks):
            arguments = [*program, str(rank), str(ranks), port, str(doomed)]
            programs.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        outputs = {}
        for rank in (doomed, 0):  # the simulated NPU takes a process that nobody has waited for as alive
            outputs[rank] = programs[rank].communicate(timeout=begin + 2 * LIMIT - time.monotonic())[1]
    finally:
        for each in programs:
            each.kill()
            each.communicate()
    assert [each.returncode for each in programs] == [1] * ranks
    assert "ValueError: this rank's data are bad" in outputs[doomed]
    assert "LostRankError" not in outputs[doomed]
    assert "hp_platform.failures.peers.LostRankError: rank 1 was lost: its process has ended" in outputs[0]
