"""Print the packages whose tests a change can break: those with changed files, and those that depend on them.

    python .ci/affected.py            what changed since the branch left the main one, with what is not committed
    python .ci/affected.py REVISION   since that revision

The nox session `affected` runs their tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAIN = ("origin/main", "main", "origin/master", "master")
UNTESTED = re.compile(
    r"packages/[^/]+/(CHANGELOG\.md|LICENSE|api\.txt)|docs/[^/]+\.md|(CONTRIBUTING|SECURITY)\.md|LICENSE|CITATION\.cff"
    r"|mkdocs\.yml|\.[^/]+"
)
"""Files that no test reads."""
OWN = re.compile(r"packages/[^/]+/(tests|benchmarks)/.*")
"""Files that matter to their own package alone."""
PROGRAMS = re.compile(r"(docs|examples|programs|\.ci)/.*|README\.md")
"""Files outside of the packages that tests of the topmost package read."""
TOPMOST = "hyper-parallel"


def affected(changed: Iterable[str], needs: Mapping[str, set[str]]) -> list[str]:
    """Choose the packages to test.

    Args:
        changed: paths of files, from the root. One that is neither of a package nor known to be read by a few
            tests or none, such as noxfile.py, pyproject.toml or constraints.txt, is taken to affect every package.
        needs: by package, the packages that it depends on.

    Returns:
        Their names, sorted.
    """
    found: set[str] = set()
    for path in changed:
        package = path.split("/")[1] if path.startswith("packages/") else None
        if UNTESTED.fullmatch(path):
            continue
        if PROGRAMS.fullmatch(path):
            found.add(TOPMOST)
        elif package not in needs:  # a folder that is a package no more, or no folder of one
            return sorted(needs)
        else:
            found |= {package} if OWN.fullmatch(path) else above(package, needs)
    return sorted(found)


def above(package: str, needs: Mapping[str, set[str]]) -> set[str]:
    """Get the package and all that depend on it, however far."""
    found = {package}
    while more := {name for name, needed in needs.items() if needed & found} - found:
        found |= more
    return found


def read_needs(root: Path) -> dict[str, set[str]]:
    """Read which of this repository's packages each one depends on, the test extra included."""
    projects = {path.parent.name: tomllib.loads(path.read_text()) for path in root.glob("packages/*/pyproject.toml")}
    needs = {}
    for name, tables in projects.items():
        project = tables["project"]
        lines = [*project.get("dependencies", []), *project.get("optional-dependencies", {}).get("test", [])]
        needs[name] = {re.split(r"[^\w-]", line)[0] for line in lines} & projects.keys() - {name}
    return needs


def changed_files(revision: str | None) -> list[str]:
    """List the files that differ from a revision, those unknown to git included."""
    base = revision or merge_base()
    names = git("diff", "--name-only", "--no-renames", "-z", base)
    return [*filter(None, (names + git("ls-files", "--others", "--exclude-standard", "-z")).split("\0"))]


def merge_base() -> str:
    """Find where this branch left the main one."""
    known = git("for-each-ref", "--format=%(refname:short)").split()
    for name in MAIN:
        if name in known:
            return git("merge-base", "HEAD", name).strip()
    sys.exit(f"no branch is named {', '.join(MAIN)}: name the revision to compare with, nox -s affected -- REVISION")


def git(*arguments: str) -> str:
    """Run git in the repository; what it printed."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    print("\n".join(affected(changed_files(*sys.argv[1:2] or [None]), read_needs(ROOT))))
