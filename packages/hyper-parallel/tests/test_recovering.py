"""Runs that go on from copies of their ranks' state, and the decisions of a launcher that lets them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from unittest import mock

import pytest
from corrupted_runs import Fault as Corrupting
from corrupted_runs import planted
from small_runs import EXPERTS, TABLES, losses, run, validations
from typer.testing import CliRunner

from hp_checkpoint import CheckpointError
from hp_checkpoint.extend import Copies, diff, hold
from hp_optim import AdamW8bit
from hp_plan import ParallelPlan, PlanError, RecoverySection
from hp_platform import get_platform
from hp_platform.extend import SettingError
from hp_testing import run_ranks
from hyper_parallel.commands import cli
from hyper_parallel.launching.recovering import check_recovery, check_replacing, described, recovery_notes
from hyper_parallel.run import Run
from hyper_parallel.supervision.recovery import Recoveries, Told, fault_of
from hyper_parallel.training.resuming import check_held
from hyper_parallel.training.sentinel import FaultyRankError

pytestmark = pytest.mark.framework("torch")

STEPS, FAILS = 5, 4
WIDE = {"hidden_size": 64, "intermediate_size": 128}  # matrices of 4096 elements, whose states are coded


class Fault(Exception):
    """What a run is broken off by."""


def run_here(*arguments, **options):
    """Run, with the steps of eight bits uncompiled."""
    with mock.patch("hp_plan.torch.build.AdamW8bit", functools.partial(AdamW8bit, compiled=False)):
        return run(*arguments, **options)


def broken_off(folder, mesh, paths, epoch, fault=None, **options):
    """Run with copies; in epoch 0 the rank fails once the weights of a step are new and before they are copied.

    In epoch 1 it has a fault.
    """
    from hyper_parallel.torch.trainer import Trainer

    rank, update, taken = get_platform().groups.rank(), Trainer.update, []

    def fails(trainer):
        taken.append(update(trainer))
        if len(taken) == FAILS:
            raise Fault

    copies = Copies(paths[rank], rank=rank, epoch=epoch)
    with mock.patch.object(Trainer, "update", fails if epoch == 0 else update):
        with contextlib.suppress(Fault), planted(fault if epoch else None):
            run_here(folder, mesh, STEPS, copies=copies, resume="auto", **options)
    copies.close()
    return copies.refused


@pytest.fixture
def slots():
    """A function that holds the copies of ranks, and returns their paths for other processes."""
    held = []

    def made(ranks, holders=1):
        held.extend(hold(holders) for _ in range(ranks))
        place = f"/proc/{os.getpid()}/fd"
        return [[[f"{place}/{arena.descriptor}" for arena in holder] for holder in rank] for rank in held]

    yield made, held
    for arena in (arena for rank in held for holder in rank for arena in holder):
        arena.close()


def last(folder):
    return folder / "run" / "checkpoints" / f"step-{STEPS:08}"


CASES = {
    "fsdp": ({"dp_shard": 2}, {}),
    "tp": ({"tp": 2}, {}),
    "pp": ({"pp": 2}, {}),
    "ep": ({"dp_shard": 2, "ep": 2}, {"model": EXPERTS}),
    "cp": ({"cp": 2}, {}),
    "muon": ({"dp_shard": 2}, {"optimizer": "muon"}),
    "eight bits": (
        {"dp_shard": 2},
        {
            "optimizer": "adamw8bit",
            "model": {**TABLES["model"], "overrides": {**TABLES["model"]["overrides"], **WIDE}},
            "changed": {"dtype": "float32"},
        },
    ),
    "states on the host": ({"dp_shard": 2}, {"optimizer": {"name": "adamw", "swap_slices": 2}}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=pytest.mark.thorough if each == "cp" else ()) for each in CASES]
)
def test_a_run_goes_on_from_copies_with_the_same_bits(tmp_path, slots, case):
    mesh, options = CASES[case]
    make, _ = slots
    paths = make(2)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    run_ranks(2, run_here, tmp_path / "whole", mesh, STEPS, **options)
    for epoch in (0, 1):
        run_ranks(2, broken_off, tmp_path / "parts", mesh, paths, epoch, **options)
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    assert losses(parts) == losses(whole) and validations(parts) == validations(whole)
    assert [str(each) for each in diff(last(parts), last(whole))] == []


def test_a_copy_that_changed_is_refused_and_the_next_holder_used(tmp_path, slots):
    make, held = slots
    paths = make(2, holders=2)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    run_ranks(2, run, tmp_path / "whole", {"dp_shard": 2}, STEPS)
    run_ranks(2, broken_off, tmp_path / "parts", {"dp_shard": 2}, paths, 0)
    for arena in held[1][0]:  # both slots of rank 1's first holder
        arena.reserve(os.fstat(arena.descriptor).st_size)[4096] ^= 1
    refused = run_ranks(2, broken_off, tmp_path / "parts", {"dp_shard": 2}, paths, 1)
    text = "the copy of rank 1 of step {} in holder 0 has other bits than were written: it is not used"
    assert [sorted(each) for each in refused] == [[], [text.format(2), text.format(3)]]
    assert [str(each) for each in diff(last(tmp_path / "parts"), last(tmp_path / "whole"))] == []


@pytest.mark.parametrize("kind", ["weight", "forward"])
def test_the_first_step_after_a_recovery_is_not_the_first_of_the_run(tmp_path, slots, kind):
    """A fault in it is one that is restored, not a run that can't be compared."""
    make, _ = slots
    paths, mesh = make(3), {"dp_replicate": 3}
    name = {"weight": "model.norm.weight", "forward": "model.layers.0.mlp.up_proj"}[kind]
    sdc = {"sdc": {"replicas": True, "replay_every": 3}, "batch_size": 6}
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    run_ranks(3, run_here, tmp_path / "whole", mesh, STEPS, changed=sdc)
    fault = Corrupting(kind, 1, 1, name)  # of the process
    for epoch in (0, 1):
        run_ranks(3, broken_off, tmp_path / "parts", mesh, paths, epoch, fault, changed=sdc)
    found = [json.loads(line) for line in (tmp_path / "parts" / "run" / "corruptions.jsonl").read_text().splitlines()]
    assert [(each["step"], each["ranks"], each["verdict"]) for each in found] == [(FAILS, [1], "transient")]
    assert [str(each) for each in diff(last(tmp_path / "parts"), last(tmp_path / "whole"))] == []


