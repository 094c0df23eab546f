"""The picture in docs/architecture.md is of the imports."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="nothing of the device in it"),
]

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("architecture")


@pytest.fixture
def sources(tmp_path):
    """A few packages; that docs/architecture.md is of this repository's own is for `nox -s lint`."""
    for name, text in {
        "hp-low/src/hp_low/__init__.py": "",
        "hp-low/src/hp_low/extend.py": "",
        "hp-low/src/hp_low/torch/__init__.py": "import hp_low",
        "hp-a/src/hp_a/__init__.py": "import hp_low",
        "hp-b/src/hp_b/__init__.py": "def late():\n    from hp_low.extend import name",
        "hp-testing/src/hp_testing/__init__.py": "import hp_low",
    }.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    for name in ("low", "a", "b", "testing"):
        project = f'[project]\nname = "hp-{name}"\ndescription = "package {name}"\n'
        (tmp_path / "packages" / f"hp-{name}" / "pyproject.toml").write_text(project)
    return tmp_path


def test_arrows_tell_the_doors(script, sources):
    modules = script.structure.read(sources)
    assert [*script.draw(modules)] == [
        "```mermaid",
        "flowchart TD",
        '    hp_a["<b>hp_a</b><br/>neutral"]',
        '    hp_b["<b>hp_b</b><br/>neutral"]',
        '    hp_low["<b>hp_low</b><br/>neutral | torch"]',
        '    hp_testing["<b>hp_testing</b><br/>neutral"]',
        "    hp_a --> hp_low",
        "    hp_b ==> hp_low",
        "    hp_testing -.-> hp_low",
        "```",
    ]
    assert "| hp_b | second |  | hp_low |" in [*script.tabulate(modules, {"hp_b": "second"})]


def test_the_page_that_differs_is_told(script, sources, monkeypatch, capsys):
    monkeypatch.setattr(script.structure, "ROOT", sources)
    page = sources / "architecture.md"
    page.write_text(f"before\n{script.BEGIN}old\n{script.END}after\n")
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(script.sys, "argv", ["architecture.py", "--check"])
    assert script.main() == 1
    assert "is not what the sources say: python docs/architecture.py" in capsys.readouterr().err
    monkeypatch.setattr(script.sys, "argv", ["architecture.py"])
    assert script.main() == 0
    assert page.read_text().startswith(f"before\n{script.BEGIN}\n```mermaid") and page.read_text().endswith("after\n")
    assert "\n| hp_b | package b |  | hp_low |\n" in page.read_text()
    monkeypatch.setattr(script.sys, "argv", ["architecture.py", "--check"])
    assert script.main() == 0


def test_the_map_of_a_package_and_its_crowded_folders(script, sources, monkeypatch, capsys):
    folder = sources / "packages/hp-a/src/hp_a"
    (folder / "rooms").mkdir()
    (folder / "rooms/__init__.py").write_text('"""Rooms: one for each noun."""\n')
    (folder / "rooms/kitchen.py").write_text('"""A kitchen, of 1.5 metres.\n\nMore of it."""\n')
    assert [*script.chart(folder)][2:] == [
        "| **rooms/** | Rooms: one for each noun |",
        "| rooms/kitchen | A kitchen, of 1.5 metres |",
    ]
    monkeypatch.setattr(script.structure, "ROOT", sources)
    assert [*script.crowded()] == []
    for number in range(script.MOST_ENTRIES):
        (folder / f"module{number}.py").touch()
    assert [*script.crowded()] == ["packages/hp-a/src/hp_a has 11 entries, more than 10"]
    (sources / "packages/hp-b/README.md").write_text("no place\n")
    monkeypatch.setattr(script, "PAGE", sources / "architecture.md")
    script.PAGE.write_text(f"{script.BEGIN}{script.END}")
    monkeypatch.setattr(script.sys, "argv", ["architecture.py"])
    assert script.main() == 1
    err = capsys.readouterr().err
    assert "more than 10" in err and "hp-b/README.md has no place for what docs/architecture.py writes" in err
