"""Sources of a model: `[model] function = "module:function"`, and `weights = "file.safetensors"`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hp_plan.reading.diagnostics import Diagnostic, PlanError, near_misses
from hp_plan.sections import ModelSection
from hp_platform import get_platform
from hp_platform.extend import PLATFORMS


def model_function(name: str, folder: str | None = None, *, key: str = "model.function") -> Callable[..., Any]:
    """Import the function called `name`.

    Args:
        name: `"package.module:function"`.
        folder: where the module, or its outermost package, lies; it is put on `sys.path`. None takes what is there.
        key: of the plan, that names it.

    Raises:
        PlanError: the name has another form, the folder doesn't exist, the module can't be imported, or has no such
            function.
    """
    diagnostics = check_names(name, folder, key=key)
    if diagnostics:
        raise PlanError(diagnostics)
    module_name, _, function_name = name.partition(":")
    if folder is not None and str(Path(folder).resolve()) not in sys.path:
        sys.path.insert(0, str(Path(folder).resolve()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise PlanError([_import_diagnostic(key, module_name, error)]) from error
    if not hasattr(module, function_name):
        message = f"module '{module_name}' has no '{function_name}'"
        raise PlanError([Diagnostic(key, message, near_misses(function_name, dir(module)))])
    return getattr(module, function_name)


def check_names(name: str, folder: str | None = None, *, key: str = "model.function") -> list[Diagnostic]:
    """Check a function's name and folder without importing anything."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        fix = 'write it as "package.module:function"'
        return [Diagnostic(key, f"got '{name}', expected a module and a function", fix)]
    if folder is not None and not Path(folder).resolve().is_dir():
        fix = "give the folder of the function's module, or leave it out"
        return [Diagnostic("model.folder", f"the folder {folder} does not exist", fix)]
    return []


def _import_diagnostic(key: str, name: str, error: ImportError) -> Diagnostic:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{name}.".startswith(f"{missing}."):
        fix = "check the name, and that the module's folder is on PYTHONPATH or is [model] folder"
        return Diagnostic(key, f"can't import '{name}': {error}", fix)
    fix = f"install {missing}, or take" if missing is not None else "correct its imports, or take"
    message = f"'{name}' was found, but one of its own imports failed: {error}"
    return Diagnostic(key, message, f"{fix} an environment that has what it imports")


def check_returned(name: str, model: Any, expected: type) -> None:
    """Raise if a function's model is not of the framework in use.

    Args:
        name: `"package.module:function"`.
        model: its result.
        expected: the class of the framework's models.

    Raises:
        PlanError: another framework's model, or no model.
    """
    if isinstance(model, expected):
        return
    got, running = type(model).__name__, get_platform().name
    roots = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    for other in roots.intersection(PLATFORMS) - {running}:
        message = f"{name} returned a {got}, a model of {other}, but this process runs {running}"
        raise PlanError([Diagnostic("run.platform", message, f'write platform = "{other}" in [run]')])
    message = f"{name} returned a {got}, expected a model of {running} (nn.{expected.__name__})"
    raise PlanError([Diagnostic("model.function", message, "return the model from the function")])


def check_function(
    name: str, folder: str | None = None, *, run_code: bool = True, key: str = "model.function"
) -> list[Diagnostic]:
    """Check that a function can be found.

    Args:
        name: `"package.module:function"`.
        folder: where the module lies.
        run_code: import the module to look; else its name alone is read.
        key: of the plan, that names it.
    """
    if not run_code:
        return check_names(name, folder, key=key)
    try:
        model_function(name, folder, key=key)
    except PlanError as error:
        return list(error.diagnostics)
    return []


def vocabulary(section: ModelSection) -> int | None:
    """Return the size of the model's vocabulary, where the plan or its folder tells it."""
    tables: list[Any] = [section.overrides]
    if section.path is not None:
        try:
            tables.append(json.loads((Path(section.path) / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):  # which `lint` reports
            return None
    for table in tables:
        for part in (table, table.get("text_config")):
            size = part.get("vocab_size") if isinstance(part, Mapping) else None
            if isinstance(size, int):
                return size
    return None


def failed(key: str, name: str, error: Exception) -> PlanError:
    """Return the error for a model that raised while it was built.

    Args:
        key: `"config"`, `"path"` or `"function"`.
        name: its value in the plan.
        error: whatever the user's own function, or a configuration's validation, raised.
    """
    message = f"building {name} failed: {type(error).__name__}: {error}"
    return PlanError([Diagnostic(f"model.{key}", message, "correct [model.overrides], which are its arguments")])


def weights_file(path: str) -> Path:
    """Return the file that `path` means: itself, or the model.safetensors inside it.

    Raises:
        PlanError: there is none.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "model.safetensors"
    if not file.is_file():
        fix = "give a safetensors file, or a folder with a model.safetensors"
        if any(file.parent.glob("model-rank-*.safetensors")):
            fix = f"join the files of each rank first: hyper-parallel checkpoint convert {file.parent} TARGET"
        raise PlanError([Diagnostic("model.weights", f"the file {file} does not exist", fix)])
    return file


def check_weights(path: str | None) -> list[Diagnostic]:
    """Check a plan's `model.weights` before it is read."""
    try:
        if path is not None:
            weights_file(path)
    except PlanError as error:
        return list(error.diagnostics)
    return []


def load_weights(
    path: str, shapes: Mapping[str, tuple[int, ...]], *, framework: str, assign: Callable[[str, Any], None]
) -> None:
    """Assign every tensor of a file to the parameter of its name.

    Args:
        path: a safetensors file, or a folder with a model.safetensors.
        shapes: of the parameters, by name; of those that are one tensor, the first name counts.
        framework: in which safetensors makes the tensors: `"pt"`, or `"np"` for arrays.
        assign: called with a parameter's name and its tensor.

    Raises:
        PlanError: a parameter that the file lacks, a name that the model lacks, a shape that differs.
        ImportError: safetensors isn't installed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError("[model] weights needs safetensors: pip install safetensors") from error
    diagnostics: list[Diagnostic] = []
    with safe_open(weights_file(path), framework=framework) as file:
        inside = list(file.keys())
        for name in [*shapes, *(name for name in inside if name not in shapes)]:
            if name not in inside:
                diagnostics.append(_weights_diagnostic(f"{path} has no '{name}'", _near(name, inside)))
            elif name not in shapes:
                diagnostics.append(
                    _weights_diagnostic(f"{path} has '{name}', but the model does not", _near(name, shapes))
                )
            elif tuple(file.get_slice(name).get_shape()) != shapes[name]:
                got = tuple(file.get_slice(name).get_shape())
                message = f"'{name}' has shape {got} in {path}, but {shapes[name]} in the model"
                diagnostics.append(
                    _weights_diagnostic(message, "use the [model.overrides] that the file was written with")
                )
        if diagnostics:
            raise PlanError(diagnostics)
        for name in shapes:
            assign(name, file.get_tensor(name))


def _near(name: str, names: Iterable[str]) -> str:
    near = near_misses(name, names)
    return near if near.startswith("did") else "give weights of this model, or leave weights out to draw them"


def _weights_diagnostic(message: str, fix: str) -> Diagnostic:
    return Diagnostic("model.weights", message, fix)
