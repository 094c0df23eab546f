"""Draw the packages and their imports in docs/architecture.md, and the map of each package in its README.

python docs/architecture.py            writes the picture, the table and the maps anew
python docs/architecture.py --check    fails where they are not what the sources say, or a folder has too many entries

A map has a line for each module: its name, and the first line of its docstring. Modules that every package has (`port`,
`extend`, the frameworks' folders) don't count as entries of a folder.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import structure

PAGE = structure.ROOT / "docs/architecture.md"
BEGIN, END = "<!-- from here: docs/architecture.py -->\n", "<!-- up to here -->\n"
MOST_ENTRIES = 10
EVERYWHERE = {"__init__.py", "__main__.py", "extend.py", "port.py", "torch", "mindspore", "__pycache__", "py.typed"}


def doors(modules: Mapping[str, structure.Module]) -> dict[tuple[str, str], set[str]]:
    """Find by which doors each package imports another: "names", or "extend" for its `extend` modules."""
    found: dict[tuple[str, str], set[str]] = {}
    for module in modules.values():
        for name in module.imports:
            other = modules[name].package
            if other != module.package:
                door = "extend" if name.split(".")[-1] == "extend" else "names"
                found.setdefault((module.package, other), set()).add(door)
    return found


def draw(modules: Mapping[str, structure.Module]) -> Iterator[str]:
    """Write the picture as Mermaid's text; an arrow goes from the package that imports."""
    yield "```mermaid"
    yield "flowchart TD"
    for package in sorted({module.package for module in modules.values()}):
        wings = {module.wing for module in modules.values() if module.package == package}
        rooms = " | ".join(wing for wing in structure.WINGS if wing in wings)
        yield f'    {package}["<b>{package}</b><br/>{rooms}"]'
    for (package, other), used in sorted(doors(modules).items()):
        arrow = "-.->" if package == "hp_testing" else "==>" if "extend" in used else "-->"
        yield f"    {package} {arrow} {other}"
    yield "```"


def tabulate(modules: Mapping[str, structure.Module], about: Mapping[str, str]) -> Iterator[str]:
    """Write a line for each package: what it is, and what it imports by which door."""
    yield "| package | what it is | public names of | `extend` modules of |"
    yield "| --- | --- | --- | --- |"
    used = doors(modules)
    for package in sorted({module.package for module in modules.values()}):
        cells = [
            ", ".join(sorted(other for (own, other), by in used.items() if own == package and door in by))
            for door in ("names", "extend")
        ]
        yield f"| {package} | {about.get(package, '')} | {' | '.join(cells)} |"


def generated() -> str:
    """Make the part of the page that is from the sources."""
    modules = structure.read(structure.ROOT)
    about = {}
    for path in structure.ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        about[project["name"].replace("-", "_")] = project["description"]
    return "\n".join([*draw(modules), "", *tabulate(modules, about), ""])


def clause(path: Path) -> str:
    """Get the first paragraph of a module's docstring, up to its first full stop."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?: |$)", paragraph)[0].replace("|", "\\|")


def chart(folder: Path) -> Iterator[str]:
    """Write the map of a package: its folders, and the modules in each."""
    yield "| module | what it is |"
    yield "| --- | --- |"
    for inner in [folder, *sorted(path.parent for path in folder.rglob("__init__.py") if path.parent != folder)]:
        name = "/".join(inner.relative_to(folder).parts)
        if name:
            yield f"| **{name}/** | {clause(inner / '__init__.py')} |"
        for path in sorted(inner.glob("*.py")):
            if path.name != "__init__.py":
                yield f"| {name + '/' if name else ''}{path.stem} | {clause(path)} |"


def crowded() -> Iterator[str]:
    """Find folders that have more entries side by side than a reader takes in."""
    for folder in sorted({path.parent for path in structure.ROOT.glob("packages/*/src/**/*.py")}):
        entries = {path.name for path in folder.iterdir()} - EVERYWHERE
        if len(entries) > MOST_ENTRIES:
            yield f"{folder.relative_to(structure.ROOT)} has {len(entries)} entries, more than {MOST_ENTRIES}"


def pages() -> Iterator[tuple[Path, str]]:
    """Make each page whose part is from the sources."""
    yield PAGE, generated()
    for readme in sorted(structure.ROOT.glob("packages/*/README.md")):
        package = readme.parent.name.replace("-", "_")
        yield readme, "\n".join([*chart(readme.parent / "src" / package), ""])


def main() -> int:
    """Write the pages, or compare them; return the exit status."""
    pattern = re.compile(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", re.DOTALL)
    wrong = list(crowded())
    for path, part in pages():
        page = path.read_text("utf-8")
        made = pattern.sub(lambda _, part=part: "\n" + part + "\n", page)
        if "--check" not in sys.argv[1:]:
            path.write_text(made, "utf-8")
        elif made != page:
            wrong.append(f"{path} is not what the sources say: python docs/architecture.py")
        if BEGIN not in page:
            wrong.append(f"{path} has no place for what docs/architecture.py writes")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