def corrupted_copies(folder, paths, faults, **sections):
    """Run with copies and faults; write what a rank ends with."""
    rank = get_platform().groups.rank()
    copies = Copies(paths[rank], rank=rank, epoch=0)
    with contextlib.ExitStack() as stack:
        for each in faults:
            stack.enter_context(planted(each))
        try:
            run_here(folder, {"dp_replicate": 3}, STEPS, copies=copies, changed={"batch_size": 6, **sections})
        except FaultyRankError as error:
            return error.ranks, error.newest, [each.step for each in error.corruptions]
        finally:
            copies.close()
    return None


def test_a_finding_is_in_the_line_of_its_own_step_where_fewer_are_copied(tmp_path, slots):
    make, _ = slots
    flip = Corrupting("weight", 3, 1, "model.norm.weight")
    options = {"sdc": {"replicas": True}, "recovery": {"every": 2}, "validation": {}}
    run_ranks(3, corrupted_copies, tmp_path, make(3), [flip], **options)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["corruptions"] for line in lines] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2)])
def test_a_rank_that_keeps_wrong_weights_twice_is_to_be_replaced(tmp_path, slots, ranks):
    make, _ = slots
    flips = [Corrupting("weight", step, rank, "model.norm.weight") for step, rank in zip((2, 4), ranks)]
    sdc = {"sdc": {"replicas": True, "on_fault": "replace"}}
    ended = run_ranks(3, corrupted_copies, tmp_path, make(3), flips, **sdc)
    assert ended == [((1,), None, [4]) if ranks == (1, 1) else None] * 3


def test_without_a_whole_copy_the_newest_checkpoint_is_taken(tmp_path, slots):
    """Rank 1 has lost its copies; the checkpoint is of step 2."""
    make, held = slots
    paths = make(2)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    run_ranks(2, run, tmp_path / "whole", {"dp_shard": 2}, STEPS)
    run_ranks(2, broken_off, tmp_path / "parts", {"dp_shard": 2}, paths, 0)
    for arena in held[1][0]:
        os.ftruncate(arena.descriptor, 0)
    deadline = time.monotonic() + 60  # its writers end by themselves
    while not (tmp_path / "parts" / "run" / "checkpoints" / "step-00000002").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    run_ranks(2, broken_off, tmp_path / "parts", {"dp_shard": 2}, paths, 1)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert [str(each) for each in diff(last(tmp_path / "parts"), last(tmp_path / "whole"))] == []


def test_steps_that_nobody_can_restore_are_not_taken_again_in_silence():
    check_held([{1}, set()], 1)  # the fault came while the first step was copied
    with pytest.raises(CheckpointError, match=r"rank 0 of \[6, 7\], rank 1 of none.*run.checkpoint_every"):
        check_held([{6, 7}, set()], 1)


