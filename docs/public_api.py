"""Write or compare each package's list of public names and signatures, `packages/*/api.txt`.

    python docs/public_api.py            writes the lists
    python docs/public_api.py --check    fails where a list is not what the sources say, with the difference

A change of a public signature then shows in review as a change of a list. Sources are read, not imported (griffe).
Names of a framework's folder are those of PyTorch.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
UMBRELLA = "hyper-parallel"
"""Exports the names of the others."""
STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}


def main() -> int:
    """Write or compare all lists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    check = parser.parse_args().check
    packages = load_packages(ROOT)
    status = 0
    for name, package in packages.items():
        if name == UMBRELLA:
            continue
        target = ROOT / "packages" / name / "api.txt"
        text = "".join(f"{line}\n" for line in listing(package))
        if not check:
            target.write_text(text, "utf-8")
            continue
        before = target.read_text("utf-8") if target.exists() else ""
        if before != text:
            where = target.relative_to(ROOT).as_posix()
            difference = difflib.unified_diff(before.splitlines(), text.splitlines(), where, "the sources", lineterm="")
            print("\n".join(difference))
            status = 1
    if status:
        print("the public API has changed: run python docs/public_api.py, and name the change in a CHANGELOG.md")
    return status


def load_packages(root: Path) -> dict[str, griffe.Module]:
    """Read the sources of every package of a checkout; by name of the distribution, sorted."""
    names = sorted(path.parent.name for path in root.glob("packages/*/src"))
    loader = griffe.GriffeLoader(search_paths=[str(root / "packages" / name / "src") for name in names])
    modules = {name: loader.load(name.replace("-", "_")) for name in names}
    loader.resolve_aliases(implicit=True, external=False)
    return modules


def listing(package: griffe.Object) -> Iterator[str]:
    """List a package's public names in order, functions and methods with their signatures."""
    if not package.exports:
        raise SystemExit(f"{package.path} has no __all__")
    for name in sorted(str(export) for export in package.exports):
        member = package.members.get(name)
        if member is None:
            yield f"{name}"
            continue
        yield from _lines(name, member)


def _lines(name: str, member: griffe.Object | griffe.Alias) -> Iterator[str]:
    try:
        target = member.final_target if isinstance(member, griffe.Alias) else member
    except griffe.AliasResolutionError:
        yield name
        return
    if target.is_function:
        yield f"{name}{_signature(target)}"
    elif target.is_class:
        bases = ", ".join(str(base).rpartition(".")[2] for base in target.bases)
        yield f"class {name}({bases})" if bases else f"class {name}"
        for child, value in sorted({**_of_private_bases(target), **target.members}.items()):
            if not _is_public(child) or isinstance(value, griffe.Alias):
                continue
            if value.is_function:
                yield f"    {child}{_signature(value)}"
            elif value.is_attribute:
                yield f"    {child}"
    else:
        yield name


def _of_private_bases(cls: griffe.Class) -> dict[str, griffe.Object | griffe.Alias]:
    """Find what a class has of bases in this repository that are no public names themselves."""
    bases = [base for base in reversed(cls.mro()) if not base.package.exports or base.name not in base.package.exports]
    return {name: value for base in bases for name, value in base.members.items()}


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__call__", "__enter__", "__getitem__")


def _signature(function: griffe.Function) -> str:
    parts: list[str] = []
    for parameter in function.parameters:
        if parameter.kind is griffe.ParameterKind.keyword_only and not any(part.startswith("*") for part in parts):
            parts.append("*")
        stars = STARS.get(parameter.kind)
        if stars is not None:
            parts.append(stars + parameter.name.lstrip("*"))
        else:
            parts.append(parameter.name + (f"={parameter.default}" if parameter.default is not None else ""))
    return f"({', '.join(parts)})"


if __name__ == "__main__":
    sys.exit(main())
