"""The JSON schema of a plan, for editors that complete and check TOML."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hp_plan.plan import AUTOMATIC_STYLES, SECTIONS, ParallelPlan, plain
from hp_plan.reading.tables import table_of

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
