"""The command with ranks: they start, they train, and none outlives the others.

They share one launcher, whose libraries are loaded once: a process that runs the command again and again. Those that
join torchrun's ranks have their own.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_commands import (
    ENDLESS,
    LIMIT,
    PLAN,
    SLOW,
    STARTED,
    TORCHRUN,
    Launcher,
    alive,
    end,
    fill,
    join_as_of_torchrun,
    start,
    wait_until,
    write_plan,
)

from hp_testing import run_ranks
from hp_testing.pools.processes import rank_processes

pytestmark = [
    pytest.mark.framework("torch"),  # its programs are; tests/mindspore has those of msrun
    pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it"),
]


@pytest.fixture(scope="module")
def _launchers() -> Iterator[list[Launcher]]:
    launchers: list[Launcher] = []
    yield launchers
    for launcher in launchers:
        end(launcher.process)


@pytest.fixture
def launcher(_launchers, tmp_path_factory) -> Launcher:
    """The shared launcher; a new one where a failed test has left it in the middle of a command."""
    if _launchers and (_launchers[0].running or _launchers[0].process.poll() is not None):
        end(_launchers.pop().process)
    if not _launchers:
        _launchers.append(Launcher(tmp_path_factory.mktemp("launcher")))
    return _launchers[0]


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """A folder for a command of the test's own, of which no process is left."""
    before = [*STARTED]
    yield fill(tmp_path)
    for process in [process for process in STARTED if process not in before]:
        end(process)


def test_training_leaves_its_files_and_speaks_json(launcher):
    folder = launcher.folder
    checked = ("--set", 'validation.paths=["text"]', "--set", "validation.every=15", "--set", "validation.batches=1")
    launcher.begin("train", "run.toml", "--data", "text", "--out", "run", "--steps", "30", "--json", *checked)
    status, out, err = launcher.finish()
    assert status == 0, err
    *steps, summary = map(json.loads, out.splitlines())
    assert [step["step"] for step in steps if "validation_loss" in step] == [15, 30]
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert summary["tokens"] == 30 * 8 * 16
    assert len(summary["peak_memory"]) == 2
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == steps
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "steps = 30" in (folder / "run" / "plan.toml").read_text()
    assert (folder / "run" / "checkpoints" / "step-00000030" / "model.safetensors").stat().st_size > 4 * 256 * 9
    assert not alive(folder)


def test_stages_are_trained_into_one_checkpoint(launcher):
    from safetensors.torch import load_file

    plan = PLAN.replace("bigram:bigram", "bigram:in_blocks").replace("dp_shard", "pp").partition("[model.overrides]")[0]
    (launcher.folder / "stages.toml").write_text(plan)
    launcher.begin("train", "stages.toml", "--data", "text", "--out", "stages", "--steps", "2", "--json")
    status, out, err = launcher.finish()
    assert status == 0, err
    *steps, summary = map(json.loads, out.splitlines())
    assert [step["step"] for step in steps] == [1, 2] and steps[1]["loss"] < steps[0]["loss"] < 6
    state = load_file(launcher.folder / "stages" / "checkpoints" / "step-00000002" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "embed.weight": (256, 9),
        "head.weight": (256, 9),
        "head.bias": (256,),
        **{f"blocks.{index}.weight": (9, 9) for index in range(3)},
        **{f"blocks.{index}.bias": (9,) for index in range(3)},
    }
    launcher.begin("train", "run.toml", "--data", "text", "--out", "stages", "--resume", "auto")
    status, _, err = launcher.finish()
    assert status == 1
    assert "step-00000002 doesn't fit the plan: load: the checkpoint has 6 of 9 tensors that the model lacks" in err
    assert "Traceback" not in err  # ranks' errors that tell what to do are shown by themselves


OF_THE_LENGTH = """
import transformers

class OwnForCausalLM(transformers.LlamaForCausalLM):
    takes = "nothing"

    def forward(self, input_ids, position_ids=None, **inputs):
        outputs = super().forward(input_ids, position_ids=None if self.takes == "positions" else position_ids, **inputs)
        if self.takes == "scale":
            outputs.logits = outputs.logits / input_ids.shape[1]
        return outputs

def llama(takes):
    model = OwnForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=24, intermediate_size=16, num_hidden_layers=1, num_attention_heads=3
    ))
    model.takes = takes
    return model
"""


