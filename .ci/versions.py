"""Check what a release says of itself: each package's version, its CHANGELOG.md and the links of its README.md.

    python .ci/versions.py

The newest section of a changelog has to name the version in pyproject.toml, `## 0.2.0` or `## 0.2.0 (unreleased)`, or
none yet, `## Unreleased`, and to say something. A package index shows the README without the repository around it, so
its links have to be whole addresses. The nox sessions `lint` and `release` run this.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"^## (?P<title>.*)\n(?P<text>(?:(?!## ).*\n?)*)", re.MULTILINE)
"""A section of a changelog, to the next heading of its kind."""
CODE = re.compile(r"^```.*?^```|^    .*?$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#)([^)\s]+)\)")
"""A link that is relative to the page."""


def main() -> int:
    """Print what is wrong with any package, or that nothing is."""
    packages = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
    wrong = [f"{package.name}: {problem}" for package in packages for problem in problems(package)]
    print("\n".join(wrong) or f"{len(packages)} packages: versions and changelogs agree")
    return 1 if wrong else 0


def problems(package: Path) -> list[str]:
    """List what is wrong with the package in a folder, each with what to do."""
    version = read_version(package)
    changelog = package / "CHANGELOG.md"
    found = check_changelog(changelog.read_text("utf-8"), version) if changelog.exists() else ["it has no CHANGELOG.md"]
    links = LINK.findall(CODE.sub("", (package / "README.md").read_text("utf-8")))
    return found + [f"README.md links to {link}, which an index lacks: write the whole address" for link in links]


def read_version(package: Path) -> str:
    """Read the version of the package in a folder."""
    return tomllib.loads((package / "pyproject.toml").read_text("utf-8"))["project"]["version"]


def check_changelog(text: str, version: str) -> list[str]:
    """List what is wrong with a changelog whose package has a version; at most one thing."""
    newest = SECTION.search(text)
    if newest is None:
        return [f"CHANGELOG.md has no section: begin one with '## {version}'"]
    title = newest["title"].strip()
    if title.lower() != "unreleased" and title.removesuffix("(unreleased)").strip() != version:
        return [
            f"pyproject.toml has version {version}, the newest section of CHANGELOG.md is '{title}': "
            f"begin a section '## {version}', or set the version"
        ]
    if not newest["text"].strip():
        return [f"the section '{title}' of CHANGELOG.md is empty: say what a user can notice"]
    return []


if __name__ == "__main__":
    sys.exit(main())
