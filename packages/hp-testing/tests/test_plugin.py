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
from hp_platform.platforms.ports import platform_name
from hp_testing.plugin import uses_none

pytestmark = pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it")

ONCE = pytest.mark.not_on("mindspore-cpu", "mindspore-ascend", reason="nothing of the framework in it")
ACCELERATOR = {"torch": "torch-npu", "mindspore": "mindspore-ascend"}


def run_pytest(folder: Path, *arguments: str, text: str) -> str:
    """Run pytest on a test file in a folder of its own, and get what it printed."""
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\nfilterwarnings = ['error']\n")
    (folder / "test_it.py").write_text("from hp_testing import on_ranks, run_ranks\n" + text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "hp_testing.plugin"]
    command += ["--import-mode=importlib", "-rs", "--backend", f"{platform_name()}-cpu", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    return f"{done.stdout}exit status {done.returncode}\n"


def test_failures_of_ranks_are_told_and_pytest_goes_on(tmp_path):
    output = run_pytest(
        tmp_path,
        text="""
import dataclasses, time
import pytest
from hp_platform import get_platform

@dataclasses.dataclass
class Value:
    number: int

def whoami(value):
    return Value(value.number + get_platform().groups.rank())

def test_values_of_the_test_modules_classes_pass():
    assert run_ranks(2, whoami, Value(5)) == [Value(5), Value(6)]

@on_ranks(2)
@pytest.mark.parametrize("value", [Value(3)])
def test_assert(value, tmp_path):
    print("printed on a rank")
    assert tmp_path.exists()
    assert value.number + get_platform().groups.rank() == 3

@on_ranks(2, timeout=0.5)
def test_hang():
    if get_platform().groups.rank() == 1:
        time.sleep(100)

@on_ranks(1)
def test_skip():
    pytest.skip("not today")

@on_ranks(1, 2)
def test_good(ranks):
    assert get_platform().groups.size() == ranks
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


@ONCE
def test_absent_hardware_skips_with_what_it_needs(tmp_path):
    if "npu" in get_platform().devices.present():
        pytest.skip("this machine has an npu")
    output = run_pytest(
        tmp_path,
        "--backend",
        ACCELERATOR[platform_name()],
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
    needs = f"--backend {ACCELERATOR[platform_name()]} needs a device of kind npu, this machine has: cpu"
    assert needs in lines[0]


@ONCE
def test_an_unknown_backend_lists_the_choices(tmp_path):
    command = [sys.executable, "-m", "pytest", "-p", "hp_testing.plugin", "--backend", "jax-tpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert "torch-cpu" in done.stderr and "torch-cuda" in done.stderr and "torch-npu" in done.stderr


def test_modules_of_another_framework_are_left_out_and_counted(tmp_path):
    other = "mindspore" if platform_name() == "torch" else "torch"
    for name, text in {
        f"{other}/test_folder.py": "",
        "test_import.py": f"import os, {other}.nn",
        "test_own_code.py": f"from hp_platform.{other} import groups",
        "test_beside.py": "from models import build",
        "models.py": f"from {other} import nn",
        "test_marked.py": f'import pytest\n\npytestmark = pytest.mark.framework("{other}")',
        "test_marks.py": f'import pytest\n\npytestmark = [pytest.mark.slow, pytest.mark.framework("{other}")]',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n\ndef test_wrong(): assert False\n")
    output = run_pytest(
        tmp_path,
        "--junitxml=results.xml",
        text=f"""
import pytest

@pytest.mark.framework("{other}")
def test_skipped():
    import nothing

@pytest.mark.framework("{platform_name()}")
def test_runs():
    def inside():
        import {other}
""",
    )
    title = {"torch": "PyTorch", "mindspore": "MindSpore"}[other]
    assert "1 passed, 1 skipped" in output and f"for {title} only" in output
    left_out = f"for {title} only: 6 test modules (5 in ., 1 in {other})"
    assert f"left out, {left_out}" in output
    assert f'<property name="left out" value="{left_out}" />' in (tmp_path / "results.xml").read_text()


@ONCE
def test_an_expression_that_selects_nothing_fails(tmp_path):
    other = {"torch": "mindspore", "mindspore": "torch"}[platform_name()]
    text = f"import {other}\ndef test_something(): ..."
    assert "exit status 0" in run_pytest(tmp_path, text=text), "a suite that is for another framework as a whole"
    assert "exit status 5" in run_pytest(tmp_path, "-k", "no_such_test", text=text)
    assert "exit status 5" in run_pytest(tmp_path, "-k", "no_such_test", text="def test_something(): ...")


@ONCE
def test_slow_variants_and_more_examples_run_when_asked_for(tmp_path):
    text = """
import pytest
from hypothesis import given, settings, strategies

@pytest.mark.parametrize("size", [1, pytest.param(8, marks=pytest.mark.thorough)])
def test_sizes(size): ...

tried = []

@given(strategies.integers())
def test_examples(number):
    tried.append(number)

def test_last():
    assert len(tried) == settings.default.max_examples == 50
"""
    output = run_pytest(tmp_path, text=text)
    assert "3 passed, 1 deselected" in output and "left out, of another tier: 1 tests (--tier all runs them)" in output
    assert "4 passed" in run_pytest(tmp_path, "--tier", "all", text=text.replace("50", "400"))


@ONCE
def test_smoke_is_a_case_of_each_test_with_the_mark(tmp_path):
    text = """
import pytest

@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 8])
def test_sizes(size): ...