@pytest.mark.parametrize(
    ("takes", "cp", "said"),
    [
        ("nothing", 3, None),
        ("scale", 3, "computes something else of its part"),
        pytest.param("positions", 3, "count from 0 to 7 on each", marks=pytest.mark.thorough),
        pytest.param("scale", 1, None, marks=pytest.mark.thorough),
    ],
)
def test_lint_calls_the_model_on_parts_of_a_sequence(launcher, takes, cp, said):
    (launcher.folder / "lengths.py").write_text(OF_THE_LENGTH)
    mesh = f"[mesh]\ncp = {cp}\n" if cp > 1 else ""
    plan = f'[model]\nfunction = "lengths:llama"\n{mesh}[data]\nsequence_length = 24\n'
    (launcher.folder / "lengths.toml").write_text(plan)
    launcher.begin("lint", "lengths.toml", "--json", "--run-model-code", "--set", f'model.overrides.takes="{takes}"')
    status, out, err = launcher.finish()
    assert out, err
    faults = json.loads(out)["diagnostics"]
    if said is None:
        assert (status, faults) == (0, [])
        return
    (fault,) = faults
    assert (status, fault["key"], fault["fix"]) == (1, "mesh.cp", "leave cp out")
    assert "its first call, of 24 tokens on 3 ranks, is refused: " in fault["message"] and said in fault["message"]


def test_training_joins_ranks_that_are_there(folder):
    """As in torchrun's processes: they have its environment, and the store is another process's."""
    from torch.distributed import TCPStore

    run_ranks(1, os.getpid)  # starts the server of processes with all libraries, of which pools are forked, too
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with rank_processes(join_as_of_torchrun, 2, folder, store.port) as (_, connections):
        assert all(connection.poll(LIMIT) for connection in connections)
        assert [connection.recv() for connection in connections] == [0, 0], (folder / "err0").read_text()
    assert [json.loads(line).get("step") for line in (folder / "out0").read_text().splitlines()] == [1, 2, 3, 4, None]
    assert (folder / "out1").read_text() == ""


@pytest.mark.thorough
def test_training_joins_torchrun(folder):
    process = start(folder, *TORCHRUN, "train", "run.toml", "--data", "text", "--out", "run", "--json")
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert [json.loads(line).get("step") for line in out.splitlines()] == [1, 2, 3, 4, None]


@pytest.mark.thorough  # of srun's ranks: test_slurm.py; of a script's under torchrun: hp-plan's test_alike.py
@pytest.mark.parametrize(
    ("plan", "said", "last"),
    [
        ("wrong.toml", "[optimizer] has no key 'lrr'", "the plan has errors, in the table above: optimizer.lrr"),
        (
            "none.toml",
            "error: the plan none.toml can't be read: No such file",
            "the plan none.toml can't be read: No such",
        ),
    ],
)
def test_an_error_of_all_ranks_is_said_once_under_torchrun(folder, monkeypatch, plan, said, last):
    monkeypatch.setenv("COLUMNS", "400")
    (folder / "wrong.toml").write_text((folder / "run.toml").read_text().replace("lr =", "lrr ="))
    process = start(folder, *TORCHRUN, "train", plan, "--data", "text")
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err.count(said)) == (1, "", 1), err
    assert re.search(r"exitcode  : 1 \(pid: \d+\) \n.*\n  traceback : " + re.escape(last), err)
    assert set(re.findall(r"exitcode  : (\d+)", err)) == {"1"}  # of the other rank, too


@pytest.mark.thorough
def test_no_rank_outlives_torchrun(folder):
    process = start(folder, *TORCHRUN, "train", write_plan(folder, "run", end="wait"), "--out", "run", *ENDLESS)
    wait_until(lambda: alive(folder) == [0, 1])
    process.kill()
    process.communicate(timeout=LIMIT)
    wait_until(lambda: not alive(folder))


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["raise", "kill"])
def test_torchrun_restarts_a_run_that_goes_on(folder, end):
    """The rank fails in the third step of each of its processes, so once."""
    options = ["--data", "text", "--json", "--resume", "auto", "--set", "run.checkpoint_every=1", *SLOW]
    process = start(folder, *TORCHRUN, "train", "run.toml", "--out", "whole", *options)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    failing = write_plan(folder, "fails", victim=1, end=end)
    restarted = [*TORCHRUN[:3], "--max-restarts", "1", *TORCHRUN[3:]]
    process = start(folder, *restarted, "train", failing, "--out", "fails", *options)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    steps, truth = ({s["step"]: s["loss"] for s in lines_of(folder / run)} for run in ("fails", "whole"))
    assert list(truth) == [1, 2, 3, 4] and steps.items() <= truth.items() and steps.keys() >= {1, 3, 4}


