"""Links between the pages of the repository lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *ROOT.glob("examples/**/*.md"),
]
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|md|toml))`")
_LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get where it is shown."""
    headings = re.findall(r"^#+ (.*)$", _CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    found = []
    for link in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


def missing(page: Path) -> list[str]:
    """The files of the repository that a page names and that are not there: from the root, a package or its sources."""
    named = dict.fromkeys(_PATH.findall(page.read_text(encoding="utf-8")))
    roots = [ROOT, *ROOT.glob("packages/*"), *ROOT.glob("packages/*/src")]
    return [path for path in named if not any((root / path).is_file() for root in roots)]


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/writing-a-rule.md"])
def test_files_that_a_page_names_are_there(name):
    assert len(_PATH.findall((ROOT / name).read_text(encoding="utf-8"))) > 10
    assert missing(ROOT / name) == []


def test_a_file_that_is_not_there_is_found(tmp_path):
    (tmp_path / "a.md").write_text("`hp_dtensor/port.py` `docs/glossary.md` `torch/no.py` `<package>/a/no.py` `no.py`")
    assert missing(tmp_path / "a.md") == ["torch/no.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "a.md").write_text(
        "# One `two`\n[b](b.md) [c](c.md#none) [d](#one-two) [e](https://e.org)\n```\n[f](f)\n```\n"
    )
    (tmp_path / "c.md").write_text("# Some\n")
    assert broken(tmp_path / "a.md") == ["b.md", "c.md#none"]
