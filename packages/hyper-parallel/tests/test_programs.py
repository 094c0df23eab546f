"""Some of the programs of programs/, each as processes under torchrun and alone; `nox -s programs` runs all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "programs"
sys.path.insert(0, str(FOLDER))

from runner.catalogue import Launch, Program, programs  # noqa: E402
from runner.judging import Outcome, run_alone, run_program  # noqa: E402

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="the programs ask for CPUs"),
]
PROGRAMS = programs()


@pytest.mark.parametrize("program", [pytest.param(each, id=each.name) for each in PROGRAMS if each.short])
def test_a_program_ends_and_computes_as_one_process_does(program, tmp_path):
    truth = None
    if program.alone:
        found, truth = run_alone(program, tmp_path / "alone", sys.executable, 600.0)
        assert found.faults == [], found.output
    outcome, _ = run_program(program, tmp_path / "ranks", limit=600.0, truth=truth)
    assert outcome.faults == [], outcome.output


def test_the_readme_of_the_programs_names_each_of_them():
    text = (FOLDER / "README.md").read_text()
    own = [each.name for each in PROGRAMS if "/" not in each.name]
    assert [name for name in own if f"]({name}.py)" not in text] == []


FAULTY = """
import os, subprocess, sys
from reporting import RANK, report_step
{what}
report_step(1.0)
report_step(2.0)
"""


def judge(folder: Path, what: str, **values) -> Outcome:
    """Judge a program of plain processes that does what it should not, against losses of 1 and 2."""
    program = Program("faulty", FAULTY.format(what=what), (Launch(ranks=0, **values),))
    return run_program(program, folder, limit=60.0, truth=({1: 1.0, 2: 2.0}, {}))[0]


def test_a_program_without_a_fault_is_right(tmp_path):
    assert judge(tmp_path, "").faults == []


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("sys.exit(3)", "exit status 3, expected 0; ranks that failed: {}"),
        ("report_step(0.5)", "losses of the steps [1, 2, 3], expected [1, 2]"),
        ("os.abort()", "exit status -6, expected 0; ranks that failed: {}"),
    ],
)
def test_a_wrong_end_or_a_wrong_loss_is_a_fault(what, fault, tmp_path):
    assert fault in judge(tmp_path, what).faults


def test_an_error_that_should_come_and_does_not_is_a_fault(tmp_path):
    assert judge(tmp_path, "", error="no such mesh").faults == ["nobody said 'no such mesh'"]


def test_a_program_that_hangs_is_ended_and_shows_where(tmp_path):
    program = Program("hanging", "import time\n\ndef wait():\n    time.sleep(1e6)\n\nwait()\n", (Launch(ranks=0),))
    outcome, _ = run_program(program, tmp_path, limit=3.0)
    assert outcome.faults == ["it hung for 3 s on 0 ranks"] and "in wait" in outcome.output
