"""Naming a function in one process so that another finds it, test modules included."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

BODY = "__rank_body__"


class Reference(NamedTuple):
    """Where a module-level function is.

    Attributes:
        module: the module's name.
        file: its file, None for a built-in module.
        name: the function's name in it.
    """

    module: str
    file: str | None
    name: str


def refer(function: Callable[..., Any]) -> Reference:
    """Name a module-level function.

    Raises:
        TypeError: the function is a lambda, nested, or a method.
    """
    name = getattr(function, "__qualname__", "")
    if not name.isidentifier():
        raise TypeError(
            f"ranks find a function by its module and name, got {name or function!r}: "
            "define it at a module's top level."
        )
    module = sys.modules.get(function.__module__)
    return Reference(function.__module__, getattr(module, "__file__", None), name)


def resolve(reference: Reference) -> Callable[..., Any]:
    """Find the function again, loading its module if it isn't."""
    function = getattr(_module(reference.module, reference.file), reference.name)
    return getattr(function, BODY, function)


def _module(name: str, file: str | None) -> ModuleType:
    if name == "__main__" and "__mp_main__" in sys.modules:
        return sys.modules["__mp_main__"]
    loaded = sys.modules.get(name)
    if loaded is not None and (file is None or getattr(loaded, "__file__", None) == file):
        return loaded
    if file is None or _importable(name, file):
        return importlib.import_module(name)
    # A module that pytest loaded by its path: load it the same way, asserts rewritten so that they show their values.
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    source = Path(file).read_bytes()
    tree = ast.parse(source, filename=file)
    if "pytest" in sys.modules or b"pytest" in source:
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, source)
    try:
        exec(compile(tree, file, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _importable(name: str, file: str) -> bool:
    if Path(file).name.startswith(("test_", "conftest")):
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == file
