"""docs/backends.md is what the runs' results say, and a cell that nothing fills is an error."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="nothing of the device in it"),
]

SCRIPT = Path(__file__).resolve().parents[3] / "docs/make_backends.py"
TORCH = """<testsuites><testsuite name="pytest" hostname="h">
<properties><property name="left out" value="for MindSpore only: 1 test module (1 in p/mindspore)" /></properties>
<testcase classname="packages.p.tests.test_a" name="test_one[2.5-ranks1]" time="1.75" />
<testcase classname="packages.p.tests.test_a" name="test_one[2.5-ranks2]" time="2.5" />
<testcase classname="packages.p.tests.test_a" name="test_two"><skipped message="needs | more">x</skipped></testcase>
<testcase classname="packages.p.tests.test_b" name="test_one"><failure message="no">x.py:2</failure></testcase>
</testsuite></testsuites>"""
MINDSPORE = """<testsuites><testsuite name="pytest">
<testcase classname="packages.p.tests.mindspore.test_a" name="test_one" />
<testcase classname="" name="packages.p.tests.mindspore.test_b"><error message="collection failure">x</error></testcase>
</testsuite></testsuites>"""
FEATURES = """
[[feature]]
package = "p"
name = "first"
tests = ["p/tests/*test_a.py::test_one"]

[[feature]]
package = "p"
name = "second"
tests = ["p/tests/*test_b.py"]
"""
BUDGETS = {"p": [4, 5, 0]}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_backends", SCRIPT)
    sys.modules["make_backends"] = module = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_backends"]


@pytest.fixture
def results(script):
    found = {"torch-cpu": TORCH, "torch-npu-sim": TORCH, "mindspore-cpu": MINDSPORE}
    return {name: script.read_results(text) for name, text in found.items()}


def feature(tests, **missing):
    reasons = ", ".join(f"{name.replace('_', '-')} = {reason!r}" for name, reason in missing.items())
    return f'[[feature]]\npackage = "p"\nname = "it"\ntests = {tests}\nmissing = {{ {reasons} }}\n'


def row(script, results, text):
    page = script.make_page(script.read_features(text), results, BUDGETS)
    (line,) = (line for line in page.splitlines() if line.startswith("| p | it |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")][2:]
    return dict(zip((*script.CI, *script.HARDWARE), cells, strict=True))


def test_the_page(script, results):
    page = script.make_page(script.read_features(FEATURES), results, BUDGETS)
    absent = "code present, untested on hardware"
    tested = "tested in CI (2 tests) | tested in CI (2 tests) | tested in CI (1 test)"
    assert f"| p | first | {tested} | {absent} | {absent} | {absent} |\n" in page
    assert "| p | second | FAILING | FAILING | FAILING | FAILING on torch-cpu |" in page
    assert "torch-cpu: 2 tests passed, 1 FAILED.\n\n- left out, for MindSpore only: 1 test module (1 in" in page
    assert "- skipped, 1: needs | more\n" in page and "mindspore-cpu: 1 tests passed, 1 FAILED.\n" in page


def test_seconds_are_told_beside_the_budget(script, results):
    page = script.make_page(script.read_features(FEATURES), results, BUDGETS)
    assert "| p | 4 of 4 | 4 of 5 | 0 of 0 |\n| all | 4 of 4 | 4 of 5 | 0 of 0 |\n" in page
    assert script.over_budget(results, BUDGETS) == ["p on torch-cpu: 4 s, the budget is 4 s"]
    assert script.over_budget(results, {"p": [5, 5, 0]}) == []


def test_an_empty_cell_needs_a_reason(script, results):
    tests = ["p/tests/test_a.py::test_one"]
    with pytest.raises(script.DeclarationError, match="'it': no test of it passed on mindspore-cpu, and no reason"):
        row(script, results, feature(tests))
    cells = row(script, results, feature(tests, mindspore="raises", torch_cuda="no driver"))
    assert cells["mindspore-cpu"] == cells["mindspore-ascend"] == "not supported: raises"
    assert cells["torch-cuda"] == "not supported: no driver"
    assert cells["torch-npu"] == "code present, untested on hardware"


def test_a_skipped_test_fills_no_cell(script, results):
    with pytest.raises(script.DeclarationError) as found:
        row(script, results, feature(["p/tests/test_a.py::test_two"], mindspore="raises"))
    assert str(found.value).splitlines() == [
        f"'it': no test of it passed on {name}, and no reason is declared" for name in ("torch-cpu", "torch-npu-sim")
    ]


def test_what_has_no_framework_in_it_is_run_once(script, results):
    skipped = '<skipped message="no framework in it: run on torch-cpu" />'
    case = f'<testcase classname="packages.p.tests.test_a" name="test_one">{skipped}</testcase>'
    once = script.read_results(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    cells = row(
        script, {**results, "torch-npu-sim": once}, feature(["p/tests/test_a.py::test_one"], mindspore="raises")
    )
    assert cells["torch-cpu"].startswith("tested") and cells["torch-npu-sim"] == "no framework in it: run on torch-cpu"


def test_a_failing_row_is_told(script, results, tmp_path, monkeypatch, capsys):
    page = tmp_path / "backends.md"
    page.write_text(script.make_page(script.read_features(FEATURES), results, BUDGETS))
    monkeypatch.setattr(sys, "argv", ["make_backends.py", "--check", "--output", str(page)])
    assert script.main() == 1
    assert f"{page}: p: second is FAILING: mend it, then nox -t torch-cpu" in capsys.readouterr().err
    page.write_text("".join(line for line in page.read_text().splitlines(True) if "| second |" not in line))
    assert script.main() == 0


def test_declarations_that_are_not_so(script, results):
    with pytest.raises(script.DeclarationError, match=r"'it' is declared missing on mindspore-cpu \(old\), and 1 test"):
        row(script, results, feature(["p/tests/*test_a.py"], mindspore="old"))
    with pytest.raises(script.DeclarationError, match=r"'it': 'p/tests/test_c.py' matches no test of any run"):
        row(script, results, feature(["p/tests/*test_a.py", "p/tests/test_c.py"]))
    with pytest.raises(
        script.DeclarationError, match=r"'it': missing on \['mindspore-gpu'\]; there are \['mindspore', "
    ):
        row(script, results, feature([], mindspore_gpu="none"))


def test_hardware_that_left_results_is_tested(script, results):
    cells = row(script, {**results, "torch-cuda": results["torch-cpu"]}, feature(["p/tests/*test_a.py"]))
    assert cells["torch-cuda"] == "tested on hardware (2 tests)"


def test_results_that_are_not_there(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "torch-cpu.xml").write_text(TORCH)
    monkeypatch.setattr(sys, "argv", ["make_backends.py", str(tmp_path)])
    assert script.main() == 1
    told = capsys.readouterr().err
    assert "mindspore-cpu.xml: not there; first run nox -t" in told and "torch-cpu.xml" not in told
