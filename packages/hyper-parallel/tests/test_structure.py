"""docs/structure.py refuses circles of imports, and closures that hold themselves."""

from __future__ import annotations

import importlib.util
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
    spec = importlib.util.spec_from_file_location("structure", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["structure"] = importlib.util.module_from_spec(spec)
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


def test_what_is_imported_for_types_alone_closes_none(structure: Any, tmp_path: Path) -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hp_p.high\n"
    assert complaints(structure, tmp_path, low=typed, high="import hp_p.low\n") == []


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
