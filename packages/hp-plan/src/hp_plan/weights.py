"""`[model] weights = "file.safetensors"`: initial weights from a file, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hp_plan.findings import Finding, PlanError, near_misses


def weights_file(path: str) -> Path:
    """The file that `path` means: itself, or the model.safetensors inside it.

    Raises:
        PlanError: there is none.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "model.safetensors"
    if not file.is_file():
        fix = "give a safetensors file, or a folder with a model.safetensors"
        raise PlanError([Finding("model.weights", f"the file {file} does not exist", fix)])
    return file


def weights_faults(path: str | None) -> list[Finding]:
    """What is wrong with a plan's `model.weights` before it is read."""
    try:
        if path is not None:
            weights_file(path)
    except PlanError as error:
        return list(error.findings)
    return []


def load_weights(
    path: str, shapes: Mapping[str, tuple[int, ...]], *, framework: str, assign: Callable[[str, Any], None]
) -> None:
    """Hands every tensor of a file to the parameter of its name.

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
    found: list[Finding] = []
    with safe_open(weights_file(path), framework=framework) as file:
        inside = list(file.keys())
        for name in [*shapes, *(name for name in inside if name not in shapes)]:
            if name not in inside:
                found.append(_fault(f"{path} has no '{name}'", near_misses(name, inside)))
            elif name not in shapes:
                found.append(_fault(f"{path} has '{name}', and the model has not", near_misses(name, shapes)))
            elif tuple(file.get_slice(name).get_shape()) != shapes[name]:
                got = tuple(file.get_slice(name).get_shape())
                message = f"'{name}' is of shape {got} in {path} and of {shapes[name]} in the model"
                found.append(_fault(message, "make [model.overrides] those that the file was written with"))
        if found:
            raise PlanError(found)
        for name in shapes:
            assign(name, file.get_tensor(name))


def _fault(message: str, fix: str) -> Finding:
    return Finding("model.weights", message, fix)
