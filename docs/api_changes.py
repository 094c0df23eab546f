"""Compare the public names and signatures of every package with those of an earlier revision.

    python docs/api_changes.py             since the last tag before the present commit
    python docs/api_changes.py REVISION    since that revision

Prints what breaks callers: names and parameters that are gone, that changed their kind, their place or their default.
Fails where a package breaks its callers under a version that does not say so: a new minor version before 1.0, a new
major one from then on. Public is what a package's `__all__` names. Sources are read, not imported (griffe). The nox
session `release` runs this.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

import griffe
from packaging.version import Version
from public_api import load_packages

ROOT = Path(__file__).resolve().parents[1]


PARTS = re.compile(r"hp_|hyper_parallel\.")
"""What the modules of this repository's packages are called."""


def main(root: Path, revision: str | None = None) -> int:
    """Print what breaks callers of the packages in a checkout; 1 where a version has to change first.

    Args:
        root: the checkout.
        revision: what to compare with. Default: the last tag before the present commit.
    """
    revision = revision or last_release(root)
    if revision is None:
        print("no earlier release to compare with: no tag before the present commit, and no revision was named")
        return 0
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder)
        with tarfile.open(fileobj=io.BytesIO(git(root, "archive", revision, "packages"))) as archive:
            archive.extractall(before, filter="data")
        old, new = load_packages(before), load_packages(root)
        for name in sorted(old.keys() & new.keys()):
            changes = breaking_changes(old[name], new[name])
            versions = [read_version(each / "packages" / name) for each in (before, root)]
            if changes:
                print(f"{name} {versions[0]} -> {versions[1]} breaks callers of {revision}:", *changes, sep="\n    ")
            if changes and versions[1] < next_breaking(versions[0]):
                failed.append(f"{name} has to be {next_breaking(versions[0])} or later")
    print(f"public names compared with {revision}: {'; '.join(failed) or 'every version allows for its changes'}")
    return 1 if failed else 0


def breaking_changes(old: griffe.Module, new: griffe.Module) -> list[str]:
    """List what a caller of a package's public names may have to change, a line each."""
    kept = public_names(old) & public_names(new)
    changes = [f"`{name}`: no longer public" for name in sorted(public_names(old) - kept)]
    for name, member in old.members.items():
        member.public = name in kept  # for griffe, modules are public too
    found = griffe.find_breaking_changes(old, new)
    return changes + [change.explain(griffe.ExplanationStyle.MARKDOWN).removeprefix("- ") for change in found]


def public_names(package: griffe.Module) -> set[str]:
    """Get the names of `__all__`, or what a package that computes it imports of these packages."""
    if package.exports:
        return {str(name) for name in package.exports}
    aliases = (member for member in package.members.values() if isinstance(member, griffe.Alias))
    return {alias.name for alias in aliases if PARTS.match(alias.target_path)}


def next_breaking(version: Version) -> Version:
    """Get the lowest version that may break callers of another: 0.3.0 after 0.2.1, 3.0.0 after 2.4.0."""
    return Version(f"{version.major + 1}.0.0" if version.major else f"0.{version.minor + 1}.0")


def read_version(package: Path) -> Version:
    """Read the version of the package in a folder."""
    return Version(tomllib.loads((package / "pyproject.toml").read_text("utf-8"))["project"]["version"])


def last_release(root: Path) -> str | None:
    """Find the newest tag that the present commit descends from."""
    listed = git(root, "tag", "--merged", "HEAD", "--no-contains", "HEAD", "--sort=-creatordate").decode()
    return listed.split("\n")[0] or None


def git(root: Path, *arguments: str) -> bytes:
    """Run git in a checkout; what it printed."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(ROOT, *sys.argv[1:2]))
