"""Write or compare docs/plan.md, the list of a plan's keys.

    python docs/plan_keys.py            writes the page
    python docs/plan_keys.py --check    fails where the page is not what the sections say

Sections are read, not imported: the dataclasses of hp-plan, their annotations, defaults and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "packages/hp-plan/src/hp_plan"
PAGE = ROOT / "docs/plan.md"
HEAD = """# The keys of a plan

Written by `python docs/plan_keys.py` from the sections of hp-plan; do not edit it. `hyper-parallel schema` prints the
same for editors, `hyper-parallel show plan.toml` a plan's values and where each comes from.

A key that no section has, a value of another type or out of range, and a value that nothing of the plan would read are
errors. A default of none is a key that is left out. `styles`, before the first section, is `"auto"`: the model's own
tensor parallel table, or the attribute `tp_plan` of [your own](learn/own-model.md), `"auto-sequence"`: that with
sequence parallelism, or a table `[styles]` of pattern = style.
"""
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)
_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "true or false", "None": ""}


def main() -> int:
    """Write or compare the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    check, text = parser.parse_args().check, page()
    if not check:
        PAGE.write_text(text, "utf-8")
    elif not PAGE.exists() or PAGE.read_text("utf-8") != text:
        print("docs/plan.md is not what the sections say: run python docs/plan_keys.py")
        return 1
    return 0


def page() -> str:
    """Return the page."""
    classes = {
        node.name: node
        for path in sorted((SOURCES / "sections").glob("*.py"))
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    sections: list[str] = []
    for name, kind in _names().items():
        sections.append(_section(f"## [{name}]", classes[kind]))
        sections += [_section(f"### [[{name}.{key}]]", classes[inner]) for key, inner in _inner(classes, kind)]
    return f"{HEAD}\n" + "\n".join(sections)


def _inner(classes: Mapping[str, ast.ClassDef], kind: str) -> Iterator[tuple[str, str]]:
    """List the keys of a section that are lists of tables, and the tables' class."""
    for field in classes[kind].body:
        if isinstance(field, ast.AnnAssign):
            names = {node.id for node in ast.walk(field.annotation) if isinstance(node, ast.Name)}
            yield from ((ast.unparse(field.target), each) for each in sorted(names & classes.keys()))


def _names() -> Mapping[str, str]:
    """Return the class of each section by its name, in the order of hp-plan."""
    for node in ast.parse((SOURCES / "plan.py").read_text("utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "SECTIONS":
            assert isinstance(node.value, ast.Dict)
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {ast.literal_eval(key): ast.unparse(value) for key, value in pairs if key is not None}
    raise SystemExit("hp_plan/plan.py has no SECTIONS")


def _section(title: str, node: ast.ClassDef) -> str:
    text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
    about, _, listed = text.partition("\n\nAttributes:\n")
    described = {key: " ".join(words.split()) for key, words in _ATTRIBUTE.findall(listed)}
    rows = [f"| `{key}` | {kind} | {default} | {_cell(described[key])} |" for key, kind, default in _fields(node)]
    head = "| key | type | default | meaning |\n| --- | --- | --- | --- |"
    return f"{title}\n\n{' '.join(about.split())}\n\n{head}\n" + "\n".join(rows) + "\n"


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """List name, type with bounds, and default of each field."""
    for field in node.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        default, bounds = field.value, ""
        if isinstance(default, ast.Call):
            name, numbers = ast.unparse(default.func), [ast.unparse(each) for each in default.args[:-1]]
            bounds = {
                "at_least": "at least {}",
                "more_than": "more than {}",
                "within": "at least {}, less than {}",
                "each_within": "at least {}, less than {}",
            }.get(name, "")
            bounds = bounds.format(*numbers)
            default = default.args[-1] if bounds else ast.Dict([], [])
        assert default is not None
        kind = _kind(field.annotation)
        yield ast.unparse(field.target), _cell(f"{kind}; {bounds}" if bounds else kind), _default(default)


def _default(node: ast.expr) -> str:
    value = ast.literal_eval(node)
    if value is None or value in ((), {}):
        return "none"
    text = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    shown = list(value) if isinstance(value, tuple) else f'"{value}"' if isinstance(value, str) else value
    return f"`{text or shown}`"


def _kind(node: ast.expr) -> str:
    """Say a type hint in words."""
    if isinstance(node, ast.BinOp):
        return " or ".join(filter(None, (_kind(node.left), _kind(node.right))))
    if isinstance(node, ast.Subscript):
        origin = ast.unparse(node.value)
        inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        if origin == "Literal":
            return "one of " + ", ".join(f'`"{ast.literal_eval(each)}"`' for each in inner)
        if origin == "tuple":
            several = isinstance(inner[-1], ast.Constant) and inner[-1].value is Ellipsis
            return f"list of {'' if several else f'{len(inner)} '}{_plural(_kind(inner[0]))}"
        return "table"
    return _WORDS.get(ast.unparse(node), "table")


def _plural(kind: str) -> str:
    return kind.replace("one of ", "") if kind.startswith("one of") else f"{kind}s"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
