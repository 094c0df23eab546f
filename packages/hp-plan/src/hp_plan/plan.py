"""The plan: what a model is, where it runs and how it is trained, as one value."""

from __future__ import annotations

import inspect
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from os import PathLike
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hp_plan.reading.diagnostics import Diagnostic, PlanError, near_misses
from hp_plan.reading.tables import read_section, sections_named, table_of
from hp_plan.sections import (
    AdapterSection,
    CommunicationSection,
    CompileSection,
    ContextSection,
    DataSection,
    ExpertsSection,
    FsdpSection,
    MemorySection,
    MeshSection,
    MetricsSection,
    ModelSection,
    MonitorSection,
    ObjectiveSection,
    OptimizerSection,
    PipelineSection,
    PrecisionSection,
    ProfileSection,
    RecoverySection,
    RunSection,
    ScheduleSection,
    SdcSection,
    ValidationSection,
)
from hp_platform import get_platform
from hp_styles.extend import chunks_of

SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "adapter": AdapterSection,
    "mesh": MeshSection,
    "communication": CommunicationSection,
    "context": ContextSection,
    "pipeline": PipelineSection,
    "fsdp": FsdpSection,
    "precision": PrecisionSection,
    "experts": ExpertsSection,
    "objective": ObjectiveSection,
    "optimizer": OptimizerSection,
    "schedule": ScheduleSection,
    "data": DataSection,
    "run": RunSection,
    "recovery": RecoverySection,
    "memory": MemorySection,
    "compile": CompileSection,
    "metrics": MetricsSection,
    "validation": ValidationSection,
    "profile": ProfileSection,
    "monitor": MonitorSection,
    "sdc": SdcSection,
}
_SECTION_SYNONYMS = {
    **dict.fromkeys(("lora", "peft"), "adapter"),
    **dict.fromkeys(("dpo", "loss", "reward"), "objective"),
    **dict.fromkeys(("parallel", "parallelism", "dist"), "mesh"),
    **dict.fromkeys(("train", "training", "trainer"), "run"),
    **dict.fromkeys(("dataset", "tokenizer"), "data"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "schedule"),
    **dict.fromkeys(("eval", "evaluation"), "validation"),
    **dict.fromkeys(("recompute", "offload"), "memory"),
    **dict.fromkeys(("watch", "readings"), "monitor"),
    **dict.fromkeys(("fp8", "float8", "quantize", "quantization"), "precision"),
    **dict.fromkeys(("corruption", "replay", "replicas"), "sdc"),
}
AUTOMATIC_STYLES = ("auto", "auto-sequence")