def lines_of(run):
    return map(json.loads, (run / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_raises_ends_all_and_is_named(launcher, victim):
    run = f"raises{victim}"
    plan = write_plan(launcher.folder, run, victim=victim, end="raise")
    launcher.begin("train", plan, "--data", "text", "--out", run, *SLOW)
    status, _, err = launcher.finish()
    assert status == 1
    assert f"error: rank {victim} failed first; all ranks are ended" in err
    assert "Traceback (most recent call last)" in err
    assert 'raise ValueError("the weights went bad")' in err
    assert "note: the ranks that are left saved step 2, whole and verified" in err
    assert [path.name for path in (launcher.folder / run / "checkpoints").iterdir()] == ["step-00000002"]
    assert [line["step"] for line in lines_of(launcher.folder / run)] == [1, 2], "those of whole steps"
    assert not alive(launcher.folder, run)


def test_what_all_ranks_raise_is_said_once_and_of_none(launcher):
    plan = write_plan(launcher.folder, "diverges")
    launcher.begin("train", plan, "--data", "text", "--out", "diverges", *SLOW, "--set", "optimizer.lr=1e20")
    status, _, err = launcher.finish()
    assert status == 1
    assert "failed first" not in err and "Traceback" not in err
    assert err.count("start again with a smaller optimizer.lr") == 1


def test_a_rank_that_is_killed_is_named_and_not_those_that_lost_it(launcher):
    plan = write_plan(launcher.folder, "killed", victim=1, end="kill")
    launcher.begin("train", plan, "--data", "text", "--out", "killed", *SLOW)
    status, _, err = launcher.finish()
    assert status == 1
    assert "error: rank 1 failed first; all ranks are ended. Its end:\nkilled by SIGKILL (process" in err
    assert "\nIt was in step 3 (step), after all_gather number " in err
    assert "note: step 2 can't be saved without rank 1: " in err and "the ranks' shards of '" in err
    assert err.count("there is no checkpoint") == 1
    assert not list((launcher.folder / "killed" / "checkpoints").iterdir())
    assert not alive(launcher.folder, "killed")


def test_replicas_save_for_a_rank_that_is_killed_and_the_run_goes_on(launcher):
    folder, replicas = launcher.folder, ["--set", "mesh.dp_replicate=2", *SLOW]
    whole = ["train", write_plan(folder, "replicas"), "--data", "text", "--json", *replicas]
    launcher.begin(*whole, "--out", "undisturbed")
    status, out, err = launcher.finish()
    assert status == 0, err
    truth = [json.loads(line)["loss"] for line in out.splitlines()[:4]]
    lost = write_plan(folder, "replica_lost", victim=3, end="kill")
    launcher.begin("train", lost, "--data", "text", "--json", *replicas, "--out", "goes_on")
    status, _, err = launcher.finish()
    assert status == 1
    assert "note: the ranks that are left saved step 2, whole and verified" in err
    launcher.begin(*whole, "--out", "goes_on", "--resume", "auto")
    status, out, err = launcher.finish()
    assert status == 0, err
    assert [json.loads(line)["loss"] for line in out.splitlines()[:2]] == truth[2:]


@pytest.mark.parametrize("whom", ["launcher", "everyone"])
def test_an_interrupt_saves_and_ends_every_rank(launcher, whom):
    run = f"interrupted-{whom}"
    launcher.begin("train", write_plan(launcher.folder, run, end="wait"), "--out", run, *ENDLESS, *SLOW)
    wait_until(lambda: "\n" in launcher.written("out"))  # the first step is done
    assert alive(launcher.folder, run) == [0, 1]
    if whom == "launcher":
        launcher.process.send_signal(signal.SIGINT)
    else:  # What a terminal does.
        os.killpg(launcher.process.pid, signal.SIGINT)
    status, _, err = launcher.finish()
    assert not alive(launcher.folder, run)
    (saved,) = (launcher.folder / run / "checkpoints").glob("step-*")
    place = f"step {int(saved.name.removeprefix('step-'))} is saved in {run}/checkpoints/{saved.name}"
    assert (status, err.splitlines()) == (
        130,
        [
            "note: the run ends after the steps that have begun, and is saved; Ctrl-C again ends it at once",
            f"stopped by SIGINT: {place}; go on by --resume auto --out {run}",
        ],
    )


def test_a_second_interrupt_ends_at_once(launcher):
    run = "twice"
    plan = write_plan(launcher.folder, run, end="hang")
    launcher.begin("train", plan, "--out", run, *ENDLESS, "--set", "run.stop_within=1000")
    wait_until(lambda: alive(launcher.folder, run) == [0, 1])
    launcher.process.send_signal(signal.SIGINT)
    wait_until(lambda: "and is saved" in launcher.written("err"))
    launcher.process.send_signal(signal.SIGINT)
    status, _, err = launcher.finish()
    assert not alive(launcher.folder, run)
    assert (status, err.splitlines()[-1]) == (130, "error: interrupted by SIGINT: all ranks are ended")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_ranks_that_hang(launcher, name):
    launcher.begin("train", write_plan(launcher.folder, name, end="hang"), "--out", name, *ENDLESS)
    wait_until(lambda: alive(launcher.folder, name) == [0, 1])
    launcher.process.send_signal(getattr(signal, name))
    status, _, err = launcher.finish()
    status_of_it = 128 + getattr(signal, name)
    assert (status, err.splitlines()[-1]) == (status_of_it, f"error: interrupted by {name}: all ranks are ended")
    assert not alive(launcher.folder, name)


# A rank that was stopped goes on for its stack: the run must not end meanwhile.
HANG = [*ENDLESS, "--set", "mesh.dp_shard=3", "--set", "data.batch_size=9", "--set", "run.hang_after=3"]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        pytest.param("stop", "rank 2 is stopped (SIGSTOP) and has not come to", marks=pytest.mark.thorough),
        pytest.param("loop", "rank 2 has not come to", marks=pytest.mark.thorough),
        ("keep", "rank 2 has not come to"),
        ("another", "rank 1 issued another collective than the others: rank 0: all_reduce number "),
    ],
)
def test_a_hang_ends_with_the_rank_the_collective_and_the_stack(launcher, how, says):
    run = f"hangs_{how}"
    plan = write_plan(launcher.folder, run, end=how)
    launcher.begin("train", plan, "--out", run, *HANG)
    status, _, err = launcher.finish()
    assert status == 1
    assert says in err
    assert "over ranks [0, 1, 2] (axis dp_shard, " in err
    assert f"Stack of rank {1 if how == 'another' else 2}, in step 3 (step):" in err
    if how == "another":
        assert "(axis dp_shard, 12 bytes)" in err
    else:
        assert 'bigram.py", line ' in err and " in hang" in err
        assert "rank 0 waits in " in err and "rank 1 waits in " in err
    assert not alive(launcher.folder, run)


