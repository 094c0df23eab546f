"""Scripts for sbatch: what they ask for, what is refused, and a job of one under a stand-in for srun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched_commands import LIMIT, TORCHRUN, fill, wait_until, write_plan

from hyper_parallel.commands import cli

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="the jobs ask for CPUs; nothing of the device in it"),
]

# Starts two tasks, as srun would on one node. A task that fails ends the others; SIGUSR1 stands for the signal that
# sbatch's --signal sends to tasks, and SIGTERM kills them, as it does where srun itself gets it.
SRUN = """#!{python}
import os, signal, subprocess, sys, time
assert sys.argv[1] == "--kill-on-bad-exit=1", sys.argv
step = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}}
step |= {{"SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0"}}
tasks = [
    subprocess.Popen(sys.argv[2:], env={{**os.environ, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}})
    for rank in "01"
]
signal.signal(signal.SIGUSR1, lambda *_: [task.terminate() for task in tasks])
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
failed = 0
while any(task.poll() is None for task in tasks):
    failed = failed or next((task.returncode for task in tasks if task.poll()), 0)
    if failed:
        [task.terminate() for task in tasks]
    time.sleep(0.05)
sys.exit(abs(failed or max(task.returncode for task in tasks)))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(fill(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("COLUMNS", "400")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def slurm(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["slurm", "run.toml", *arguments])
    return int(ended.value.code or 0)


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_a_script_asks_for_the_nodes_of_the_mesh(folder, capsys):
    assert slurm("--nodes", "2", "--time", "1-00:00:00", "--sbatch", "partition=gpu", "--sbatch", "comment=a b") == 0
    script, err = capsys.readouterr()
    assert err == ""
    assert options(script) == [
        "job-name=run",
        f"chdir={folder}",
        "nodes=2",
        "ntasks-per-node=1",
        "gpus-per-node=1",
        "time=1-00:00:00",
        "signal=TERM@32",  # run.stop_within is 2
        "requeue",
        "open-mode=append",
        "partition=gpu",
        "comment='a b'",
    ]
    assert "export HYPER_PARALLEL_DEVICE=cuda\n" in script
    assert script.endswith("    train run.toml --out runs/run --resume auto\n")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_script_passes_values_on_and_is_not_overwritten(folder, capsys):
    name = 'model.overrides={run = "a b"}'
    given = ("--nodes", "1", "--gpus-per-node", "0", "--folder", "there", "--set", name, "--out", "job.sh")
    assert slurm(*given) == 0
    script = (folder / "job.sh").read_text()
    assert capsys.readouterr().out == "job.sh is written; next: sbatch job.sh\n"
    assert not any(each.startswith("gpus") for each in options(script)) and "ntasks-per-node=2" in options(script)
    assert "export HYPER_PARALLEL_DEVICE=cpu\n" in script
    assert script.endswith(f"train run.toml --out there --resume auto --set '{name}'\n")
    assert slurm(*given) == 1
    assert capsys.readouterr().err == "error: job.sh exists; remove it, or choose another file with --out\n"
    assert slurm(*given[:-1], "other.sh") == 0
    (folder / "job.sh").unlink()
    assert slurm(*given) == 0


@pytest.mark.parametrize(
    ("arguments", "expected", "mended"),
    [
        (
            "--nodes 3",
            "the mesh dp_shard 2 has 2 ranks, which 3 nodes can't start, one a GPU; nodes x GPUs that fit: 1 x 2, 2 x 1"
            "; or change the sizes in [mesh]",
            ["--nodes 1 --gpus-per-node 2", "--nodes 2 --gpus-per-node 1", "--nodes 3 --set mesh.dp_shard=3 BATCH"],
        ),
        (
            "--nodes 1 --gpus-per-node 8",
            "2 ranks, which 1 nodes of 8 GPUs can't start, one a GPU",
            ["--nodes 1 --gpus-per-node 8 --set mesh.dp_shard=8 BATCH"],
        ),
        (
            "--nodes 1 --time soon",
            "got 'soon', which sbatch does not read; write minutes, hours:minutes:seconds or days-hours",
            ["--nodes 1 --time 90", "--nodes 1 --time 1:30:00", "--nodes 1 --time 1-12"],
        ),
        ("--nodes 1 --sbatch nodes=2", "nodes is set by this command; leave it out", ["--nodes 1"]),
        (
            "--nodes 1 --sbatch -p=gpu",
            "got '-p=gpu', which is no option of sbatch; write for example --sbatch partition=gpu",
            ["--nodes 1 --sbatch partition=gpu"],
        ),
        (
            "--nodes 1 --set run.platform=mindspore",
            "srun starts ranks of PyTorch only; start MindSpore's ranks by msrun on each node",
            ["--nodes 1"],
        ),
        ("--nodes 1 --set mesh.tpp=2", "[mesh] has no key 'tpp'", []),
        (
            "--nodes 1 --set data.paths=['nowhere']",
            "the data file nowhere does not exist; give files or",
            ["--nodes 1"],
        ),
    ],
)
def test_what_can_not_run_is_refused(folder, capsys, arguments, expected, mended):
    assert slurm(*arguments.split()) == 1
    out, err = capsys.readouterr()
    assert out == "" and all(part in err for part in expected.split("; "))  # the fix is another column
    for way in mended:
        given = way.replace("BATCH", "--set data.batch_size=24").split()
        assert slurm(*given) == 0, capsys.readouterr().err


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(each["step"], each["loss"]) for each in metrics(folder)]


def test_a_job_saves_at_its_limit_and_goes_on_with_the_losses_of_torchrun(folder):
    """Two tasks of a stand-in for srun: SIGTERM by --signal, and the same script again."""
    write_plan(folder, "run", end="wait")
    (folder / "bin").mkdir()
    (folder / "bin" / "srun").write_text(SRUN.format(python=sys.executable))
    (folder / "bin" / "srun").chmod(0o755)
    wanted = ("--set", "run.steps=60", "--set", "run.stop_within=25", "--set", "data.paths=['text']")
    assert slurm("--nodes", "1", "--gpus-per-node", "0", *wanted, "--folder", "run", "--out", "job.sh") == 0
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environment["SLURM_JOB_ID"] = str(os.getpid())

    def job(stop: bool) -> tuple[int, str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(["bash", "job.sh"], env=environment, text=True, **pipes)
        if stop:
            wait_until(lambda: (folder / "run" / "metrics.jsonl").exists() or process.poll() is not None)
            (srun,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(srun), signal.SIGUSR1)
        said = process.communicate(timeout=LIMIT)[0]
        return process.returncode, said

    status, said = job(stop=True)
    assert status == 0, said
    assert 0 < len(losses(folder / "run")) < 60
    status, said = job(stop=False)
    assert status == 0, said
    done = losses(folder / "run")
    command = [*TORCHRUN, "train", "run.toml", "--out", "other", *wanted]
    run = subprocess.run(command, env={**os.environ, "HYPER_PARALLEL_DEVICE": "cpu"}, check=False, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    assert done == losses(folder / "other")
    (folder / "run.toml").write_text((folder / "run.toml").read_text().replace("lr =", "lrr ="))
    status, said = job(stop=False)
    assert (status, said.count("[optimizer] has no key 'lrr'")) == (1, 1), said
