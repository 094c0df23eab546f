"""parallelize_module: styles by name and pattern, the same on torch and on MindSpore."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from hp_dtensor import DeviceMesh, get_current_mesh
from hp_styles.inputs import framework
from hp_styles.styles import ParallelStyle

__all__ = ["parallelize_module"]


def parallelize_module(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Applies styles to a module or its submodules, in place.

    Modules that share a parameter share it afterwards too.

    Args:
        module: the module.
        device_mesh: a mesh of one axis; default that of ``with mesh:``.
        parallelize_plan: a style for the module itself, or ``{name or fnmatch pattern: style}``; patterns match dotted
            names of submodules part by part: ``layers.*.mlp.up``; ``layers.*`` is the layers, not what is inside them.
            ``""`` is the module itself.
        src_data_rank: the rank along the axis whose parameters count; None takes each rank's own.

    Returns:
        ``module``.

    Raises:
        ValueError: a mesh of several axes, a key that matches no submodule (near misses are listed), a module that two
            keys match, or modules that share a parameter and get different placements.
        TypeError: something that is no style, or no plan.
    """
    mesh = device_mesh if device_mesh is not None else get_current_mesh()
    if mesh.ndim != 1:
        raise ValueError(
            f"parallelize_module: a mesh of one axis is needed, got axes {mesh.mesh_dim_names or mesh.shape}; slice it:"
            " mesh['tp']"
        )
    if parallelize_plan is None:
        raise ValueError("parallelize_module: parallelize_plan is missing; pass a style or {pattern: style}")
    if not isinstance(parallelize_plan, (ParallelStyle, Mapping)):
        raise TypeError(
            "parallelize_module: parallelize_plan must be a ParallelStyle or {pattern: style}, got"
            f" {type(parallelize_plan).__name__}"
        )
    plan = {"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else parallelize_plan
    modules = dict(framework().named_modules(module))
    chosen: dict[int, tuple[str, str, ParallelStyle]] = {}
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(f"parallelize_module: {pattern!r} is given a {type(style).__name__}, not a ParallelStyle")
        found = [pattern] if pattern in modules else [name for name in modules if _matches(pattern, name)]
        if not found:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.5)
            raise ValueError(
                f"parallelize_module: {pattern!r} matches no submodule of {type(module).__name__}"
                + (f"; near: {', '.join(near)}" if near else "")
            )
        for name in found:
            _, other, _ = chosen.setdefault(id(modules[name]), (name, pattern, style))
            if other != pattern:
                raise ValueError(f"parallelize_module: {name!r} is matched by {other!r} and by {pattern!r}; keep one")
    with framework().tied(module):
        for name, _, style in chosen.values():
            previous = style.src_data_rank
            style.src_data_rank = src_data_rank
            try:
                style._apply(modules[name], mesh)
            finally:
                style.src_data_rank = previous
    return module


def _matches(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))