@dataclass(frozen=True)
class ParallelPlan:
    """Declaration of how a model is trained on many ranks.

    The same content is a TOML file: one table a section.

        plan = ParallelPlan.from_toml("qwen3.toml")
        plan == ParallelPlan.from_dict(plan.to_dict())   # True

    Attributes:
        model: the model.
        adapter: what is trained in place of the model's weights.
        mesh: the number of ranks on each axis.
        styles: tensor parallel styles by module name pattern (`{"model.layers.*.mlp.down_proj": "rowwise"}`; each
            `*` stays inside one dotted part), or `"auto"`: the model's own table, or `"auto-sequence"`: that with
            sequence parallel between the blocks.
        communication: what collectives go through, how gradients travel between hosts, and what goes on under products.
        context: how attention is spread over the axis `cp`.
        pipeline: the stages of the ranks on the axis `pp`, and their schedule.
        fsdp: the modules that are sharded together, and options.
        precision: the products in eight bits.
        experts: how tokens come to experts that are spread over `ep`.
        objective: the loss that training makes smaller.
        optimizer: the optimizer.
        schedule: its learning rate over time.
        data: the training text.
        run: length, seed, dtype.
        recovery: how a run goes on when a process is lost.
        memory: a rank's budget.
        compile: which blocks are compiled.
        metrics: where they go.
        validation: data for it, and how often.
        profile: which steps are profiled.
        monitor: what is read of tensors in training.
        sdc: what looks for silent data corruption.

    Raises:
        PlanError: a value has the wrong type or is out of range; it has all diagnostics.
    """

    model: ModelSection = field(default_factory=ModelSection)
    adapter: AdapterSection = field(default_factory=AdapterSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    styles: str | Mapping[str, str] = "auto"
    communication: CommunicationSection = field(default_factory=CommunicationSection)
    context: ContextSection = field(default_factory=ContextSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    fsdp: FsdpSection = field(default_factory=FsdpSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    experts: ExpertsSection = field(default_factory=ExpertsSection)
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    data: DataSection = field(default_factory=DataSection)
    run: RunSection = field(default_factory=RunSection)
    recovery: RecoverySection = field(default_factory=RecoverySection)
    memory: MemorySection = field(default_factory=MemorySection)
    compile: CompileSection = field(default_factory=CompileSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    profile: ProfileSection = field(default_factory=ProfileSection)
    monitor: MonitorSection = field(default_factory=MonitorSection)
    sdc: SdcSection = field(default_factory=SdcSection)

    def __post_init__(self) -> None:
        diagnostics: list[Diagnostic] = []
        for name, section in SECTIONS.items():
            value = getattr(self, name)
            if not isinstance(value, section):
                message = f"got {value!r}, expected a {section.__name__}"
                diagnostics.append(Diagnostic(name, message, "use ParallelPlan.from_dict for nested dictionaries"))
                continue
            read, errors = read_section(section, _table(value), key=name, elsewhere={})
            diagnostics += errors
            object.__setattr__(self, name, read)
        diagnostics += _check_style(self.styles)
        if diagnostics:
            raise PlanError(diagnostics)

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> ParallelPlan:
        """Read a TOML file.

        Raises:
            PlanError: it is not TOML, has unknown keys or wrong types; it has all diagnostics.
            OSError: it can't be read.
        """
        plan, diagnostics = read_plan(read_toml(path))
        if diagnostics:
            raise PlanError(diagnostics, source=str(path))
        return plan

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> ParallelPlan:
        """Read nested dictionaries; raise `PlanError` with every unknown key and wrong type."""
        plan, diagnostics = read_plan(tables)
        if diagnostics:
            raise PlanError(diagnostics)
        return plan

    def to_dict(self) -> dict[str, Any]:
        """Return nested dictionaries that `from_dict` reads back to an equal plan; keys that are None are left out."""
        styles = self.styles if isinstance(self.styles, str) else dict(self.styles)
        # A plain key must precede the first table in TOML.
        first = {"styles": styles} if isinstance(styles, str) else {}
        last = {} if first else {"styles": styles}
        return {**first, **{name: _table(getattr(self, name)) for name in SECTIONS}, **last}

    def to_toml(self) -> str:
        """Return the text of a TOML file that `from_toml` reads back to an equal plan."""
        import tomli_w

        try:
            return tomli_w.dumps(self.to_dict())
        except TypeError as error:
            raise PlanError(
                [
                    Diagnostic(
                        "model.overrides",
                        f"can't be written as TOML: {error}",
                        "TOML has no null: leave the key out, or keep this plan in Python",
                    )
                ]
            ) from error


def read_toml(path: str | PathLike[str]) -> dict[str, Any]:
    """Read the tables of a TOML file, unchecked."""
    with open(path, "rb") as file:
        try:
            return tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise PlanError([Diagnostic(str(path), f"is not TOML: {error}", "correct that line")]) from error


def read_plan(tables: Mapping[str, Any]) -> tuple[ParallelPlan, list[Diagnostic]]:
    """Read the plan that `tables` declares as far as possible, and return it with all diagnostics."""
    elsewhere: dict[str, list[str]] = {}
    for name, section in SECTIONS.items():
        for item in fields(section):
            elsewhere.setdefault(item.name, []).append(name)
    diagnostics: list[Diagnostic] = []
    values: dict[str, Any] = {}
    for key, table in tables.items():
        if key == "styles":
            errors = _check_style(table)
            diagnostics += errors
            if not errors:
                values[key] = table if isinstance(table, str) else dict(table)
        elif key in SECTIONS:
            values[key], errors = read_section(SECTIONS[key], table, key=key, elsewhere=elsewhere)
            diagnostics += errors
        elif key in elsewhere:
            message = f"'{key}' stands outside every section"
            diagnostics.append(
                Diagnostic(key, message, f"it belongs to {sections_named(elsewhere[key])}: move it there")
            )
        else:
            message = f"there is no section or key '{key}'"
            meant = _SECTION_SYNONYMS.get(key)
            fix = near_misses(key, ["styles", *SECTIONS]) if meant is None else f"did you mean [{meant}]?"
            diagnostics.append(Diagnostic(key, message, fix))
    return ParallelPlan(**values), diagnostics


def _check_style(styles: Any) -> list[Diagnostic]:
    if isinstance(styles, str):
        if styles in AUTOMATIC_STYLES:
            return []
        message = f"got {styles!r}, expected 'auto', 'auto-sequence' or a table of pattern = style"
        return [Diagnostic("styles", message, near_misses(styles, AUTOMATIC_STYLES))]
    if not isinstance(styles, Mapping):
        message = f"got {styles!r}, expected 'auto', 'auto-sequence' or a table of pattern = style"
        return [Diagnostic("styles", message, "write 'auto' to take the model's own table")]
    return [
        Diagnostic(f'styles."{pattern}"', f"got {style!r}, expected a style's name", "name a style such as 'colwise'")
        for pattern, style in styles.items()
        if not isinstance(pattern, str) or not isinstance(style, str)
    ]


def _table(section: Any) -> dict[str, Any]:
    assert is_dataclass(section)
    values = {item.name: plain(getattr(section, item.name)) for item in fields(section)}
    return {name: value for name, value in values.items() if value is not None}


def plain(value: Any) -> Any:
    """Return a value of a plan as a file has it: tuples as lists, values with keys as tables."""
    if is_dataclass(value):
        return _table(value)
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def context_tokens(plan: ParallelPlan) -> list[int]:
    """List the places in a sample of this rank's tokens, in the order in which it has them."""
    return tokens_at(plan, plan.mesh.coordinate(get_platform().groups.rank()).get("cp", 0))


def tokens_at(plan: ParallelPlan, place: int) -> list[int]:
    """List the places in a sample of the tokens of a rank with this number on `cp`, in its order."""
    size, length = plan.mesh.cp, plan.data.sequence_length
    chunks = chunks_of(place, size, _balanced(plan))
    width = length // (2 * size if _balanced(plan) else size)
    return [place for chunk in chunks for place in range(chunk * width, (chunk + 1) * width)]


def _balanced(plan: ParallelPlan) -> bool:
    return plan.context.load_balance and plan.mesh.cp > 1


def data_parallel_rows(plan: ParallelPlan) -> slice:
    """Return this rank's slice of the global batch; ranks that differ only on other axes share one."""
    part, count = data_parallel_place(plan), plan.data.batch_size // plan.mesh.data_parallel
    return slice(part * count, (part + 1) * count)


def data_parallel_place(plan: ParallelPlan) -> int:
    """Return the number of this rank's part of the global batch."""
    place = plan.mesh.coordinate(get_platform().groups.rank())
    return place.get("dp_replicate", 0) * plan.mesh.dp_shard + place.get("dp_shard", 0)


_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12): sections, keys, types, bounds, defaults and what each key means."""
    described = _attributes(ParallelPlan)
    styles = {
        "description": described["styles"],
        "anyOf": [{"enum": list(AUTOMATIC_STYLES)}, {"type": "object", "additionalProperties": {"type": "string"}}],
    }
    sections = {name: {"description": described[name], **_section(section)} for name, section in SECTIONS.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A plan of hyper-parallel",
        "type": "object",
        "additionalProperties": False,
        "properties": {"styles": styles, **sections},
    }


def _section(section: type) -> dict[str, Any]:
    hints, described = get_type_hints(section), _attributes(section)
    properties = {
        item.name: {"description": described[item.name], **_typed(hints[item.name], item), **_default(item)}
        for item in fields(section)
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _default(item: Field[Any]) -> dict[str, Any]:
    if item.default is MISSING or item.default is None:
        return {}
    return {"default": plain(item.default)}


def _typed(hint: Any, item: Field[Any]) -> dict[str, Any]:
    """Return the schema of a type hint, with the bounds of its field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        options = [_typed(option, item) for option in arguments if option is not type(None)]
        return options[0] if len(options) == 1 else {"anyOf": options}
    if origin is Literal:
        return {"enum": list(arguments)}
    inner = table_of(hint)
    if inner is not None:
        return {"type": "array", "items": _section(inner)}
    if origin is tuple:
        length = {} if arguments[-1] is Ellipsis else {"minItems": len(arguments), "maxItems": len(arguments)}
        return {"type": "array", "items": _typed(arguments[0], item), **length}
    if hint not in _NAMES:
        assert issubclass(origin, Mapping), hint
        return {"type": "object"}
    names = {"minimum": "minimum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}
    numeric = hint in (int, float)
    bounds = {names[key]: bound for key, bound in item.metadata.items()} if numeric else {}
    return {"type": _NAMES[hint], **bounds}


def _attributes(section: type) -> dict[str, str]:
    """Return what a dataclass's docstring says of each attribute."""
    text = inspect.getdoc(section) or ""
    listed = text.partition("Attributes:\n")[2].partition("\nRaises:")[0]
    return {name: " ".join(words.split()) for name, words in _ATTRIBUTE.findall(listed)}
