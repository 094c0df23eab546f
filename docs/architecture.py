"""Draw the packages and their imports of each other in docs/architecture.md.

python docs/architecture.py            writes the picture and the table anew
python docs/architecture.py --check    fails where they are not what the sources import
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping

import structure

PAGE = structure.ROOT / "docs/architecture.md"
BEGIN, END = "<!-- from here: docs/architecture.py -->\n", "<!-- up to here -->\n"


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


def main() -> int:
    """Write the page, or compare it; return the exit status."""
    page = PAGE.read_text("utf-8")
    pattern = re.compile(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", re.DOTALL)
    made = pattern.sub(lambda _: "\n" + generated() + "\n", page)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(made, "utf-8")
    elif made != page:
        print(f"{PAGE} is not what the sources import: python docs/architecture.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
