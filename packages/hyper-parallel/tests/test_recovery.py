"""Launched runs that lose a rank, and go on elsewhere or in the same processes; `nox -s recovery` has many more."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from bench_recovery import session
from injections import Fault, Launcher
from recovery_matrix import differences
from recovery_matrix import plan_of as recovering_plan
from resume_matrix import Case, Samples, losses_of, plan_of, write_data

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it"),
]


@pytest.mark.thorough  # test_resuming.py has the same without launched processes
def test_a_run_that_is_killed_goes_on_with_the_same_bits_on_other_ranks(tmp_path):
    write_data(tmp_path / "data")
    launcher = Launcher(tmp_path / "runs")
    try:
        ended = launcher.train(plan_of("packed", {}, tmp_path / "data", deterministic=True), "whole", log=True)
        assert ended.status == 0, ended.err
        case = Case(launcher, tmp_path / "data", random.Random(0), "case", True)
        case.kind = "packed"
        case.parts = [({"dp_shard": 2}, Fault(1, "backward", "kill", 5)), ({"dp_replicate": 3}, None)]
        held = Samples(launcher.folder, "whole").new()
        assert case.run(losses_of(launcher.folder / "whole"), held) == ""
        assert case.stopped == 1
    finally:
        launcher.close()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    made = Launcher(tmp_path_factory.mktemp("recovering"))
    (made.folder / "text").write_bytes(b"to be or not to be, that is the question. " * 60)
    ended = made.train(plan(made), "truth", log=True)
    assert ended.status == 0, ended.err
    yield made
    made.close()


def plan(launcher, **recovery):
    """Of replicas and shards: in a backward the reductions of both are under way."""
    return recovering_plan(launcher.folder / "text", mesh={"dp_replicate": 2}, recovery=recovery)


def processes(launcher):
    return set(session(launcher.process.pid))


def test_a_killed_process_is_replaced_and_the_run_ends_with_the_same_bits(launcher):
    before = processes(launcher)
    ended = launcher.train(plan(launcher), "killed", "--recover", fault=Fault(1, "collective", "kill", 5, 2), log=True)
    assert ended.status == 0, ended.err
    assert "note: rank 1 failed: killed by SIGKILL" in ended.err and "It was in step 5 (step)" in ended.err
    assert "going on from a copy of step 4" in ended.err
    assert differences(launcher.folder, "killed", "truth") == ""
    assert processes(launcher) <= before


@pytest.mark.parametrize(
    ("every", "step", "wrong_until"), [pytest.param(1, 5, 5, marks=pytest.mark.thorough), (3, 5, 7)]
)
def test_a_rank_that_computes_wrongly_is_replaced_and_the_run_ends_with_the_same_bits(
    launcher, every, step, wrong_until
):
    """The state is wrong until a step is replayed: the copy of the last one that was replayed before counts."""
    name, data, mesh = f"wrong{every}", launcher.folder / "text", {"dp_shard": 3}
    whole = launcher.train(recovering_plan(data, mesh=mesh, sdc={"replay_every": every}), f"{name}-whole", log=True)
    assert whole.status == 0, whole.err
    wrong = recovering_plan(data, mesh=mesh, sdc={"replay_every": every, "on_fault": "replace"})
    ended = launcher.train(wrong, name, "--recover", fault=Fault(1, "forward", "flip", step), log=True)
    assert ended.status == 0, ended.err
    assert f"note: rank 1 failed: step {wrong_until}: persistent corruption of forward model.layers" in ended.err
    assert "its process ends itself; epoch 1 begins" in ended.err
    assert f"going on from a copy of step {4 if every == 3 else step - 1}" in ended.err
    assert differences(launcher.folder, name, f"{name}-whole") == ""
    doubted = [path.name for path in (launcher.folder / name / "checkpoints").glob("doubted-*")]
    assert doubted == (["doubted-step-00000006"] if every == 3 else [])


def test_a_rank_that_waits_to_make_a_group_with_a_lost_one_is_let_go(launcher):
    """The backend's limit is half an hour, and nothing watches for hangs here."""
    run = {"steps": 8, "checkpoint_every": 3, "grad_clip": 1.0, "stop_within": 10.0, "hang_after": 0.0}
    late = recovering_plan(launcher.folder / "text", mesh={"dp_replicate": 3}, run=run)
    ended = launcher.train(late, "late-group", "--recover", fault=Fault(0, "group", "kill", 4), log=True)
    assert ended.status == 0, ended.err
    assert "note: rank 0 failed: killed by SIGKILL" in ended.err and "going on from a copy of step 3" in ended.err


