"""The plan: what a model is, where it runs and how it is trained, as one value."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from os import PathLike
from typing import Any

from hp_plan.diagnostics import Finding, PlanError, near_misses
from hp_plan.schema import read_section
from hp_plan.sections import (
    DataSection,
    FsdpSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    RunSection,
    ScheduleSection,
)
from hp_platform import get_platform

SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "mesh": MeshSection,
    "fsdp": FsdpSection,
    "optimizer": OptimizerSection,
    "schedule": ScheduleSection,
    "data": DataSection,
    "run": RunSection,
}
AUTOMATIC_STYLES = ("auto", "auto-sequence")


@dataclass(frozen=True)
class ParallelPlan:
    """How a model is trained on many ranks, declared.

    The same content is a TOML file: one table a section.

        plan = ParallelPlan.from_toml("qwen3.toml")
        plan == ParallelPlan.from_dict(plan.to_dict())   # True

    Attributes:
        model: which model.
        mesh: how many ranks on which axis.
        styles: tensor parallel styles by module name pattern (`{"model.layers.*.mlp.down_proj": "rowwise"}`; each
            `*` stays inside one dotted part), or `"auto"`: the model's own table, or `"auto-sequence"`: that with
            sequence parallel between the blocks.
        fsdp: which modules are sharded together, and how.
        optimizer: the optimizer.
        schedule: its learning rate over time.
        data: what is trained on.
        run: length, seed, dtype.

    Raises:
        PlanError: a value has the wrong type or is out of range; all faults are in it.
    """

    model: ModelSection = field(default_factory=ModelSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    styles: str | Mapping[str, str] = "auto"
    fsdp: FsdpSection = field(default_factory=FsdpSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    data: DataSection = field(default_factory=DataSection)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        found: list[Finding] = []
        for name, section in SECTIONS.items():
            value = getattr(self, name)
            if not isinstance(value, section):
                message = f"got {value!r}, expected a {section.__name__}"
                found.append(Finding(name, message, "use ParallelPlan.from_dict for nested dictionaries"))
                continue
            read, faults = read_section(section, _table(value), key=name, elsewhere={})
            found += faults
            object.__setattr__(self, name, read)
        found += _style_faults(self.styles)
        if found:
            raise PlanError(found)

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> ParallelPlan:
        """Reads a TOML file.

        Raises:
            PlanError: it is not TOML, has unknown keys or wrong types; every fault is in it.
            OSError: it can't be read.
        """
        plan, found = read_plan(read_toml(path))
        if found:
            raise PlanError(found, source=str(path))
        return plan

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> ParallelPlan:
        """The plan of nested dictionaries; raises `PlanError` with every unknown key and wrong type."""
        plan, found = read_plan(tables)
        if found:
            raise PlanError(found)
        return plan

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionaries that `from_dict` reads back to an equal plan; keys that are None are left out."""
        styles = self.styles if isinstance(self.styles, str) else dict(self.styles)
        # A plain key must precede the first table in TOML.
        first = {"styles": styles} if isinstance(styles, str) else {}
        last = {} if first else {"styles": styles}
        return {**first, **{name: _table(getattr(self, name)) for name in SECTIONS}, **last}

    def to_toml(self) -> str:
        """The text of a TOML file that `from_toml` reads back to an equal plan."""
        import tomli_w

        try:
            return tomli_w.dumps(self.to_dict())
        except TypeError as error:
            raise PlanError(
                [
                    Finding(
                        "model.overrides",
                        f"can't be written as TOML: {error}",
                        "TOML has no null: leave the key out, or keep this plan in Python",
                    )
                ]
            ) from error


def read_toml(path: str | PathLike[str]) -> dict[str, Any]:
    """The tables of a TOML file, unchecked."""
    with open(path, "rb") as file:
        try:
            return tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise PlanError([Finding(str(path), f"is not TOML: {error}", "correct that line")]) from error


def read_plan(tables: Mapping[str, Any]) -> tuple[ParallelPlan, list[Finding]]:
    """The plan that `tables` declares as far as it can be read, and every fault found on the way."""
    elsewhere: dict[str, list[str]] = {}
    for name, section in SECTIONS.items():
        for item in fields(section):
            elsewhere.setdefault(item.name, []).append(name)
    found: list[Finding] = []
    values: dict[str, Any] = {}
    for key, table in tables.items():
        if key == "styles":
            faults = _style_faults(table)
            found += faults
            if not faults:
                values[key] = table if isinstance(table, str) else dict(table)
        elif key in SECTIONS:
            values[key], faults = read_section(SECTIONS[key], table, key=key, elsewhere=elsewhere)
            found += faults
        elif key in elsewhere:
            message = f"'{key}' stands outside every section"
            found.append(Finding(key, message, f"it belongs to [{elsewhere[key][0]}]: move it there"))
        else:
            message = f"there is no section or key '{key}'"
            found.append(Finding(key, message, near_misses(key, ["styles", *SECTIONS])))
    return ParallelPlan(**values), found


def _style_faults(styles: Any) -> list[Finding]:
    if isinstance(styles, str):
        if styles in AUTOMATIC_STYLES:
            return []
        message = f"got {styles!r}, expected 'auto', 'auto-sequence' or a table of pattern = style"
        return [Finding("styles", message, near_misses(styles, AUTOMATIC_STYLES))]
    if not isinstance(styles, Mapping):
        message = f"got {styles!r}, expected 'auto', 'auto-sequence' or a table of pattern = style"
        return [Finding("styles", message, "write 'auto' to take the model's own table")]
    return [
        Finding(f'styles."{pattern}"', f"got {style!r}, expected a style's name", "name a style such as 'colwise'")
        for pattern, style in styles.items()
        if not isinstance(pattern, str) or not isinstance(style, str)
    ]


def _table(section: Any) -> dict[str, Any]:
    assert is_dataclass(section)
    values = {item.name: getattr(section, item.name) for item in fields(section)}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value is not None
    }


def data_parallel_rows(plan: ParallelPlan) -> slice:
    """Which samples of the global batch are this rank's; tensor parallel ranks are neighbours with the same ones."""
    parts = plan.mesh.data_parallel
    count = plan.data.batch_size // parts
    part = get_platform().groups.rank() // (plan.mesh.world_size // parts)
    return slice(part * count, (part + 1) * count)
