"""Reading tables (of a TOML file, of a dictionary) into the frozen sections, with all diagnostics at once."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hp_plan.reading.diagnostics import Diagnostic, close_names, near_misses

Section = TypeVar("Section")


def read_section(
    section: type[Section], table: Any, *, key: str, elsewhere: Mapping[str, list[str]]
) -> tuple[Section, list[Diagnostic]]:
    """Build `section` from `table`; a value that is wrong is reported and keeps its default.

    Args:
        section: one of the dataclasses of `hp_plan.sections`.
        table: its value in the file.
        key: the section's name in the file.
        elsewhere: field name -> sections that know it, to say where a misplaced key belongs.
    """
    if not isinstance(table, Mapping):
        message = f"got {_describe(table)}, expected a table"
        return section(), [Diagnostic(key, message, f"write it as [{key}] with one key a line")]
    items = {item.name: item for item in fields(section)}  # pyright: ignore[reportArgumentType]
    hints = _hints(section)
    diagnostics: list[Diagnostic] = []
    values: dict[str, Any] = {}
    for name, got in table.items():
        where = f"{key}.{name}"
        if name not in items:
            diagnostics.append(_unknown(where, name, key, items, elsewhere))
            continue
        inner = table_of(hints[name])
        if inner is not None and isinstance(got, (list, tuple)):
            values[name], errors = _read_tables(inner, got, where)
            diagnostics += errors
            continue
        value, problem = _conform(got, hints[name])
        problem = problem or _bounds(value, items[name])
        if problem:
            diagnostics.append(
                Diagnostic(where, f"got {_describe(got)}, expected {problem}", _advice(got, hints[name], problem))
            )
        else:
            values[name] = value
    return section(**values), diagnostics


@cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section)


def table_of(hint: Any) -> type | None:
    """Return the dataclass of a list of tables; None of any other hint."""
    inner = get_args(hint)[0] if get_origin(hint) is tuple else None
    return inner if isinstance(inner, type) and is_dataclass(inner) else None


def _read_tables(inner: type, got: list[Any] | tuple[Any, ...], key: str) -> tuple[Any, list[Diagnostic]]:
    """Read a list of tables; one that is wrong keeps its defaults where it is."""
    read, diagnostics = [], []
    for number, table in enumerate(got):
        where = f"{key}[{number}]"
        if isinstance(table, inner):
            table = {item.name: getattr(table, item.name) for item in fields(inner)}
        if not isinstance(table, Mapping):
            fix = f"write it as [[{key}]] with one key a line"
            diagnostics.append(Diagnostic(where, f"got {_describe(table)}, expected a table", fix))
            continue
        value, errors = read_section(inner, table, key=where, elsewhere={})
        read.append(value)
        diagnostics += errors
    return tuple(read), diagnostics


# Names that other libraries give to keys of a plan.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "batch": ("batch_size",),
    "clip_grad_norm": ("grad_clip",),
    "data_parallel_size": ("dp_shard", "dp_replicate"),
    "dp": ("dp_shard", "dp_replicate"),
    "dp_size": ("dp_shard", "dp_replicate"),
    "dropout_p": ("dropout",),
    "expert_parallel_size": ("ep",),
    "fsdp": ("dp_shard",),
    "gradient_accumulation_steps": ("accumulate",),
    "gradient_checkpointing": ("recompute",),
    "learning_rate": ("lr",),
    "lora_alpha": ("alpha",),
    "lora_dropout": ("dropout",),
    "max_grad_norm": ("grad_clip",),
    "max_length": ("sequence_length",),
    "max_seq_length": ("sequence_length",),
    "max_steps": ("steps",),
    "mixed_precision": ("param_dtype",),
    "model_name_or_path": ("path",),
    "name": ("kind",),
    "num_micro_batches": ("micro_batches",),
    "pipeline_parallel_size": ("pp",),
    "precision": ("param_dtype", "dtype"),
    "r": ("rank",),
    "save_steps": ("checkpoint_every",),
    "seq_len": ("sequence_length",),
    "seq_length": ("sequence_length",),
    "target_modules": ("targets",),
    "tensor_parallel_size": ("tp",),
    "tp_size": ("tp",),
    "train_batch_size": ("batch_size",),
    "type": ("kind", "name"),
    "warmup": ("warmup_steps",),
}


def _unknown(
    where: str, name: str, key: str, items: Mapping[str, Any], elsewhere: Mapping[str, list[str]]
) -> Diagnostic:
    others = [other for other in elsewhere.get(name, []) if other != key]
    meant = [each for each in SYNONYMS.get(name, ()) if each in items]
    if meant:
        fix = f"did you mean {' or '.join(map(repr, meant))}?"
    elif others:
        fix = f"'{name}' belongs to {sections_named(others)}: move it there"
        close = close_names(name, items, cutoff=0.8)
        if close:  # path may be a slip of paths, though another section has a path
            fix = f"{near_misses(name, close)} Else {fix}"
    else:
        elsewhere_meant = [f"{other}.{each}" for each in SYNONYMS.get(name, ()) for other in elsewhere.get(each, ())]
        fix = f"did you mean {' or '.join(elsewhere_meant)}?" if elsewhere_meant else near_misses(name, items)
    return Diagnostic(where, f"[{key}] has no key '{name}'", fix)


def sections_named(names: Sequence[str]) -> str:
    """Name the sections that know a key, in a finding.

    >>> sections_named(["adapter", "run"])
    '[adapter] or [run]'
    """
    return " or ".join(f"[{name}]" for name in names)


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _bounds(value: Any, item: Field[Any]) -> str | None:
    if isinstance(value, tuple) and "minimum" in item.metadata:
        minimum, below = item.metadata["minimum"], item.metadata.get("below", math.inf)
        inside = all(minimum <= number < below for number in value)
        limit = "" if below == math.inf else f" and less than {below}"
        return None if inside else f"a list of {len(value)} numbers, each at least {minimum}{limit}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if "minimum" in item.metadata and not value >= item.metadata["minimum"]:
        return f"a number of at least {item.metadata['minimum']}"
    if "below" in item.metadata and not value < item.metadata["below"]:
        return f"a number of at least {item.metadata['minimum']} and less than {item.metadata['below']}"
    if "above" in item.metadata and not value > item.metadata["above"]:
        return f"a number more than {item.metadata['above']}"
    return None if math.isfinite(value) else "a finite number"


def _advice(got: Any, hint: Any, expected: str) -> str:
    choices = _choices(hint)
    if choices and isinstance(got, str):
        return near_misses(got, choices)
    of_items = _choices(get_args(hint)[0]) if get_origin(hint) is tuple else []
    if of_items and isinstance(got, (list, tuple)):
        wrong = next((item for item in got if isinstance(item, str) and item not in of_items), None)
        return f"write {expected}" if wrong is None else near_misses(wrong, of_items)
    if isinstance(got, str) and (got in of_items or get_args(hint) == (str, ...)):
        return f"write [{json.dumps(got)}]"
    if expected == "a string" and isinstance(got, (int, float)):
        return f'write "{got}", in quotes'
    return f"write {expected}"


def _choices(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    if get_origin(hint) in (Union, types.UnionType):
        return [choice for option in get_args(hint) for choice in _choices(option)]
    return []


def _conform(value: Any, hint: Any) -> tuple[Any, str | None]:
    """Convert a value to its type hint (lists to tuples, integers to floats), or say what was expected instead."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        problems = []
        for option in arguments:
            conformed, problem = _conform(value, option)
            if problem is None:
                return conformed, None
            if option is not type(None):
                problems.append(problem)
        return value, " or ".join(problems)
    if origin is Literal:
        return value, None if value in arguments and isinstance(value, str) else f"one of {', '.join(arguments)}"
    if origin is tuple:
        return _conform_tuple(value, arguments)
    if hint is type(None):
        return value, None if value is None else "nothing"
    if origin is not None:
        return (_listed(value), None) if isinstance(value, Mapping) else (value, "a table")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value), None
    plain = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}[hint]
    return value, None if type(value) is hint else plain


