"""shard_module: where a module's parameters, inputs and outputs lie, declared in one dictionary."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hp_dtensor import port
from hp_dtensor.layout.layout import Layout, as_placements
from hp_dtensor.layout.placements import Placement
from hp_dtensor.layout.spec import normalize
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_platform import get_platform

__all__ = ["matches", "matching", "shard_module"]

Placed = tuple[DeviceMesh, tuple[Placement, ...]]
_SECTIONS = ("forward", "parameter")
_ENDS = ("input", "output")


def shard_module(module: Any, sharding_plan: Mapping[str, Mapping[str, Any]]) -> Any:
    """Distributes a module as a plan says, in place; the module's code is not changed.

    Example:
        >>> layout = Layout((2, 4), ("dp", "tp"))
        >>> shard_module(
        ...     model,
        ...     {
        ...         "forward": {"input": layout("dp", "None"), "layers.*.mlp.output": layout("dp", "None")},
        ...         "parameter": {"layers.*.up.weight": layout("tp", "None"), "head.weight": layout("None", "tp")},
        ...     },
        ... )

    Args:
        module: the module. Parameters that the plan does not name, and buffers, become replicated DTensors.
        sharding_plan: two sections, each of which may be left out. A layout is a ``Layout`` of a tensor, or a pair of a
            mesh and its placements; all are on one mesh. Names may be patterns, as of fnmatch, matched part by part:
            ``layers.*.weight`` is of the layers, not of what is inside them.

            ``"parameter"``: name of a parameter -> layout. Values are those of the first rank along each axis.

            ``"forward"``: ``"input"`` and ``"output"`` of the module itself, ``"<name>.input"`` and
            ``"<name>.output"`` of a submodule. A layout is for the first input, or for the one output; a list has one
            for each positional input or output, and None where one stays as it is; a mapping is for inputs that are
            passed by name. A DTensor is redistributed to the layout, a plain tensor is taken as this rank's part.

    Returns:
        ``module``.

    Raises:
        ValueError: before anything is changed: an unknown section, a name that matches nothing (near misses are
            listed), a parameter or a module that two names match, layouts of several meshes; in forward, another number
            of inputs or outputs than of layouts.
        TypeError: something that is no layout.
    """
    f = port.modules()
    kind = get_platform().devices.kind
    unknown = [section for section in sharding_plan if section not in _SECTIONS]
    if unknown:
        raise ValueError(
            f"shard_module: unknown section {unknown[0]!r} of a sharding plan; expected one of {list(_SECTIONS)}"
        )
    modules: dict[str, Any] = f.named_modules(module)
    parameters: dict[str, Any] = f.named_parameters(module)

    named = {key: _placed(value, key, kind) for key, value in sharding_plan.get("parameter", {}).items()}
    placed: dict[str, Placed] = {}
    owners: dict[int, str] = {}
    for key, layout in named.items():
        for name in matching(key, parameters, "parameter", module):
            other = owners.setdefault(id(parameters[name]), key)
            if other != key and named[other] != layout:
                raise ValueError(f"shard_module: parameter {name!r} is named by {other!r} and by {key!r}; keep one")
            mesh, placements = layout
            placed[name] = mesh, normalize(placements, mesh, parameters[name].ndim, f"shard_module: parameter {name!r}")
    hooks = _hooks(sharding_plan.get("forward", {}), modules, module, kind)
    all_meshes = [mesh for mesh, _ in placed.values()] + [mesh for _, hook in hooks for mesh in hook.meshes()]
    meshes = list(dict.fromkeys(all_meshes))
    if len(meshes) > 1:
        raise ValueError(f"shard_module: the layouts are on several meshes, {meshes[0]} and {meshes[1]}; use one")
    if not meshes:
        raise ValueError("shard_module: the plan has no layouts; name a parameter, an input or an output")
    f.distribute(module, placed, meshes[0])
    for target, hook in hooks:
        if hook.end == "input":
            target.register_forward_pre_hook(hook.inputs, with_kwargs=True)
        else:
            target.register_forward_hook(hook.outputs)
    return module


# ---- names ----
def matches(pattern: str, name: str) -> bool:
    """Whether each dotted part of ``name`` matches the same part of ``pattern``; a module's own ``""`` is no part.

    >>> matches("model.layers.*.mlp", "model.layers.0.mlp"), matches("model.layers.*", "model.layers.0.mlp")
    (True, False)
    """
    pattern_parts, name_parts = pattern.split("."), name.split(".")
    return (
        bool(name) == bool(pattern)
        and len(pattern_parts) == len(name_parts)
        and all(map(fnmatchcase, name_parts, pattern_parts))
    )


def matching(pattern: str, names: Collection[str], what: str, module: Any, called: str = "shard_module") -> list[str]:
    """Return the names that a name or pattern matches.

    Args:
        pattern: the name or pattern; a name stands for itself alone.
        names: all names.
        what: what they are names of, for the error.
        module: whose names they are.
        called: the function that was called.

    Raises:
        ValueError: there is none; near misses, or the first names, are listed.
    """
    matched = [pattern] if pattern in names else [name for name in names if matches(pattern, name)]
    if not matched:
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
        named = [name for name in names if name]  # "" is the module itself
        if near:
            advice = f"near: {', '.join(near)}"
        elif named:
            advice = f"there are {', '.join(named[:5])}{', ...' if len(named) > 5 else ''}"
        else:
            advice = "there is none"
        raise ValueError(f"{called}: {pattern!r} matches no {what} of {type(module).__name__}; {advice}")
    return matched


# ---- layouts ----
def _placed(value: Any, key: str, kind: str) -> Placed:
    if isinstance(value, Layout):
        return as_placements(value, None, None, f"shard_module: {key!r}", kind)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], DeviceMesh):
        return value[0], tuple(value[1])
    raise TypeError(
        f"shard_module: {key!r} is given {type(value).__name__} {value!r}; a layout is needed: a Layout called"
        " with the axis of each tensor dim, as layout('dp', 'None'), or (mesh, placements)"
    )


def _is_layout(value: Any) -> bool:
    return isinstance(value, Layout) or (isinstance(value, tuple) and bool(value) and isinstance(value[0], DeviceMesh))


@dataclass(frozen=True, slots=True)
class _Hook:
    """Layouts of a module's inputs or outputs.

    Attributes:
        end: ``"input"`` or ``"output"``.
        key: the plan's, for errors.
        single: for the first input, or the one output; None where the others are used.
        listed: one for each positional input or output.
        named: by keyword.
    """

    end: str
    key: str
    single: Placed | None = None
    listed: tuple[Placed | None, ...] | None = None
    named: Mapping[str, Placed] | None = None

    def meshes(self) -> list[DeviceMesh]:
        """Return the meshes of the layouts."""
        layouts = [self.single, *(self.listed or ()), *(self.named or {}).values()]
        return [placed[0] for placed in layouts if placed is not None]

    def inputs(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before forward."""
        if self.single is not None:
            if args:
                return (self._place(args[0], self.single), *args[1:]), kwargs
            first = next((name for name, value in kwargs.items() if isinstance(value, port.modules().Tensor)), None)
            if first is None:
                raise ValueError(f"shard_module: {self.key!r} of {type(module).__name__}: there is no tensor input")
            return args, {**kwargs, first: self._place(kwargs[first], self.single)}
        if self.listed is not None:
            return self._each(module, args), kwargs
        named = self.named or {}
        absent = [name for name in named if name not in kwargs]
        if absent:
            raise ValueError(
                f"shard_module: {self.key!r} of {type(module).__name__} names the input {absent[0]!r}, the inputs"
                f" passed by name are {list(kwargs)}"
            )
        return args, {name: self._place(v, named[name]) if name in named else v for name, v in kwargs.items()}

    def outputs(self, module: Any, args: Any, output: Any) -> Any:
        """After forward."""
        if self.single is not None:
            return self._place(output, self.single)
        values = self._each(module, output if isinstance(output, (tuple, list)) else (output,))
        if not isinstance(output, (tuple, list)):
            return values[0]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)

    def _each(self, module: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        listed = self.listed or ()
        if len(values) != len(listed):
            raise ValueError(
                f"shard_module: {self.key!r} of {type(module).__name__} has {len(listed)} layouts, there are"
                f" {len(values)} {'positional inputs' if self.end == 'input' else 'outputs'}; None is for those that"
                " stay as they are"
            )
        return tuple(
            value if layout is None or value is None else self._place(value, layout)
            for value, layout in zip(values, listed, strict=True)
        )

    def _place(self, value: Any, placed: Placed) -> Any:
        mesh, placements = placed
        f = port.tensors()
        if not isinstance(value, port.modules().Tensor):
            raise TypeError(f"shard_module: {self.key!r} is a {type(value).__name__}, a tensor is needed")
        what = f"shard_module: {self.key!r}"
        if not isinstance(value, f.DTensor):
            value = f.DTensor.from_local(value, mesh, placements)
        if value.device_mesh != mesh:
            raise ValueError(f"{what} is on {value.device_mesh}, the plan's layout on {mesh}")
        target = value._spec.with_placements(normalize(placements, mesh, value.ndim, what))
        return value if value._spec is target else f.redistribute_shared(value, target)


def _hooks(section: Mapping[str, Any], modules: Mapping[str, Any], module: Any, kind: str) -> list[tuple[Any, _Hook]]:
    """Return the hooks to register, with the module of each."""
    hooks: list[tuple[Any, _Hook]] = []
    owners: dict[tuple[int, str], str] = {}
    for key, value in section.items():
        pattern, _, end = key.rpartition(".")
        if end not in _ENDS:
            raise ValueError(f"shard_module: {key!r} in 'forward' must end with one of {list(_ENDS)}, as 'mlp.input'")
        hook = _hook(key, end, value, kind)
        for name in matching(pattern, modules, "submodule", module):
            other = owners.setdefault((id(modules[name]), end), key)
            if other != key:
                raise ValueError(f"shard_module: the {end} of {name!r} is named by {other!r} and by {key!r}; keep one")
            if all(modules[name] is not target or hook is not registered for target, registered in hooks):
                hooks.append((modules[name], hook))
    return hooks


def _hook(key: str, end: str, value: Any, kind: str) -> _Hook:
    if isinstance(value, Mapping):
        if end == "output":
            raise TypeError(f"shard_module: {key!r} is a mapping, but outputs have no names; pass a layout or list")
        return _Hook(end, key, named={name: _placed(layout, f"{key}[{name}]", kind) for name, layout in value.items()})
    if isinstance(value, (list, tuple)) and not _is_layout(value):
        listed = (None if layout is None else _placed(layout, f"{key}[{i}]", kind) for i, layout in enumerate(value))
        return _Hook(end, key, listed=tuple(listed))
    return _Hook(end, key, single=_placed(value, key, kind))
