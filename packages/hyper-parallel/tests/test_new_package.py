"""`nox -s new-package` makes a package that is in every list and passes its own tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="nothing of the device in it"),
]

ROOT = Path(__file__).resolve().parents[3]


def run(folder: Path, *arguments: str) -> str:
    paths = [str(path) for path in sorted(folder.glob("packages/*/src"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("PYTEST_CURRENT_TEST", None)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    return f"{done.stdout}{done.stderr}exit status {done.returncode}"


@pytest.fixture
def copy(tmp_path):
    skipped = shutil.ignore_patterns("__pycache__", "tests", "benchmarks", ".*")
    for name in ("packages", "docs", "LICENSE", "pyproject.toml", "conftest.py", ".ci/new_package.py"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=skipped)
        else:
            shutil.copy(ROOT / name, target)
    return tmp_path


@pytest.mark.thorough
def test_a_new_package_passes_its_tests(copy):
    assert run(copy, ".ci/new_package.py", "hp-example") == "exit status 0"
    project = tomllib.loads((copy / "pyproject.toml").read_text())["tool"]
    assert "hp-example" in project["uv"]["sources"]
    assert "packages/hp-example/src" in project["pyright"]["extraPaths"]
    assert "hp_example" in project["importlinter"]["root_packages"]
    assert any("hp_example" in layer for layer in project["importlinter"]["contracts"][0]["layers"])
    features = tomllib.loads((copy / "docs/features.toml").read_text())
    assert "hp-example" in features["seconds"] and "hp-example" in {each["package"] for each in features["feature"]}
    assert run(copy, "docs/structure.py", "--check") == "exit status 0"
    told = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "packages/hp-example")
    assert "4 passed" in told and told.endswith("exit status 0"), told
    again = run(copy, ".ci/new_package.py", "hp-example")
    assert "a package is named hp-<words in small letters>, and new; got 'hp-example'" in again