@pytest.mark.smoke
@on_ranks(1, 2)
def test_ranks(): ...

def test_another(): ...
"""
    output = run_pytest(tmp_path, "-v", "--tier", "smoke", text=text)
    assert re.findall(r"::(test_\w+(?:\[\w+\])?) PASSED", output) == ["test_sizes[1]", "test_ranks[ranks2]"]


@ONCE
def test_what_a_device_can_break_is_tried_on_the_fewest_ranks(tmp_path):
    text = """
import pytest

def test_first(): ...

@pytest.mark.device
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("size", [1, 8])
def test_marked(size): ...

def test_another(): ...
"""
    output = run_pytest(tmp_path, "-v", "--tier", "device", text=text)
    found = re.findall(r"::(test_\w+(?:\[[\w-]+\])?) PASSED", output)
    assert found == ["test_first", "test_marked[1-ranks2]", "test_marked[8-ranks2]"]


@ONCE
def test_ranks_end_once_the_last_test_of_their_number_is_done(tmp_path):
    output = run_pytest(
        tmp_path,
        "-v",
        text="""
from hp_testing.pools import pool

def test_last_in_the_file_is_not_the_last(): ...

@on_ranks(2, 1)
def test_sizes(): ...

def check():
    assert not pool._pools

def teardown_module():
    assert [*pool._pools] == [2], "that of the last test, which ends after this"

def test_without_ranks(): check()
""",
    )
    order = re.findall(r"::(test_\w+(?:\[\w+\])?) PASSED", output)
    assert order == [
        "test_last_in_the_file_is_not_the_last",
        "test_without_ranks",
        "test_sizes[ranks1]",
        "test_sizes[ranks2]",
    ], output
    assert "4 passed" in output and "error" not in output


@pytest.mark.thorough
@pytest.mark.framework("mindspore")  # which is not the default backend
def test_workers_of_xdist_run_the_same_tests(tmp_path):
    pytest.importorskip("xdist", reason="the sessions without a device have pytest-xdist")
    other = next(framework for framework in ACCELERATOR if framework != platform_name())
    (tmp_path / "test_other.py").write_text(f"import {other}\ndef test_never(): assert False\n")
    output = run_pytest(
        tmp_path,
        "--numprocesses=2",
        "--dist=worksteal",
        "--junitxml=results.xml",
        text=f"""
import pytest
from hp_platform import get_platform

@on_ranks(2)
@pytest.mark.parametrize("number", range(2))
def test_on_ranks(number):
    assert get_platform().groups.size() == 2

def test_the_option_is_known(pytestconfig):
    assert pytestconfig.getoption("--backend") == "{platform_name()}-cpu"
    assert get_platform().name == "{platform_name()}"
""",
    )
    assert "3 passed" in output and output.endswith("exit status 0\n"), output
    assert "only: 1 test module (1 in .)" in output
    assert "only: 1 test module (1 in .)" in (tmp_path / "results.xml").read_text()


def test_modules_without_a_framework_are_known(tmp_path):
    for text, expected in (
        ("import numpy\nfrom hp_dtensor.rules import library\n", True),
        ("import json\ndef test_a():\n    import torch\n", True),
        ("import torch\n", False),
        ("from hp_testing import on_ranks\n", False),
        ("from hp_platform import get_platform\n", False),
        ("from hp_dtensor.mindspore import api\n", False),
        ("import pytest\npytestmark = pytest.mark.framework('torch')\n", False),
    ):
        (tmp_path / "test_it.py").write_text(text)
        assert uses_none(tmp_path / "test_it.py") is expected, text


@ONCE
def test_a_test_that_is_not_for_a_backend_is_skipped(tmp_path):
    output = run_pytest(
        tmp_path,
        text=f"""
import pytest

@pytest.mark.not_on("{platform_name()}-cpu", "torch-npu-sim", reason="it has no wheels")
def test_wrong(): assert False

@pytest.mark.not_on("torch-npu-sim", reason="it has no wheels")
def test_runs(): ...
""",
    )
    assert "1 passed, 1 skipped" in output and f"not on {platform_name()}-cpu: it has no wheels" in output


@ONCE
def test_a_suite_for_another_framework_does_not_fail(tmp_path):
    other = "mindspore" if platform_name() == "torch" else "torch"
    (tmp_path / "test_it.py").write_text(f"import {other}\n\ndef test_wrong(): assert False\n")
    command = [sys.executable, "-m", "pytest", "-p", "hp_testing.plugin", "--import-mode=importlib"]
    command += ["-p", "no:cacheprovider", "--backend", f"{platform_name()}-cpu", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "1 test module (1 in .)" in done.stdout


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
from hp_testing import run_ranks

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
