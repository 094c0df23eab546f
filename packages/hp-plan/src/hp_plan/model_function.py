"""`[model] function = "module:function"`: found, with what is wrong where it isn't."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hp_plan.findings import Finding, PlanError, near_misses


def model_function(name: str) -> Callable[..., Any]:
    """The function called `name`.

    Args:
        name: `"package.module:function"`.

    Raises:
        PlanError: the name has another form, the module can't be imported, or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        fix = 'write it as "package.module:function"'
        raise PlanError([Finding("model.function", f"got '{name}', expected a module and a function", fix)])
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        fix = "check the name, and that the module's folder is on PYTHONPATH"
        raise PlanError([Finding("model.function", f"can't import '{module_name}': {error}", fix)]) from error
    if not hasattr(module, function_name):
        message = f"module '{module_name}' has no '{function_name}'"
        raise PlanError([Finding("model.function", message, near_misses(function_name, dir(module)))])
    return getattr(module, function_name)


def function_faults(name: str) -> list[Finding]:
    """What is wrong with a function's name; nothing where it is found."""
    try:
        model_function(name)
    except PlanError as error:
        return list(error.findings)
    return []


def failed(key: str, name: str, error: Exception) -> PlanError:
    """The fault of a model that raised while it was built.

    Args:
        key: `"config"` or `"function"`.
        name: what stands there.
        error: whatever the user's own function, or a configuration's validation, raised.
    """
    message = f"building {name} failed: {type(error).__name__}: {error}"
    return PlanError([Finding(f"model.{key}", message, "correct [model.overrides], which are its arguments")])
