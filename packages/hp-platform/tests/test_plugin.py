"""The pytest plugin, by running pytest on small test files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hp_platform import get_platform


def run_pytest(folder: Path, *arguments: str, text: str) -> str:
    """Run pytest on a test file in a folder of its own, and get what it printed."""
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\nfilterwarnings = ['error']\n")
    (folder / "test_it.py").write_text("from hp_platform.testing import on_ranks, run_ranks\n" + text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "hp_platform.testing.plugin"]
    command += ["--import-mode=importlib", "-rs", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300).stdout


def test_failures_of_ranks_are_told_and_pytest_goes_on(tmp_path):
    output = run_pytest(
        tmp_path,
        text="""
import dataclasses, time
import pytest, torch
import torch.distributed as dist

@dataclasses.dataclass
class Value:
    number: int

def whoami(value):
    return Value(value.number + dist.get_rank())

def test_values_of_the_test_modules_classes_pass():
    assert run_ranks(2, whoami, Value(5)) == [Value(5), Value(6)]

@on_ranks(2)
@pytest.mark.parametrize("value", [Value(3)])
def test_assert(value, tmp_path):
    print("printed on a rank")
    assert tmp_path.exists()
    assert value.number + dist.get_rank() == 3

@on_ranks(2, timeout=0.5)
def test_hang():
    if dist.get_rank() == 1:
        time.sleep(100)

@on_ranks(1)
def test_skip():
    pytest.skip("not today")

@on_ranks(1, 2)
def test_good(ranks):
    assert dist.get_world_size() == ranks
""",
    )
    assert "2 failed, 3 passed, 1 skipped" in output
    assert "test_assert failed on 1 of 2 ranks\n--- rank 1 ---\nTraceback" in output
    assert "AssertionError: assert (3 + 1) == 3" in output  # pytest's rewriting works on ranks
    assert "printed on a rank" in output
    hang = output[output.index("test_hang failed on 1 of 2 ranks") :]
    assert re.search(r"--- rank 1 ---\nhad not returned after .* \(the time limit of 0.5 s\) and was killed", hang)
    assert 'test_it.py", line' in hang and "in test_hang" in hang and "worker.py" not in hang
    assert "not today" in output


def test_absent_hardware_skips_with_what_it_needs(tmp_path):
    if "npu" in get_platform().devices.present():
        pytest.skip("this machine has an npu")
    output = run_pytest(
        tmp_path,
        "--backend",
        "torch-npu",
        text="""
@on_ranks(1, 2)
def test_a(): ...

def test_b():
    run_ranks(2, print)
""",
    )
    assert "3 skipped" in output
    lines = [line for line in output.splitlines() if line.startswith("SKIPPED")]
    assert len(lines) == 1
    assert "--backend torch-npu needs a device of kind npu, this machine has: cpu" in lines[0]


def test_an_unknown_backend_lists_the_choices(tmp_path):
    command = [sys.executable, "-m", "pytest", "-p", "hp_platform.testing.plugin", "--backend", "jax-tpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "torch-cpu" in done.stderr and "torch-cuda" in done.stderr and "torch-npu" in done.stderr


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_ranks_die_with_the_process_that_started_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys, time
from hp_platform.testing import run_ranks

def pid():
    return os.getpid()

def hang():
    time.sleep(100)

if __name__ == "__main__":
    print(*run_ranks(2, pid), flush=True)
    run_ranks(2, hang)
""")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not any(map(alive, pids))


def test_the_readmes_example(tmp_path):
    readme = Path(__file__).parents[1] / "README.md"
    code = readme.read_text().split("```python\n")[1].split("```")[0]
    expected = re.findall(r"print\(.*\)  # (.*)", code)[-1]
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "HYPER_PARALLEL_DEVICE": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.stdout, done.stderr, done.returncode) == (expected + "\n", "", 0)