def test_the_process_that_ended_is_named_and_not_those_that_lost_it():
    told = [Told("lost", text="rank 1 was lost"), Told("ended"), Told("lost", text="rank 1 was lost")]
    fault = fault_of(told, [7, 7, None], lambda rank: f"killed by SIGKILL ({rank})")
    assert (fault.ranks, fault.step, fault.text, fault.explained) == ((1,), 7, "killed by SIGKILL (1)", False)
    raised = fault_of([Told("failed", text="Traceback", error="KeyError"), Told("lost")], [3, 3], str)
    assert (raised.ranks, raised.text, raised.explained) == ((0,), "Traceback", False)
    alike = fault_of([Told("failed", text="the data ends", error="DataError")] * 2, [3, 3], str)
    assert alike.explained and alike.ranks == (0, 1)
    wrong = Told("failed", text="wrong", error="FaultyRankError", newest=4)
    faulty = fault_of([Told("lost", newest=4), wrong], [9, 9], str)
    assert (faulty.ranks, faulty.explained, faulty.newest) == ((1,), False, 4)
    assert fault_of([Told("lost", newest=4), Told("ended")], [9, 9], str).newest == 4  # it was killed before it told
    nobody = fault_of([Told("lost", text="connection reset")] * 2, [None, None], str)
    assert (nobody.ranks, nobody.step) == ((), None)


def test_a_run_is_given_up_after_so_many_faults():
    def fault(step, explained=False):
        return fault_of([Told("failed", text="x", error="DataError" if explained else "KeyError")], [step], str)

    limited = Recoveries(RecoverySection(limit=2))
    assert [limited.refusal(fault(step)) for step in (1, 5)] == [None, None]
    assert limited.refusal(fault(9)) == "the run has recovered 2 times within an hour (recovery.limit)"
    same = Recoveries(RecoverySection(same_step=2))
    assert [same.refusal(fault(step)) for step in (3, 4)] == [None, None]
    assert "it is fault 2 in step 4 (recovery.same_step)" in str(same.refusal(fault(4)))
    starting = Recoveries(RecoverySection(same_step=1))
    assert starting.refusal(fault(None)) is None  # no step had begun
    assert Recoveries(RecoverySection()).refusal(fault(1, True)) == "another process would end the same way"


def test_the_command_says_what_it_will_do_and_where_it_can_not(monkeypatch):
    plan = ParallelPlan.from_dict(TABLES)
    assert described(plan, 1) == (
        "recovery: a process that ends, hangs or raises is replaced by one of 1 spare process, the others stay; at most"
        " 3 times an hour"
    )
    every = ParallelPlan.from_dict({**TABLES, "recovery": {"replace": "all"}})
    assert "all are replaced and go on from copies in memory" in described(every, 2)
    assert recovery_notes(plan) == [] and "under torchrun, msrun and srun" in recovery_notes(every)[0]
    check_recovery(True, None, None)
    with pytest.raises(SettingError, match="--debug-rank"):
        check_recovery(True, None, 1)
    with pytest.raises(SettingError, match="--spares 2: .*--recover"):
        check_recovery(False, 2, None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_recovery(False, None, None)
    with pytest.raises(SettingError, match="torchrun --max-restarts 3"):
        check_recovery(True, None, None)


def test_a_faulty_rank_is_not_replaced_without_spares(tmp_path, monkeypatch):
    tables = {**TABLES, "mesh": {"dp_shard": 2}, "sdc": {"replay_every": 1, "on_fault": "replace"}}
    plan = ParallelPlan.from_dict(tables)
    check_replacing(plan, True)
    check_replacing(ParallelPlan.from_dict({**tables, "sdc": {"replay_every": 1}}), False)
    with pytest.raises(PlanError, match=r"sdc.on_fault: got 'replace', but no spare process.*--recover --spares 1"):
        check_replacing(plan, False)
    with pytest.raises(PlanError, match="this run keeps no copies"):
        Run(ParallelPlan.from_dict({**tables, "mesh": {}}), tmp_path)
    with mock.patch.object(type(get_platform().devices), "kind", "cuda"):
        with pytest.raises(PlanError, match="a spare process would compute on the same cuda device"):
            check_replacing(plan, True)
    assert recovery_notes(plan) == [
        "sdc.on_fault = 'replace' needs spare processes: hyper-parallel train --recover --spares 1"
    ]
    path = tmp_path / "plan.toml"
    path.write_text(plan.to_toml())
    done = CliRunner().invoke(cli.app, ["train", str(path), "--nproc", "2"])
    assert done.exit_code == 1 and "sdc.on_fault" in done.output


def test_lint_says_where_processes_are_not_replaced(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(ParallelPlan.from_dict({**TABLES, "recovery": {"holders": 2}}).to_toml())
    done = CliRunner().invoke(cli.app, ["lint", str(path), "--json"])
    assert "[recovery] is for hyper-parallel train --recover on one machine" in done.output
