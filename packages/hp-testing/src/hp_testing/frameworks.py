"""Which test modules are for another framework than the one that `--backend` selects."""

from __future__ import annotations

import ast
from pathlib import Path

# What a test module imports at its top that only exists with a framework.
IMPORTS = {"torch": {"torch", "torch_npu", "transformers"}, "mindspore": {"mindspore"}}
TITLES = {"torch": "PyTorch", "mindspore": "MindSpore"}


def needed_framework(path: Path, selected: str) -> str | None:
    """Name the framework that a test module is for, None where it runs on the selected one.

    It is the one of its folder (`tests/torch/`, `tests/mindspore/`), else the one that
    `pytest.mark.framework("torch")` in its `pytestmark` says, else the one that it, or a module beside it that it
    imports, imports at the top level. Imports inside of functions don't count.

    Args:
        path: a test module.
        selected: "torch" or "mindspore".
    """
    others = [name for name in IMPORTS if name != selected]
    marks = _module_marks(path)
    for name in others:
        if path.parent.name == name or f"pytest.mark.framework({name!r})" in marks:
            return name
    imported = _top_level_imports(path, set())
    for name in others:
        own_code = any(f".{name}" in module for module in imported if module.startswith(("hp_", "hyper_parallel")))
        if own_code or any(module.split(".")[0] in IMPORTS[name] for module in imported):
            return name
    return None


def uses_none(path: Path) -> bool:
    """Tell whether a test module has to do with neither a framework nor a device: it plans, reads and writes text.

    It has no mark of a framework, and imports none, no code under a `torch/` or `mindspore/` folder, and nothing of
    hp_platform or hp_testing, through which everything else reaches a device.

    Args:
        path: a test module.
    """
    if path.parent.name in IMPORTS or "pytest.mark.framework" in _module_marks(path):
        return False
    roots = {"hp_platform", "hp_testing"}.union(*IMPORTS.values())
    imported = [module.split(".") for module in _top_level_imports(path, set())]
    return not any(parts[0] in roots or not {*parts[1:]}.isdisjoint(IMPORTS) for parts in imported)


def _module_marks(path: Path) -> str:
    for statement in ast.parse(path.read_bytes(), filename=str(path)).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(name) for name in statement.targets] == ["pytestmark"]:
            return ast.unparse(statement.value)
    return ""


def _top_level_imports(path: Path, seen: set[Path]) -> set[str]:
    seen.add(path)
    imported: set[str] = set()
    for statement in ast.parse(path.read_bytes(), filename=str(path)).body:
        if isinstance(statement, ast.Import):
            imported |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            imported.add(statement.module)
    for module in list(imported):
        beside = path.parent / f"{module}.py"
        if beside not in seen and beside.exists():
            imported |= _top_level_imports(beside, seen)
    return imported
