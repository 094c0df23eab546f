"""``local_map``: a function of local tensors as one of DTensors, as torch's of that name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hp_dtensor import port
from hp_dtensor.errors import LocalMapError
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Placement
from hp_dtensor.spec import normalize

__all__ = ["local_map"]


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Sequence[Any] | None = None,
    in_grad_placements: Sequence[Any] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """A function that runs ``func`` on this rank's parts, with DTensors at its border.

    Example:
        >>> @local_map(out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]))
        ... def product(x, w):
        ...     return x @ w
        >>> y = product(x, w)                                  # x and w are DTensors, and so is y

    Args:
        func: works on plain tensors; default: the call returns a decorator.
        out_placements: the placements of the result, or a tuple with those of each result; None for what is no tensor.
            A Layout may stand for placements here and below.
        in_placements: for each positional argument (lists, tuples and dicts are flattened) the placements that it must
            have; None for what is no DTensor. Default: any.
        in_grad_placements: likewise, in what layout ``func`` gives the gradient of each local argument. Default: the
            gradient of the argument itself, and a part of it (``Partial``) for what is replicated on an axis where a
            result is cut or partial; torch's own function takes each rank's for the whole there.
        device_mesh: the mesh of the results; default that of the first DTensor.
        redistribute_inputs: bring arguments to ``in_placements``; otherwise others are an error.

    Returns:
        The function. Called without any DTensor, it is ``func``.

    Raises:
        ValueError: when it is called: arguments or results that the placements don't fit.
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, dtensor = list(_leaves(args)), port.tensors().DTensor
        given = [value for value in leaves if isinstance(value, dtensor)]
        if not given:
            return func(*args, **kwargs)
        for name, entries in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements)):
            if entries is not None and len(entries) != len(leaves):
                raise LocalMapError(
                    f"local_map: {name} has {len(entries)} entries for {len(leaves)} positional arguments (lists and"
                    " dicts flattened); pass one per argument, None for one that is not a DTensor"
                )
        mesh = given[0].device_mesh if device_mesh is None else device_mesh
        varies = _varying(out_placements)
        local = [
            _local(index, value, in_placements, in_grad_placements, redistribute_inputs, mesh, varies)
            for index, value in enumerate(leaves)
        ]
        return _placed(func(*_rebuilt(args, iter(local)), **kwargs), out_placements, mesh)

    return run


def _local(
    index: int, value: Any, wanted: Any, gradients: Any, redistribute: bool, mesh: DeviceMesh, varies: set[int]
) -> Any:
    """One argument as ``func`` sees it."""
    entry, f = None if wanted is None else wanted[index], port.tensors()
    if not isinstance(value, f.DTensor):
        if entry is not None and not isinstance(value, _tensor()):
            raise LocalMapError(
                f"local_map: in_placements[{index}] is {entry}, but the argument is a {type(value).__name__}: pass None"
                " if it is not a tensor"
            )
        return value
    spec = value._spec
    if wanted is not None:
        spec = spec.with_placements(_checked(index, entry, spec, "in_placements"))
        if spec is not value._spec:
            if not redistribute:
                raise LocalMapError(
                    f"local_map: argument {index} is placed {value._spec.placements}, in_placements says"
                    f" {spec.placements}; pass redistribute_inputs=True to move it"
                )
            value = f.redistribute(value, spec)
    if gradients is not None:
        return value.to_local(grad_placements=_checked(index, gradients[index], spec, "in_grad_placements"))
    axes = tuple(axis in varies and p.is_replicate() for axis, p in enumerate(spec.placements))
    if spec.mesh == mesh and any(axes):
        return f.local_of(port.gradients().convert(value, spec, axes))
    return value.to_local()


def _checked(index: int, entry: Any, spec: Any, name: str) -> tuple[Placement, ...]:
    if entry is None:
        raise LocalMapError(
            f"local_map: {name}[{index}] is None, but the argument is a DTensor placed {spec.placements}; pass its"
            " placements"
        )
    return normalize(_placements(entry), spec.mesh, len(spec.shape), f"local_map: {name}[{index}]")


def _placed(out: Any, out_placements: Any, mesh: DeviceMesh) -> Any:
    """What ``func`` returned, its tensors as DTensors."""
    values = list(_leaves(out))
    entries = out_placements if _is_several(out_placements) else (out_placements,)
    if len(entries) != len(values):
        raise LocalMapError(
            f"local_map: out_placements has {len(entries)} entries for {len(values)} results; pass a tuple with one"
            " per result, None for one that is not a tensor"
        )
    made, tensor, dtensor = [], _tensor(), port.tensors().DTensor
    for index, (value, entry) in enumerate(zip(values, entries, strict=True)):
        if isinstance(value, dtensor):
            raise LocalMapError(f"local_map: result {index} is a DTensor; func must return local tensors")
        if isinstance(value, tensor) != (entry is not None):
            raise LocalMapError(
                f"local_map: out_placements[{index}] is {entry}, but the result is a {type(value).__name__}: a tensor"
                " needs placements, anything else None"
            )
        made.append(value if entry is None else dtensor.from_local(value, mesh, _placements(entry)))
    return _rebuilt(out, iter(made))


def _tensor() -> type:
    """The framework's class of tensors."""
    return port.tensors().DTensor.__base__


# ---- what placements are written as ----
def _placements(entry: Any) -> Any:
    return entry.placements if isinstance(entry, Layout) else entry


def _is_several(out_placements: Any) -> bool:
    """Whether there is an entry a result: a tuple, but not of placements."""
    return isinstance(out_placements, tuple) and not any(isinstance(each, Placement) for each in out_placements)


def _varying(out_placements: Any) -> set[int]:
    """The mesh axes on which a result is cut or partial."""
    several = out_placements if _is_several(out_placements) else (out_placements,)
    return {axis for each in several for axis, p in enumerate(_placements(each) or ()) if not p.is_replicate()}


# ---- trees ----
def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple, dict)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(value)
    else:
        yield tree


def _rebuilt(tree: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(tree, dict):
        return type(tree)((name, _rebuilt(value, leaves)) for name, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_rebuilt(value, leaves) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_rebuilt(value, leaves) for value in tree)
    return next(leaves)
