"""Blocks of the READMEs: programs run, plans pass lint, fragments are marked as fragments."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

import hp_platform
from hp_plan import ParallelPlan, lint
from hp_platform.platforms.ports import platform_name
from hp_testing import run_ranks

ROOT = Path(__file__).parents[3]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), ROOT / "docs" / "fsdp.md"]
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Snippet(NamedTuple):
    place: str
    kind: str
    text: str
    output: str | None  # the block after a program, where that is text


def snippets() -> list[Snippet]:
    found = []
    for path in READMES:
        content = path.read_text(encoding="utf-8")
        blocks = list(_BLOCK.finditer(content))
        for block, after in zip(blocks, [*blocks[1:], None]):
            line = content.count("\n", 0, block.start()) + 1
            output = after[2] if after is not None and after[1] == "text" else None
            found.append(Snippet(f"{path.relative_to(ROOT).as_posix()}:{line}", block[1], block[2], output))
    return found


def of_kind(kind: str, framework: str | None = None) -> list[pytest.param]:
    # Programs that start ranks of their own are run by the tests of `run_ranks`, here and in hp-platform.
    chosen = [each for each in snippets() if each.kind == kind and "run_ranks" not in each.text]
    if framework is not None:
        chosen = [each for each in chosen if ("import mindspore" in each.text) == (framework == "mindspore")]
    return [pytest.param(each, id=each.place) for each in chosen]


def run_program(text: str) -> str:
    out = io.StringIO()
    # The pool's ranks have other tests to run in the same process group.
    leave = mock.patch.object(hp_platform, "destroy_process_group", lambda: None)
    with leave, contextlib.redirect_stdout(out):
        exec(compile(text, "README.md", "exec"), {"__name__": "readme"})
    return out.getvalue()


def test_every_block_says_what_it_is():
    kinds = {each.place: each.kind for each in snippets()}
    assert set(kinds.values()) == {"python", "python fragment", "toml", "toml fragment", "text"}, kinds


@pytest.mark.not_on("torch-npu-sim", reason="the programs ask for CPUs; nothing of the device in it")
@pytest.mark.parametrize("snippet", of_kind("python", platform_name()))
def test_a_program_runs_on_two_ranks(snippet):
    printed = run_ranks(2, run_program, snippet.text, timeout=120.0)
    if snippet.output is not None:
        assert printed[0] == snippet.output


ALONE = """
import sys
sys.path.insert(0, {folder!r})
from test_readmes import of_kind, run_program
for parameters in of_kind("python", {framework!r}):
    print(parameters.id, flush=True)
    run_program(parameters.values[0].text)
print("all of them ran")
"""


@pytest.mark.not_on("torch-npu-sim", reason="the programs ask for CPUs; nothing of the device in it")
def test_programs_run_in_a_process_that_no_launcher_started():
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MS_ROLE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launchers}
    environment |= {"OMP_NUM_THREADS": "1", "GLOG_v": "3", "HYPER_PARALLEL_DEVICE": "cpu"}
    program = ALONE.format(folder=str(Path(__file__).parent), framework=platform_name())
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("all of them ran\n") and done.stderr.count("it is the only rank") == 1, done.stderr


@pytest.mark.parametrize("snippet", of_kind("python fragment"))
def test_a_fragment_is_python(snippet):
    ast.parse(snippet.text)


@pytest.mark.parametrize("snippet", of_kind("toml fragment"))
def test_a_plan_of_a_model_that_is_elsewhere_can_be_read(snippet):
    ParallelPlan.from_dict(tomllib.loads(snippet.text))


@pytest.mark.framework("torch")
@pytest.mark.parametrize("snippet", of_kind("toml"))
def test_a_plan_has_no_faults(snippet):
    assert lint(tomllib.loads(snippet.text)) == ()


@pytest.mark.parametrize("path", sorted(ROOT.glob("packages/*/README.md")), ids=lambda path: path.parent.name)
def test_a_packages_readme_links_to_nothing_that_its_index_page_lacks(path):
    """It is the page of the package on an index, where a path of this repository leads nowhere."""
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", path.read_text(encoding="utf-8")) == []
