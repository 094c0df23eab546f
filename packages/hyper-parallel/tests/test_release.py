"""What `nox -s release` refuses: versions that changelogs do not name, and changes that versions do not tell of."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="nothing of the device in it"),
]

ROOT = Path(__file__).resolve().parents[3]


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_package(root: Path, source: str = "", *, version: str = "0.1.0", name: str = "hp-a") -> Path:
    package = root / "packages" / name
    module = package / "src" / name.replace("-", "_")
    module.mkdir(parents=True, exist_ok=True)
    (module / "__init__.py").write_text(source)
    (package / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "{version}"\n')
    (package / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0\n\n- A thing.\n")
    (package / "README.md").write_text(f"# {name}\n")
    return package


@pytest.fixture(scope="module")
def versions() -> Any:
    return load(".ci/versions.py")


@pytest.mark.parametrize(
    ("changelog", "expected"),
    [
        ("# Changelog\n\n## 0.2.0\n\n- A thing.\n\n## 0.1.0\n\n- Another.\n", []),
        ("# Changelog\n\n## 0.2.0 (unreleased)\n\n- A thing.\n", []),
        ("# Changelog\n\n## Unreleased\n\n- A thing.\n\n## 0.1.0\n", []),
        ("# Changelog\n\n## 0.2.0\n\n### Fixes\n\n- A thing.\n", []),
        ("# Changelog\n", ["CHANGELOG.md has no section: begin one with '## 0.2.0'"]),
        (
            "# Changelog\n\n## 0.1.0\n\n- A thing.\n\n## 0.2.0\n\n- Another.\n",
            [
                "pyproject.toml has version 0.2.0, the newest section of CHANGELOG.md is '0.1.0': "
                "begin a section '## 0.2.0', or set the version"
            ],
        ),
        (
            "# Changelog\n\n## 0.2.0\n\n## 0.1.0\n\n- A thing.\n",
            ["the section '0.2.0' of CHANGELOG.md is empty: say what a user can notice"],
        ),
    ],
)
def test_the_newest_section_names_the_version(versions, changelog, expected):
    assert versions.check_changelog(changelog, "0.2.0") == expected


def test_problems_of_a_package(versions, tmp_path):
    package = write_package(tmp_path)
    assert versions.problems(package) == []
    readme = "[a](https://e.org) [b](#b) [c](../c.md)\n```python\nx[0](y)\n```\n\n    z[0](y)\n"
    (package / "README.md").write_text(readme)
    (package / "CHANGELOG.md").unlink()
    assert versions.problems(package) == [
        "it has no CHANGELOG.md",
        "README.md links to ../c.md, which an index lacks: write the whole address",
    ]


@pytest.fixture
def changes(monkeypatch) -> Any:
    pytest.importorskip("griffe", reason="needs griffelib")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.delitem(sys.modules, "public_api", raising=False)
    return load("docs/api_changes.py")


OLD = """\
from hp_a.inner import Base, moved

__all__ = ["Base", "gone", "moved"]

def gone(): ...
def _private(x): ...
"""
INNER = "class Base:\n    def method(self, x, y=1): ...\n    def _hidden(self): ...\n\ndef moved(a, *, b=2): ...\n"


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path, inner: str, source: str = OLD, *, version: str = "0.1.0") -> None:
    """Commit the package hp-a, and hyper-parallel, which has its names."""
    (write_package(root, source, version=version) / "src/hp_a/inner.py").write_text(inner)
    write_package(root, "from hp_a import *\n", version=version, name="hyper-parallel")
    if not (root / ".git").exists():
        git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "a")


def test_what_breaks_callers_needs_a_version_that_says_so(changes, tmp_path, capsys):
    commit(tmp_path, INNER)
    assert changes.main(tmp_path) == 0
    assert "no earlier release to compare with" in capsys.readouterr().out

    git(tmp_path, "tag", "v0.1.0")
    broken = INNER.replace("x, y=1", "y=1").replace("*, b=2", "*, b=3")
    commit(tmp_path, broken, OLD.replace('"gone", ', ""))
    assert changes.main(tmp_path) == 1
    told = capsys.readouterr().out
    assert "hp-a 0.1.0 -> 0.1.0 breaks callers of v0.1.0:\n    `gone`: no longer public\n" in told
    assert "`Base.method(x)`: *Parameter was removed*" in told
    assert "`moved(b)`: *Parameter default was changed*: `2` -> `3`" in told
    assert "hp-a has to be 0.2.0 or later; hyper-parallel has to be 0.2.0 or later" in told

    commit(tmp_path, broken, OLD.replace('"gone", ', ""), version="0.2.0")
    git(tmp_path, "tag", "v0.2.0")  # of the present commit: the comparison is with the one before
    assert changes.main(tmp_path) == 0
    told = capsys.readouterr().out
    assert "`gone`: no longer public" in told
    assert "public names compared with v0.1.0: every version allows for its changes" in told


def test_what_breaks_no_caller_needs_no_version(changes, tmp_path, capsys):
    commit(tmp_path, INNER)
    commit(tmp_path, INNER.replace("y=1", "y=1, z=2").replace("_hidden", "_other"), OLD.replace("(x)", "()"))
    assert changes.main(tmp_path, "HEAD^") == 0
    assert capsys.readouterr().out == "public names compared with HEAD^: every version allows for its changes\n"


@pytest.mark.parametrize(("before", "after"), [("0.1.3", "0.2.0"), ("1.4.2", "2.0.0")])
def test_the_version_that_may_break_callers(changes, before, after):
    assert str(changes.next_breaking(changes.Version(before))) == after
