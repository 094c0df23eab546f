"""Values from the command line in place of a plan's, and where each value of a plan comes from."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_plan.plan import SECTIONS, ParallelPlan, plain
from hp_plan.reading.diagnostics import Diagnostic, PlanError

_PART = re.compile(r"""(["'])(.*?)\1|([^."'=]+)""")


def override(tables: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return a plan's tables with values set by `key=value`.

    Args:
        tables: of the file; unchanged.
        assignments: such as `mesh.tp=4`, `run.dtype=bfloat16` or `styles."model.norm"=sequence`: a dotted key, as
            diagnostics name it, and a value as TOML writes it. Text needs no quotes.

    Raises:
        PlanError: an assignment is none.
    """
    result = copy.deepcopy(dict(tables))
    for assignment in assignments:
        keys, value = _parsed(assignment)
        table = result
        for number, key in enumerate(keys[:-1]):
            below = table.setdefault(key, {})
            if not isinstance(below, dict):
                where = ".".join(keys[: number + 1])
                if where == "styles":  # "auto", in place of which patterns are set
                    below = table[key] = {}
                else:
                    raise _refusal(assignment, f"{where} is {below!r}, not a table", f"set {where} itself")
            table = below
        table[keys[-1]] = value
    return result


@dataclass(frozen=True)
class Setting:
    """A value of a plan.

    Attributes:
        key: dotted, as diagnostics name it.
        value: what the plan has.
        origin: `default`, `file` or `command line`.
    """

    key: str
    value: Any
    origin: str


def settings(plan: ParallelPlan, tables: Mapping[str, Any], assignments: Sequence[str] = ()) -> tuple[Setting, ...]:
    """List every value of a plan, and where it comes from.

    Args:
        plan: the plan.
        tables: of its file.
        assignments: those of the command line, as `override` takes them.
    """
    set_here = {_named(_parsed(assignment)[0]) for assignment in assignments}
    listed = []
    for keys, value in _leaves(plan):
        name = _named(keys)
        from_here = any(name == key or name.startswith(f"{key}.") for key in set_here)
        origin = "command line" if from_here else "file" if _has(tables, keys) else "default"
        listed.append(Setting(name, value, origin))
    return tuple(listed)


def _leaves(plan: ParallelPlan) -> Iterator[tuple[list[str], Any]]:
    if isinstance(plan.styles, str):
        yield ["styles"], plan.styles
    else:
        yield from ((["styles", pattern], style) for pattern, style in plan.styles.items())
    for name, section in SECTIONS.items():
        for key in section.__dataclass_fields__:
            value = getattr(getattr(plan, name), key)
            if isinstance(value, Mapping):
                yield from (([name, key, inner], item) for inner, item in value.items())
            else:
                yield [name, key], plain(value)


def _has(tables: Mapping[str, Any], keys: Sequence[str]) -> bool:
    table: Any = tables
    for key in keys:
        if not isinstance(table, Mapping) or key not in table:
            return False
        table = table[key]
    return True


def _named(keys: Sequence[str]) -> str:
    """Join keys with dots; those that have dots of their own are quoted.

    >>> _named(["styles", "model.norm"])
    'styles."model.norm"'
    """
    return ".".join(key if re.fullmatch(r"[\w-]+", key) else f'"{key}"' for key in keys)


def _parsed(assignment: str) -> tuple[list[str], Any]:
    """Return the keys and the value of `key=value`.

    >>> _parsed('styles."model.norm"=sequence')
    (['styles', 'model.norm'], 'sequence')
    >>> _parsed("data.paths=['a', 'b']")
    (['data', 'paths'], ['a', 'b'])
    """
    keys, place = [], 0
    while match := _PART.match(assignment, place):
        keys.append(match[3].strip() if match[1] is None else match[2])
        place = match.end()
        if not assignment.startswith(".", place):
            break
        place += 1
    key, equals, text = assignment[:place], assignment[place : place + 1], assignment[place + 1 :].strip()
    if equals != "=" or not keys or not all(keys) or key.endswith("."):
        raise _refusal(assignment, "is no key=value", "write such as mesh.tp=4")
    try:
        return keys, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            fix = """write it as in a plan, quoted from the shell, such as --set 'data.paths=["a", "b"]'"""
            raise _refusal(assignment, f"has a value that is not TOML: {error}", fix) from error
        return keys, text


def _refusal(assignment: str, message: str, fix: str) -> PlanError:
    return PlanError([Diagnostic(f"--set {assignment}", message, fix)])
