"""Lost ranks on process groups of PyTorch, and errors that are none."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import types

import far_ranks
import pytest
import torch.distributed as dist
import user_made

import hp_platform
from hp_platform import LostRankError, get_platform
from hp_platform.torch import peers
from hp_testing import on_ranks
from hp_testing.pools import target
from hp_testing.pools.processes import rank_processes


@on_ranks(2)
def test_all_know_each_other():
    here = peers._here
    assert here is not None and here.world is dist.group.WORLD
    assert sorted(here.addresses) == [0, 1]
    hp_platform.init_process_group()  # again: nothing is asked for
    assert peers._here is here


@on_ranks(2)
def test_errors_for_other_reasons_stay():
    get_platform().collectives.barrier()
    for error in (RuntimeError("shapes differ"), LostRankError("rank 1 was lost", [1])):
        peers.raise_if_lost(error, "all_gather", dist.group.WORLD)
        assert not hasattr(error, "__notes__")
    get_platform().collectives.barrier()


@on_ranks(2)
def test_a_failure_with_all_ranks_alive_is_noted(monkeypatch):
    monkeypatch.setattr(peers, "find_lost", lambda *args: hp_platform.failures.peers.find_lost(*args, limit=0.1))
    error = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv")
    peers.raise_if_lost(error, "all_gather", dist.group.WORLD)
    assert "the processes of all 2 ranks that could be asked live, so no rank was lost" in error.__notes__[0]
    get_platform().collectives.barrier()


@on_ranks(2)
def test_the_thread_keeps_no_group_alive():
    """The last reference must not be dropped by a thread while the interpreter ends."""
    world = peers._here
    assert world is not None and world.listener is not None
    (thread,) = [each for each in threading.enumerate() if each.name == "hp_platform peers"]
    reached, to_do = set(), [thread]
    while to_do:
        each = to_do.pop()
        if id(each) not in reached and not isinstance(each, (types.ModuleType, type)):
            reached.add(id(each))
            to_do += gc.get_referents(*([each.__dict__] if isinstance(each, types.FunctionType) else [each]))
    assert id(world.listener) in reached
    assert id(world) not in reached and id(dist.group.WORLD) not in reached
    get_platform().collectives.barrier()


def test_a_script_ends_without_threads(tmp_path):
    """Before the interpreter is finalized, whether the groups were destroyed or not, returning or raising."""
    if lacking := target.missing():
        pytest.skip(lacking)
    script = """if True:
        import atexit, sys, threading
        atexit.register(lambda: print([each.name for each in threading.enumerate()]))  # the last
        import torch.distributed as dist
        import hp_platform
        store, rank = dist.FileStore(sys.argv[1], 2), int(sys.argv[2])
        hp_platform.init_process_group("gloo", store=store, rank=rank, world_size=2)
        hp_platform.get_platform().collectives.barrier()
        assert "hp_platform peers" in [each.name for each in threading.enumerate()]
        if sys.argv[3] == "destroys":
            hp_platform.destroy_process_group()
        if rank == 1:
            sys.exit(3)
    """
    for end in ("returns", "destroys"):
        programs = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(tmp_path / end), str(rank), end], stdout=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        try:
            texts = [program.communicate(timeout=600)[0] for program in programs]
        finally:
            for program in programs:
                program.kill()
        assert texts == ["['MainThread']\n"] * 2
        assert [program.returncode for program in programs] == [0, 3]


def test_groups_that_torch_made(tmp_path):
    if lacking := target.missing():
        pytest.skip(lacking)
    with rank_processes(user_made.main, 3, str(tmp_path / "store")) as (processes, connections):
        for rank in (0, 2):
            assert connections[rank].poll(240.0)
            assert connections[rank].recv() == ([((1,), "RuntimeError")] * 4, 0, None)
        for process in processes:
            process.join(240.0)
        assert [process.exitcode for process in processes] == [0, 3, 0]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("ends", ("LostRankError", (4,), "rank 4 was lost: its process has ended")),
        ("gives up", ("FailedRankError", (), "rank 4 gave up: ValueError: no such file. The ranks can't go on")),
    ],
)
def test_ranks_that_wait_for_others_that_live_are_told(tmp_path, how, told):
    """Each waits for the next one, and the last one ends or gives up: those that raise before don't end."""
    if lacking := target.missing():
        pytest.skip(lacking)
    with rank_processes(far_ranks.main, 5, str(tmp_path / "store"), how) as (processes, connections):
        hearing = range(4) if how == "ends" else range(5)
        for rank in hearing:
            for _ in range(2):
                assert connections[rank].poll(240.0), f"rank {rank} heard nothing"
                kind, ranks, text = connections[rank].recv()
                assert (kind, ranks) == told[:2] and told[2] in text
        for rank in hearing:
            connections[rank].send("all have heard")
        for process in processes:
            process.join(240.0)
        assert [process.exitcode for process in processes] == [0, 0, 0, 0, 3 if how == "ends" else 0]
