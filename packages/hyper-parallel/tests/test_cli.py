"""What the command says before any rank starts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from hp_plan import ParallelPlan
from hp_platform import get_platform
from hp_platform.platforms.ports import choose_kind
from hyper_parallel.__main__ import main
from hyper_parallel.commands import cli, plans
from hyper_parallel.launching import ranks

EXAMPLES = [
    path
    for path in sorted(Path(__file__).parents[3].glob("examples/*.toml"))
    if ParallelPlan.from_toml(path).run.platform in (None, "torch")
]
pytestmark = pytest.mark.framework("torch")
PLAN = """
[model]
config = "LlamaConfig"
[model.overrides]
vocab_size = 256
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 32
[mesh]
tp = 2
[data]
sequence_length = 16
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs the command on a plan; what it wrote, and its exit status. It fails the test where a rank would start."""
    import hyper_parallel.torch.launch as launch

    def no_ranks(*args, **kwargs):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "start_server", lambda plan, ranks: None)
    monkeypatch.setattr(launch, "launch", no_ranks)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HYPER_PARALLEL_DEVICE", "cpu")
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, plan: str = PLAN) -> tuple[str, str, int]:
        (tmp_path / "plan.toml").write_text(plan)
        with pytest.raises(SystemExit) as ended:
            cli.main([arguments[0], "plan.toml", *arguments[1:]])
        out, err = capsys.readouterr()
        return out, err, int(ended.value.code or 0)

    return run


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_have_no_faults(path, command):
    out, err, status = command("lint", plan=path.read_text())
    assert (out, err, status) == ("plan.toml: nothing wrong was found\n", "", 0)


def test_lint_shows_every_fault_and_exits_1(command):
    out, err, status = command("lint", "--nproc", "3", plan=PLAN + "[run]\nstpes = 3\n")
    assert status == 1
    assert out == ""
    assert "plan.toml has 2 errors" in err
    assert "[run] has no key 'stpes'" in err
    assert "did you mean 'steps'" in err
    assert "the mesh tp 2 has 2 ranks, but there are 3" in err


def test_lint_as_json(command):
    out, _, status = command("lint", "--json", plan=PLAN.replace("tp = 2", "tp = 4"))
    assert status == 1
    assert {diagnostic["key"] for diagnostic in json.loads(out)["diagnostics"]} == {"mesh.tp"}
    out, _, status = command("lint", "--json")
    assert (json.loads(out), status) == ({"diagnostics": [], "notes": []}, 0)


@pytest.mark.parametrize("action", ["lint", "train", "verify"])
@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (
            "HYPER_PARALLEL_PLATFORM=jax",
            "error: HYPER_PARALLEL_PLATFORM='jax' is not a platform. Choose one of: torch, mindspore.\n",
        ),
        (
            "HYPER_PARALLEL_DEVICE=gpu",
            "error: HYPER_PARALLEL_DEVICE='gpu' is not a kind of device. Choose one of: cpu, cuda, npu; torch ",
        ),
    ],
)
def test_a_variable_that_asks_for_what_there_is_not(command, monkeypatch, action, variable, expected):
    devices = type(get_platform().devices)  # before there is none
    monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(devices, "_kind", property(lambda self: choose_kind(self.present, "torch 2")))
    out, err, status = command(action)
    assert (out, status, err.count("\n")) == ("", 1, 1)
    assert err.startswith(expected)


def test_lint_runs_no_code_of_the_plan_unless_told_to(command, tmp_path):
    (tmp_path / "dangerous.py").write_text("print('the code ran')\ndef model():\n    raise ValueError('called')\n")
    plan = '[model]\nfunction = "dangerous:model"\n'
    out, err, status = command("lint", plan=plan)
    assert (out, status) == ("plan.toml: nothing wrong was found; its model was not read\n", 0)
    assert err == (
        "note: [model] function is code and was not run, so nothing was checked against the model; if you trust the "
        "plan, --run-model-code imports and calls it\n"
    )
    assert str(tmp_path) not in sys.path
    out, err, status = command("lint", "--run-model-code", plan=plan)
    assert (out, status) == ("the code ran\n", 1)
    assert "building dangerous:model failed: ValueError: called" in err


def test_a_model_of_ones_own_without_a_row_for_each_byte(command, tmp_path):
    (tmp_path / "small.py").write_text(
        "from torch import nn\n\n"
        "def model(rows):\n"
        "    return nn.Sequential(nn.Embedding(rows, 4), nn.Linear(4, rows))\n"
    )
    (tmp_path / "text").write_text("to be or not to be " * 20)
    data = '[data]\npaths = ["text"]\nsequence_length = 8\n'
    plan = f'[model]\nfunction = "small:model"\n[model.overrides]\nrows = 100\n{data}'
    for action in (("lint", "--run-model-code"), ("train",)):
        _, err, status = command(*action, plan=plan)
        assert status == 1 and "its largest embedding has 100 rows, but text as bytes has 256 tokens" in err
        assert "make it 256 rows or more" in err
    assert command("lint", "--run-model-code", plan=plan.replace("100", "256"))[2] == 0


@pytest.mark.not_on("torch-npu-sim", reason="its devices' memory is the machine's; nothing else of the device in it")
def test_a_plan_that_is_too_large_for_this_machine(command, monkeypatch):
    monkeypatch.setattr(type(get_platform().devices), "total_memory", lambda self: 10_000)
    expected = "parameters in float32 need at least 0.1 MB of memory per rank for weights, gradients and adamw's states"
    out, err, status = command("lint")
    assert (out, status) == ("plan.toml: nothing wrong was found\n", 0)
    assert err.startswith("note: too large to train here: ") and expected in err
    _, err, status = command("train")
    assert status == 1 and expected in err and "this machine, for 2 ranks, has 0.0 MB" in err
    assert "take a smaller model or dtype, or start the ranks on more machines (torchrun, msrun)" in err
    monkeypatch.setattr(cli, "_run", lambda work, job, ranks: None)
    monkeypatch.setattr(type(get_platform().devices), "total_memory", lambda self: 160_000)
    followed = (
        PLAN,
        PLAN.replace("intermediate_size = 24", "intermediate_size = 4"),
        PLAN + '[run]\ndtype = "bfloat16"\n',
    )
    assert [command("train", "--out", f"run{n}", plan=plan)[2] for n, plan in enumerate(followed)] == [1, 0, 0]
    monkeypatch.setattr(plans, "inside_launcher", lambda: True)  # as where torchrun has started this process
    assert command("train", "--out", "elsewhere")[2] == 0


@pytest.mark.not_on("torch-npu-sim", reason="its kind is set by the simulation")
def test_fewer_devices_than_ranks(command, monkeypatch):
    devices = type(get_platform().devices)
    monkeypatch.setattr(devices, "_kind", property(lambda self: os.environ.get("HYPER_PARALLEL_DEVICE") or "cuda"))
    monkeypatch.setattr(devices, "count", 1)
    monkeypatch.setattr(devices, "total_memory", lambda self: 1 << 40)
    monkeypatch.setattr(cli, "_run", lambda work, job, ranks: None)
    monkeypatch.delenv("HYPER_PARALLEL_DEVICE")
    _, err, status = command("train", "--out", "run")
    assert status == 1 and "2 ranks, but this machine has only 1 cuda devices" in err
    assert "make the mesh smaller, or set HYPER_PARALLEL_DEVICE=cpu" in err
    with pytest.raises(ValueError, match="2 ranks, but this .* take fewer, or set HYPER_PARALLEL_DEVICE=cpu"):
        ranks._count(2)
    assert command("train", "--out", "smaller", plan=PLAN.replace("tp = 2", "tp = 1"))[2] == 0
    assert ranks._count(1) == 1
    monkeypatch.setenv("HYPER_PARALLEL_DEVICE", "cpu")
    assert command("train", "--out", "run")[2] == 0
    assert ranks._count(2) == 2


@pytest.mark.not_on("torch-npu-sim", reason="its devices' memory is the machine's; nothing else of the device in it")
def test_a_model_that_is_too_large_is_not_called_on_parts(command, monkeypatch):
    monkeypatch.setattr(type(get_platform().devices), "total_memory", lambda self: 10_000)
    out, err, status = command("lint", "--run-model-code", plan=PLAN.replace("tp = 2", "cp = 2"))
    assert (out, status) == ("plan.toml: nothing wrong was found\n", 0)
    assert "note: the model was not called on parts of a sequence, which its first step does" in err


@pytest.mark.parametrize("action", ["train", "verify"])
def test_faults_end_the_command_before_ranks_start(command, action):
    """What is wrong with the plan by itself comes first, and quickly; then what is wrong for its model."""
    plan = PLAN.replace("tp = 2", "tp = 4")
    _, err, status = command(action, plan=plan + "[optimizer]\nleraning_rate = 1.0\n")
    assert status == 1
    assert "[optimizer] has no key 'leraning_rate'" in err and "heads" not in err
    _, err, status = command(action, plan=plan)
    assert status == 1
    assert "has 2 heads of size 4, which tp = 4 does not divide" in err


def test_a_plan_that_is_wrong_by_itself_is_refused_before_a_framework_is_imported(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN + "[optimizer]\nleraning_rate = 1.0\n", encoding="utf-8")
    program = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "from hyper_parallel.commands.cli import app\n"
        f"app(['train', {str(plan)!r}], standalone_mode=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip().endswith("False"), done.stderr


def test_a_mesh_that_is_not_the_world(command):
    _, err, status = command("train", "--nproc", "3")
    assert status == 1
    assert "the mesh tp 2 has 2 ranks, but there are 3" in err
    assert "start 2 ranks (--nproc 2) or change the sizes in [mesh]" in err


def test_fewer_steps_shorten_the_warm_up(command, monkeypatch):
    jobs = []
    monkeypatch.setattr(cli, "_run", lambda work, job, ranks: jobs.append(job))
    plan = PLAN + "[schedule]\nwarmup_steps = 10\n[run]\nsteps = 40\n"
    out, err, status = command("train", "--steps", "3", "--out", "run", plan=plan)
    assert status == 0, err
    assert (jobs[0].plan.run.steps, jobs[0].plan.schedule.warmup_steps) == (3, 3)
    assert (out, err) == ("", "note: 3 steps shorten schedule.warmup_steps, 10 in the plan, to 3\n")
    _, err, status = command("train", "--set", "run.steps=3", "--out", "run", plan=plan)
    assert (jobs.pop().plan.schedule.warmup_steps, "3 steps shorten" in err, status) == (3, True, 0)
    given = ("--set", "run.steps=3", "--set", "schedule.warmup_steps=5")
    _, err, status = command("train", *given, "--out", "run", plan=plan)
    assert status == 1 and "5 warm-up steps in a run of 3" in err
    _, err, status = command("train", "--steps", "10", "--out", "run", plan=plan)
    assert (jobs[1].plan.schedule.warmup_steps, err, status) == (10, "", 0)
    _, err, status = command("lint", plan=plan.replace("40", "3"))
    assert "10 warm-up steps in a run of 3" in err


def test_the_plan_of_a_run_names_the_folder_of_its_function(command, monkeypatch, tmp_path):
    jobs = []
    monkeypatch.setattr(cli, "_run", lambda work, job, ranks: jobs.append(job))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "beside_the_plan.py").write_text("import torch\ndef model():\n    return torch.nn.Linear(2, 2)\n")
    _, err, status = command("train", "--out", "run", plan='[model]\nfunction = "beside_the_plan:model"\n')
    assert status == 0, err
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "plan.toml").write_text(jobs[0].plan.to_toml())
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]
    monkeypatch.delitem(sys.modules, "beside_the_plan")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(SystemExit) as ended:
        cli.main(["lint", "plan.toml", "--run-model-code"])
    assert not ended.value.code
    assert sys.path[0] == str(tmp_path)


def test_verify_of_a_plan_for_mindspore_starts_nothing(command, monkeypatch):
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "mindspore")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    out, err, status = command("verify", plan=PLAN + '[run]\nplatform = "mindspore"\n')
    assert (out, status) == ("", 1)
    assert err.startswith("error: verify runs on PyTorch only: on MindSpore, lint the plan, then compare the losses")
    assert err.count("\n") == 1


def test_a_plan_for_a_framework_that_is_not_installed(command, monkeypatch):
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "")
    monkeypatch.delenv("HYPER_PARALLEL_PLATFORM")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("mindspore", "torch") else name)
    _, err, status = command("lint", plan=PLAN + '[run]\nplatform = "mindspore"\n')
    assert status == 1
    assert "the plan is for mindspore, which is not installed here" in err
    assert "run the command in an environment that has it, or: pip install 'hyper-parallel[mindspore]'" in err
    with monkeypatch.context() as other:
        other.setattr(importlib.util, "find_spec", lambda name: name)
        plans._check_installed("mindspore")
    monkeypatch.delitem(sys.modules, "torch")
    _, err, status = command("lint")
    assert status == 1
    assert err == (
        "error: no framework is installed here: pip install 'hyper-parallel[torch]' or 'hyper-parallel[mindspore]'\n"
    )


def test_data_that_is_missing_or_empty(command, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "right").write_bytes(b"to be or not to be" * 9)
    out, _, status = command("lint", "--set", "data.paths=['right']")
    assert (status, out) == (0, "plan.toml: nothing wrong was found\n")
    _, err, status = command("train", "--data", "nowhere.txt")
    assert status == 1
    assert "data.paths" in err
    assert "the data file nowhere.txt does not exist" in err
    assert "give files or folders of text" in err
    (tmp_path / "tokens.bin").touch()
    _, err, _ = command("train", "--data", "tokens")
    assert "name tokens.bin for the tokens there" in err
    _, err, status = command("train", "--data", "plan.toml", "empty", "--steps", "3")
    assert status == 1
    assert "the data file empty is empty (0 bytes)" in err
    for action in ("train", "lint"):
        _, err, status = command(action, plan=PLAN + 'paths = ["short"]\n')
        assert (status, "the data file short does not exist" in err) == (1, True)


def test_a_folder_that_can_not_be_written(command, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    _, err, status = command("train", "--out", "file/run")
    assert status == 1
    assert "error: the checkpoint can't be written to file/run: Not a directory" in err
    assert "choose another folder with --out" in err
    monkeypatch.setattr(cli, "_run", lambda work, job, ranks: None)
    assert command("train", "--out", "folder/run")[2] == 0


@pytest.mark.parametrize("action", ["train", "lint"])
def test_a_vocabulary_that_has_no_room_for_bytes(command, action):
    _, err, status = command(action, plan=PLAN.replace("256", "255"))
    assert status == 1
    assert "the model knows 255 tokens, but text as bytes has 256" in err and "make it 256 or more" in err
    assert command("lint", plan=PLAN)[2] == 0


def test_a_plan_that_is_not_there(command, capsys):
    command("lint")
    with pytest.raises(SystemExit) as ended:
        cli.main(["lint", "missing.toml"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "error: the plan missing.toml can't be read: No such file or directory; choose from plan.toml\n"
    )


STAGES = (
    PLAN.replace("tp = 2", "pp = 2").replace("layers = 1", "layers = 4").replace("[data]", "[data]\nbatch_size = 4")
)


def test_the_schedule_of_a_pipeline(command, tmp_path):
    out, err, status = command("schedule", "--svg", "line.svg", plan=STAGES)
    assert (err, status) == ("", 0)
    lines = out.splitlines()
    assert lines[0] == "1f1b on 2 ranks, stages of 3, 1 blocks, 4 micro-batches of 1 sample"
    assert lines[1].startswith("rank   0 |FF") and lines[2].startswith("rank   1 |..")
    assert "messages take no time" in lines[4]
    assert lines[3].startswith("bubble ") and " faster at the same memory: stages of " in lines[-1]
    assert (tmp_path / "line.svg").read_text().startswith("<svg ")


def test_the_schedule_as_json(command):
    out, _, status = command("schedule", "--json", plan=STAGES + '[pipeline]\nschedule = "zbv"\nmicro_batches = 2\n')
    got = json.loads(out)
    assert status == 0
    assert (got["schedule"], got["micro_batches"], len(got["stages"])) == ("zbv", 2, 4)
    assert [stage["rank"] for stage in got["stages"]] == [0, 1, 1, 0]
    assert sum(stage["blocks"] for stage in got["stages"]) == 4
    assert [rank["steps"] for rank in got["ranks"]] == [12, 12]
    assert 0 < got["bubble_share"] < 1 and all(rank["peak_bytes"] > 0 for rank in got["ranks"])


def test_a_schedule_needs_stages(command):
    out, err, status = command("schedule")
    assert (out, status) == ("", 1)
    assert "mesh.pp" in err and "there is no pp axis, and so no pipeline" in err and "make mesh.pp at least 2" in err
    assert command("schedule", plan=STAGES)[2] == 0


def test_one_data_option_takes_several_paths():
    assert cli._spread("--data", ["p", "--data", "a", "b", "--json", "c"]) == [
        "p",
        *["--data", "a", "--data", "b"],
        *["--json", "c"],
    ]


def test_the_command_without_typer_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "hyper_parallel.commands.cli")
    monkeypatch.delattr("hyper_parallel.commands.cli")
    with pytest.raises(SystemExit, match=r"needs typer: pip install 'hyper-parallel\[train\]'"):
        main()


def test_values_are_shown_with_where_they_come_from(command):
    output, _, status = command("show", "--set", "mesh.tp=4", "--set", "run.dtype=bfloat16")
    assert status == 0
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.strip()}
    assert rows["mesh.tp"] == ["4", "command", "line"]
    assert rows["run.dtype"] == ["'bfloat16'", "command", "line"]
    assert rows["data.sequence_length"] == ["16", "file"]
    assert rows["optimizer.lr"] == ["0.001", "default"]
    lines = json.loads(command("show", "--json")[0])
    assert {"key": "mesh.tp", "value": 2, "origin": "file"} in lines


@pytest.mark.parametrize("action", ["show", "lint", "train", "verify", "schedule"])
def test_a_wrong_value_of_the_command_line_is_refused(command, action):
    _, errors, status = command(action, "--set", "mesh.tpp=4")
    assert status == 1
    assert "[mesh] has no key 'tpp'" in errors
    _, errors, status = command(action, "--set", "mesh.tp")
    assert status == 1
    assert "is no key=value" in errors


def test_the_schema_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["schema"])
    assert not ended.value.code
    assert "tp" in json.loads(capsys.readouterr().out)["properties"]["mesh"]["properties"]


def test_versions_are_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert not ended.value.code
    assert re.fullmatch(r"hyper-parallel .* \(.*python 3\.\d.*\)\n", capsys.readouterr().out)


def test_a_run_that_is_to_go_on_has_a_folder(command, monkeypatch):
    _, errors, status = command("train", "--resume", "auto")
    assert (status, errors) == (1, "error: --resume needs the folder of the run: name it with --out\n")
    monkeypatch.setattr(cli, "_run", lambda work, job, ranks: None)
    assert command("train", "--resume", "auto", "--out", "run")[2] == 0


def test_help_has_no_word_in_brackets():
    """Typer takes it for markup, and prints nothing in its place."""
    commands, texts = [typer.main.get_command(cli.app)], []
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        texts += [command.help or "", *(getattr(each, "help", None) or "" for each in command.params)]
    assert len(texts) > 100 and [text for text in texts if re.search(r"\[[a-z_.]+\]", text)] == []