def test_what_ranks_call_differently_ends_the_run(launcher):
    launcher.begin("train", write_plan(launcher.folder, "refused", end="refused"), "--out", "refused", *HANG)
    status, _, err = launcher.finish()
    assert status == 1
    calls = ", rank 1 ".join(f"all_reduce({nbytes} bytes of float32, sum)" for nbytes in (16, 12))
    assert f"hp_onesided: rank 0 of the group calls {calls}; ranks [0, 1, 2] are the group" in err
    assert "It was in step 3 (step), in all_reduce number " in err
    assert not alive(launcher.folder, "refused")


def test_a_run_that_is_terminated_goes_on_where_it_was(launcher):
    folder, run = launcher.folder, "terminated"
    metrics = folder / run / "metrics.jsonl"
    launcher.begin("train", write_plan(folder, "whole"), "--data", "text", "--out", "whole", "--steps", "20", "--json")
    status, _, err = launcher.finish()
    assert status == 0, err
    options = ["train", write_plan(folder, run, end="wait"), "--data", "text", "--out", run, "--json", "--steps", "20"]
    options += ["--set", f"run.stop_within={LIMIT}"]  # it ends when it has saved, and does not wait for this
    launcher.begin(*options)
    wait_until(lambda: launcher.written("out").count("\n") > 3)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.finish()[0] == 128 + signal.SIGTERM
    assert not alive(folder, run)
    (saved,) = (folder / run / "checkpoints").glob("step-*")
    done = int(saved.name.removeprefix("step-"))
    assert 3 < done < 20
    written = metrics.read_text()
    later = {**json.loads(written.splitlines()[-1]), "step": done + 1}
    metrics.write_text(f"{written}{json.dumps(later)}\n")  # a step after the checkpoint, as a killed run has
    launcher.begin(*options, "--resume", "auto")
    status, out, err = launcher.finish()
    assert status == 0, err
    assert json.loads(out.splitlines()[0])["step"] == done + 1
    texts = (metrics.read_text(), (folder / "whole" / "metrics.jsonl").read_text())
    parts, whole = ([json.loads(line) for line in text.splitlines()] for text in texts)
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [line[key] for line in parts] == [line[key] for line in whole], key


def test_verify_finds_the_bigram_equal(launcher):
    launcher.begin("verify", write_plan(launcher.folder, "equal"), "--json")
    status, out, err = launcher.finish()
    assert status == 0, err
    result = json.loads(out)
    assert result["passed"]
    assert result["ranks"] == 2
    assert [row["module"] for row in result["rows"]] == ["embed", "head"]


def test_no_rank_outlives_the_launcher(launcher):
    """The last test of the module: it takes the launcher with it."""
    launcher.begin("train", write_plan(launcher.folder, "outlived", end="hang"), "--out", "outlived", *ENDLESS)
    wait_until(lambda: alive(launcher.folder, "outlived") == [0, 1])
    launcher.process.kill()
    launcher.process.wait(LIMIT)
    wait_until(lambda: not alive(launcher.folder, "outlived"))
