"""How scripts of users end: with the exit codes that they ask for; `benchmarks/soak_ends.py` is the long form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hp_testing.pools.processes import ended

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="nothing of the device in it"),
]
PROGRAM = Path(__file__).parents[1] / "benchmarks" / "soak_ends.py"


@pytest.mark.parametrize("busy", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_jobs_end_with_the_exit_codes_that_they_ask_for(busy):
    command = [sys.executable, str(PROGRAM), "4", str(busy)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ended(subprocess.Popen(command, text=True, start_new_session=True, **pipes)) as process:
        output, _ = process.communicate()
    assert f"4 of 4 jobs ended as expected, beside {busy} busy processes; 0 aborts" in output, output
