"""docs/structure.py refuses circles of imports, and counts what no tool sees; docs/walks.py counts files."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="nothing of the device in it"),
]

SCRIPT = Path(__file__).resolve().parents[3] / "docs/structure.py"
LOW = "def late():\n    from hp_p import high\n"


@pytest.fixture(scope="module")
def structure() -> Any:
    return loaded("structure", SCRIPT)


def loaded(name: str, path: Path) -> Any:
    """Load a script as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def complaints(structure: Any, root: Path, **sources: str) -> list[str]:
    """Write modules of the package ``hp_p`` below ``root``, and tell what is refused."""
    package = root / "packages/hp-p/src/hp_p"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", **sources}.items():
        (package / f"{name}.py").write_text(text)
    return list(structure.complaints(structure.read(root)))


def test_an_import_inside_a_function_closes_a_circle(structure: Any, tmp_path: Path) -> None:
    [found] = complaints(structure, tmp_path, low=LOW, high="import hp_p.low\n")
    assert found.startswith(
        "2 modules import each other in a circle (hp_p.high -> hp_p.low, hp_p.low -> hp_p.high): move what both ends"
        " need into a module below them"
    )


def test_what_is_imported_for_types_alone_closes_a_circle_of_types(structure: Any, tmp_path: Path) -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hp_p.high\n"
    [found] = complaints(structure, tmp_path, low=typed, high="import hp_p.low\n")
    assert found.startswith("2 modules know each other's types in a circle (hp_p.high, hp_p.low)")
    modules = structure.read(tmp_path)
    assert structure.circles(modules) == [] != structure.circles(modules, typed=True)


def test_closures_that_call_themselves_or_each_other_are_named_with_their_lines(structure: Any, tmp_path: Path) -> None:
    text = """\
def outer(x):
    def walk(v):
        return [walk(item) for item in v] if v else x

    def ping():
        return pong()

    def pong():
        return ping()

    def once(once):
        return once

    def fine():
        ping = x
        return ping

    return walk, once, fine
"""
    found = complaints(structure, tmp_path, low=text)
    assert [each.split(":")[0] for each in found] == [
        f"hp_p.low has a closure that calls itself ({closure})"
        for closure in ("walk, line 2", "ping, line 5", "pong, line 8")
    ]
    method = "class A:\n    def f(self):\n        return self.f() + len(f())\ndef f():\n    return f()\n"
    assert complaints(structure, tmp_path / "other", low=method) == []


def test_contracts_that_no_tool_sees_are_counted(structure: Any, tmp_path: Path) -> None:
    texts = {
        "packages/hp-p/src/hp_p/__init__.py": (
            "class Box:\n    __slots__ = ('_size',)\n    def _grow(self):\n        self._size += self._step()\n"
            "def grow(box):\n    box._grow()\n"
        ),
        "packages/hp-q/src/hp_q/__init__.py": (
            "import sys\ndef size(box):\n    sys._getframe(1)\n    return box._size, box._version, box.size\n"
            "def read(make):\n    try:\n        make()\n"
            "    except ValueError as error:\n        return str(error).partition(': ')\n"
        ),
    }
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    modules = structure.read(tmp_path)
    assert list(structure.foreign(modules)) == [("hp_q", "_size", 4)]
    assert modules["hp_p"].looks == modules["hp_p"].parses == []
    assert (modules["hp_q"].looks, modules["hp_q"].parses) == ([3], [9])
    looks, parses = structure.complaints(modules)
    assert looks.startswith("hp_q looks at its callers' frames")
    assert parses == "hp_q takes an error's text apart: give the error fields"


def test_a_walk_counts_files_moves_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "packages/hp-p/src"
    folder.mkdir(parents=True)
    (folder / "inner.py").write_text("def again(plan): return plan\ndef check(plan): return again(plan)\n")
    outer = "import inner\ndef apply(plan):\n    inner.check(plan)\n    len('not ours')\n    return inner.again(plan)\n"
    (folder / "outer.py").write_text(outer)
    paths = {"inner": folder / "inner.py", "outer": folder / "outer.py", "walks": SCRIPT.with_name("walks.py")}
    modules = {name: loaded(name, path) for name, path in paths.items()}  # outer imports inner
    for name in paths:
        del sys.modules[name]
    plan = object()
    walk = modules["walks"].Walk(plan)
    assert walk.run(lambda: modules["outer"].apply(plan)) is plan
    assert list(walk.files) == ["outer.py", "inner.py"]
    assert str(walk) == "2 files, 4 moves, 4 stays, 0 returns"  # apply, check, again and again


def test_the_page_of_failures_names_modules_that_exist() -> None:
    text = (SCRIPT.parent / "failures.md").read_text(encoding="utf-8")
    named = [line.split("|")[2] for line in text.partition("## Who does it")[2].splitlines() if line.startswith("| ")]
    folder, missing = "", []
    for module in re.findall(r"`([a-z_.]+)`", " ".join(named)):
        folder = module.rpartition(".")[0] or folder  # a name alone lies beside the one before
        path = f"{folder}.{module.rpartition('.')[2]}".replace(".", "/")
        missing += [path] * (not list(SCRIPT.parents[1].glob(f"packages/*/src/{path}.py")))
    assert len(named) > 10 and not missing
