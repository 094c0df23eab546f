"""Tell whether torch_npu has what our code names of it: attributes, operators, their keywords and argument counts.

A name that is misspelt would otherwise show on an NPU only, and there only where the call is reached.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# What stands for the modules in our sources, the longest first.
_ROOTS = ("torch.ops.npu", "torch.npu", "torch_npu", "_torch_npu()")


class Use(NamedTuple):
    """One mention of torch_npu.

    Attributes:
        place: file and line.
        root: "torch_npu", "torch.npu" or "torch.ops.npu".
        path: the attributes below the root.
        call: the number of positional arguments and the keywords, None if it is not called.
    """

    place: str
    root: str
    path: tuple[str, ...]
    call: tuple[int, tuple[str, ...]] | None


def uses(source: str, file: str = "<source>") -> Iterator[Use]:
    """List the mentions of torch_npu in a source, in the order of the syntax tree.

    A function `_torch_npu()` that imports it late counts as the module.
    """
    tree = ast.parse(source, filename=file)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        dotted = ast.unparse(node)
        root = next((root for root in _ROOTS if dotted.startswith(root + ".")), None)
        if root is None:
            continue
        made = calls.get(id(node))
        call = None
        if made is not None and not any(isinstance(argument, ast.Starred) for argument in made.args):
            call = len(made.args), tuple(keyword.arg for keyword in made.keywords if keyword.arg is not None)
        path = tuple(dotted.removeprefix(root + ".").split("."))
        yield Use(f"{file}:{node.lineno}", root.replace("_torch_npu()", "torch_npu"), path, call)


def broken(found: Iterable[Use]) -> list[str]:
    """Describe the uses that the installed torch_npu doesn't have; importing it is up to the caller."""
    return [f"{use.place}: {problem}" for use in found if (problem := _problem(use))]


def broken_in(folders: Iterable[Path]) -> tuple[int, list[str]]:
    """Count the uses in the sources below some folders, and describe those that are broken."""
    found = [
        use for folder in folders for file in sorted(folder.rglob("*.py")) for use in uses(file.read_text(), str(file))
    ]
    return len(found), broken(found)


def _problem(use: Use) -> str | None:
    import torch
    import torch_npu  # type: ignore[import-not-found]

    name = ".".join((use.root, *use.path))
    schemas = _schemas(use)
    if use.root == "torch.ops.npu":
        if not schemas:
            return f"there is no operator {name}"
    else:
        value: Any = torch_npu if use.root == "torch_npu" else torch.npu  # type: ignore[attr-defined]
        for index, part in enumerate(use.path):
            if not hasattr(value, part):
                return f"{'.'.join((use.root, *use.path[:index]))} has no attribute {part}"
            value = getattr(value, part)
        if use.call is not None and not schemas:
            return _misfit(name, value, use.call)
    if use.call is not None and schemas and not any(_fits(schema, *use.call) for schema in schemas):
        count, keywords = use.call
        declared = "; ".join(str(schema) for schema in schemas)
        return f"{name} does not take {count} positional arguments and the keywords {list(keywords)}: {declared}"
    return None


def _schemas(use: Use) -> list[Any]:
    """Get the dispatcher's schemas of an operator; a function of torch_npu with an operator's name is one."""
    import torch

    if use.root == "torch.npu" or len(use.path) > (2 if use.root == "torch.ops.npu" else 1):
        return []
    return torch._C._jit_get_schemas_for_operator(f"npu::{use.path[0]}")


def _fits(schema: Any, count: int, keywords: tuple[str, ...]) -> bool:
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    passed = {argument.name for argument in positional[:count]} | set(keywords)
    needed = {argument.name for argument in schema.arguments if not argument.has_default_value()}
    doubled = {argument.name for argument in positional[:count]} & set(keywords)
    names = {argument.name for argument in schema.arguments}
    return count <= len(positional) and passed <= names and needed <= passed and not doubled


def _misfit(name: str, value: Any, call: tuple[int, tuple[str, ...]]) -> str | None:
    """Hold a call against the signature of a Python function or class, where it has one."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a builtin: its arguments can't be known
        return None
    count, keywords = call
    try:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError as error:
        return f"{name}: {error}"
    return None