@pytest.mark.thorough
def test_every_rank_may_be_killed_at_once(launcher):
    """The launcher holds the copies, so that nobody's end ends them."""
    fault = Fault(-1, "backward", "kill", 4)
    ended = launcher.train(plan(launcher), "both", "--recover", "--spares", "2", fault=fault, log=True)
    assert ended.status == 0, ended.err
    assert "going on from a copy" in ended.err
    assert differences(launcher.folder, "both", "truth") == ""


@pytest.mark.thorough
def test_a_fault_while_the_run_recovers_is_another_one(launcher):
    fault = Fault(0, "rebuild", "kill", 4, times=2)
    ended = launcher.train(plan(launcher), "twice", "--recover", fault=fault, log=True)
    assert ended.status == 0, ended.err
    assert ended.err.count("note: rank 0 failed: killed by SIGKILL") == 2 and ended.err.count("recovered in") == 1
    assert differences(launcher.folder, "twice", "truth") == ""


@pytest.mark.thorough
def test_a_second_fault_in_one_step_ends_the_run_and_leaves_its_newest_step(launcher):
    ended = launcher.train(plan(launcher), "same", "--recover", fault=Fault(1, "forward", "raise", 5, times=9))
    assert ended.status == 1
    assert "RuntimeError: a fault was injected" in ended.err
    assert "it is fault 2 in step 5 (recovery.same_step)" in ended.err
    assert (launcher.folder / "same" / "checkpoints" / "step-00000004").is_dir()
    assert "go on from step 4 by --resume auto" in ended.err


@pytest.mark.thorough
def test_no_process_is_left_where_no_spare_gets_ready(launcher):
    before = processes(launcher)
    limits = {"wait_for_spare": 0.001, "replace": "all"}
    ended = launcher.train(plan(launcher, **limits), "late", "--recover", fault=Fault(0, "backward", "exit", 4))
    assert ended.status == 1 and "exit code 7" in ended.err and "(recovery.wait_for_spare)" in ended.err
    assert processes(launcher) <= before


@pytest.mark.thorough
def test_a_signal_stops_a_run_that_recovers_with_a_checkpoint(launcher):
    before = processes(launcher)
    ended = launcher.train(plan(launcher), "stopped", "--recover", fault=Fault(0, "data", "sigterm", 4))
    assert ended.status == 143 and "stopped by SIGTERM: step " in ended.err
    assert processes(launcher) <= before


@pytest.mark.parametrize(
    "how", ["raise", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("kill", "exit"))]
)
def test_a_rank_that_fails_while_it_evaluates_is_replaced(launcher, how):
    data = launcher.folder / "text"
    validated = recovering_plan(
        data, mesh={"dp_replicate": 2}, validation={"paths": [str(data)], "every": 2, "batches": 2}
    )
    whole = launcher.train(validated, f"whole-{how}", log=True)
    assert whole.status == 0, whole.err
    ended = launcher.train(validated, how, "--recover", fault=Fault(1, "evaluation", how, 4, 1), log=True)
    assert ended.status == 0, ended.err
    assert "note: rank 1 failed" in ended.err and "going on from a copy of step 4" in ended.err
    assert differences(launcher.folder, how, f"whole-{how}") == ""