def _listed(value: Any) -> Any:
    """Convert free-form values as TOML reads them back: tuples to lists."""
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _conform_tuple(value: Any, arguments: tuple[Any, ...]) -> tuple[Any, str | None]:
    open_ended = arguments[-1] is Ellipsis
    inner = arguments[0]
    if table_of(tuple[inner, ...]) is not None:
        return value, "a list of tables, each under [[two brackets]]"
    length = "" if open_ended else f"{len(arguments)} "
    if get_origin(inner) is Literal:
        expected = f"a list of some of {', '.join(get_args(inner))}"
    else:
        expected = f"a list of {length}{'strings' if inner is str else 'numbers'}"
    if not isinstance(value, (list, tuple)) or (not open_ended and len(value) != len(arguments)):
        return value, expected
    items = [_conform(item, inner) for item in value]
    if any(problem for _, problem in items):
        return value, expected
    return tuple(item for item, _ in items), None


def at_least(minimum: float, default: Any) -> Any:
    """Declare a number, or a list of numbers, that is not less."""
    return field(default=default, metadata={"minimum": minimum})


def more_than(bound: float, default: Any) -> Any:
    """Declare a number above a bound."""
    return field(default=default, metadata={"above": bound})


def within(minimum: float, below: float, default: Any) -> Any:
    """Declare a number that is not less than the minimum, and below a bound."""
    return field(default=default, metadata={"minimum": minimum, "below": below})


def each_within(minimum: float, below: float, default: Any) -> Any:
    """Declare a list of such numbers."""
    return field(default=default, metadata={"minimum": minimum, "below": below})
