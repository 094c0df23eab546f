"""shard_module: the layouts of a module's parameters, inputs and outputs, declared in one dictionary."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hp_dtensor import port
from hp_dtensor.layout.placements import Placement
from hp_dtensor.layout.spec import Layout, as_placements, normalize
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_platform import get_platform

Placed = tuple[DeviceMesh, tuple[Placement, ...]]
_SECTIONS = ("forward", "parameter")
_ENDS = ("input", "output")


def shard_module(module: Any, sharding_plan: Mapping[str, Mapping[str, Any]]) -> Any:
    """Distribute a module in place according to a plan, without changes to its code.

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
        sharding_plan: up to two sections. A layout is a ``Layout`` of a tensor, or a pair (mesh, placements); all
            layouts are on one mesh. Names may be fnmatch patterns, matched between dots: ``layers.*.weight`` matches
            weights of the layers, but not of modules inside them.

            ``"parameter"``: name of a parameter -> layout. The values are those of the first rank along each axis.

            ``"forward"``: ``"input"`` and ``"output"`` of the module itself, ``"<name>.input"`` and
            ``"<name>.output"`` of a submodule. A layout applies to the first input, or to the only output; a list has
            one layout for each positional input or output, None to leave it unchanged; a mapping has those of inputs
            passed by name. A DTensor is redistributed to the layout, a plain tensor becomes this rank's local tensor.

    Returns:
        ``module``.

    Raises:
        ValueError: before anything is changed: an unknown section, a name that matches nothing (near misses are
            listed), a parameter or a module that two names match, layouts on several meshes; in forward, a different
            number of inputs or outputs than of layouts.
        TypeError: something that is not a layout.
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
    """Tell whether each dotted part of ``name`` matches that of ``pattern``; a module's own name ``""`` has no parts.

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
        pattern: a name, which only matches itself, or a pattern.
        names: all names.
        what: the kind of things named, for the error.
        module: the module that has them, for the error.
        called: the user's function, for the error.

    Raises:
        ValueError: no name matches; the error lists near misses, or the first names.
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
        f"shard_module: {key!r} needs a layout, got {type(value).__name__} {value!r}; pass a Layout called with the"
        " axis of each tensor dim, as layout('dp', 'None'), or (mesh, placements)"
    )


def _is_layout(value: Any) -> bool:
    return isinstance(value, Layout) or (isinstance(value, tuple) and bool(value) and isinstance(value[0], DeviceMesh))


@dataclass(frozen=True, slots=True)
class _Hook:
    """Layouts of a module's inputs or outputs.

    Attributes:
        end: ``"input"`` or ``"output"``.
        key: the key in the plan, for errors.
        single: the layout of the first input, or of the only output; otherwise None.
        listed: the layout of each positional input or output.
        named: the layouts of inputs passed by name.
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
        """Redistribute the inputs, as a hook before forward."""
        if self.single is not None:
            if args:
                return (self._place(args[0], self.single), *args[1:]), kwargs
            first = next((name for name, value in kwargs.items() if isinstance(value, port.modules().Tensor)), None)
            if first is None:
                raise ValueError(f"shard_module: {self.key!r} of {type(module).__name__}: no input is a tensor")
            return args, {**kwargs, first: self._place(kwargs[first], self.single)}
        if self.listed is not None:
            return self._each(module, args), kwargs
        named = self.named or {}
        absent = [name for name in named if name not in kwargs]
        if absent:
            raise ValueError(
                f"shard_module: {self.key!r} of {type(module).__name__} names the input {absent[0]!r}, but the inputs"
                f" passed by name are {list(kwargs)}"
            )
        return args, {name: self._place(v, named[name]) if name in named else v for name, v in kwargs.items()}

    def outputs(self, module: Any, args: Any, output: Any) -> Any:
        """Redistribute the outputs, as a hook after forward."""
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
                f"shard_module: {self.key!r} of {type(module).__name__} has {len(listed)} layouts for"
                f" {len(values)} {'positional inputs' if self.end == 'input' else 'outputs'}; pass None for those to"
                " leave unchanged"
            )
        return tuple(
            value if layout is None or value is None else self._place(value, layout)
            for value, layout in zip(values, listed, strict=True)
        )

    def _place(self, value: Any, placed: Placed) -> Any:
        mesh, placements = placed
        f = port.tensors()
        if not isinstance(value, port.modules().Tensor):
            raise TypeError(f"shard_module: {self.key!r} must be a tensor, got a {type(value).__name__}")
        what = f"shard_module: {self.key!r}"
        if not isinstance(value, f.DTensor):
            value = f.DTensor.from_local(value, mesh, placements)
        if value.device_mesh != mesh:
            raise ValueError(f"{what} is on {value.device_mesh}, but the plan's layout is on {mesh}")
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
