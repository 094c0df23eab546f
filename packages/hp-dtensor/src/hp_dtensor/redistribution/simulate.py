"""Run a plan on numpy arrays for all ranks of a mesh in one process: for tests and dry runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from hp_dtensor.layout.placements import Partial, Replicate
from hp_dtensor.layout.sharding import local_shape, parts, run_view
from hp_dtensor.redistribution.steps import Step

if TYPE_CHECKING:
    import numpy as np

__all__ = ["coordinates", "neutral", "reduce_arrays", "simulate"]

Coordinate = tuple[int, ...]


def coordinates(mesh_shape: Sequence[int]) -> Iterator[Coordinate]:
    """All coordinates of a mesh, the last axis fastest."""
    return product(*map(range, mesh_shape))


def simulate(
    steps: Sequence[Step], locals_: Mapping[Coordinate, np.ndarray], shape: Sequence[int], mesh_shape: Sequence[int]
) -> dict[Coordinate, np.ndarray]:
    """Return the local array of each rank after the steps.

    Args:
        steps: from `plan`.
        locals_: the local array of each mesh coordinate.
        shape: the global shape.
        mesh_shape: ranks on each mesh axis.

    Returns:
        The local array of each mesh coordinate; the given ones are not changed.

    Raises:
        ValueError: if a local array's shape is not what the placements give.
    """
    held = dict(locals_)
    if steps:
        for coordinate, array in held.items():
            expected = local_shape(shape, steps[0].before, mesh_shape, coordinate)
            if array.shape != expected:
                raise ValueError(
                    f"the local array at {coordinate} has shape {array.shape}, expected {expected} for shape "
                    f"{tuple(shape)} with placements {steps[0].before} on mesh {tuple(mesh_shape)}"
                )
    for step in steps:
        after: dict[Coordinate, np.ndarray] = {}
        for first in coordinates(mesh_shape):
            if first[step.axis]:
                continue
            group = [(*first[: step.axis], i, *first[step.axis + 1 :]) for i in range(mesh_shape[step.axis])]
            whole = _undo(step, [held[c] for c in group], group, shape, mesh_shape)
            after.update(zip(group, _make(step, whole, group, shape, mesh_shape), strict=True))
        held = after
    return held


def reduce_arrays(arrays: Sequence[Any], op: str) -> Any:
    """Reduce arrays of equal shape by a ``Partial`` op; integers keep their type, and avg rounds down for them."""
    import numpy as np

    stacked = np.stack(arrays)
    if op == "avg":
        total = stacked.sum(0, dtype=stacked.dtype)
        return total // len(arrays) if stacked.dtype.kind in "iu" else total / len(arrays)
    if op in ("sum", "product"):
        return (stacked.sum if op == "sum" else stacked.prod)(0, dtype=stacked.dtype)
    return stacked.min(0) if op == "min" else stacked.max(0)


def neutral(op: str) -> int | None:
    """Return the constant on ranks other than the first after Replicate to ``Partial(op)``; None: the value itself."""
    return {"sum": 0, "product": 1}.get(op)


def _undo(
    step: Step, arrays: list[Any], group: list[Coordinate], shape: Sequence[int], mesh_shape: Sequence[int]
) -> Any:
    """Return the value without the step's source placement, local to the other axes."""
    import numpy as np

    if isinstance(step.source, Replicate):
        return arrays[0]
    if isinstance(step.source, Partial):
        return reduce_arrays(arrays, step.source.op)
    bare = (*step.before[: step.axis], Replicate(), *step.before[step.axis + 1 :])
    whole_shape = local_shape(shape, bare, mesh_shape, group[0])
    outer, run, inner = run_view(step.source, bare, whole_shape)
    whole = np.empty((outer, run, inner), dtype=arrays[0].dtype)
    for array, held in zip(arrays, parts(step.source, run, len(group)), strict=True):
        local = array.reshape(outer, sum(n for _, n in held), inner)
        offset = 0
        for start, length in held:
            whole[:, start : start + length] = local[:, offset : offset + length]
            offset += length
    return whole.reshape(whole_shape)


def _make(
    step: Step, whole: Any, group: list[Coordinate], shape: Sequence[int], mesh_shape: Sequence[int]
) -> list[Any]:
    """Return the shard of ``whole`` on each rank of the group under the step's target placement."""
    import numpy as np

    if isinstance(step.target, Replicate):
        return [whole] * len(group)
    if isinstance(step.target, Partial):
        fill = neutral(step.target.op)
        return [whole if not i or fill is None else np.full_like(whole, fill) for i in range(len(group))]
    bare = (*step.after[: step.axis], Replicate(), *step.after[step.axis + 1 :])
    outer, run, inner = run_view(step.target, bare, whole.shape)
    view = whole.reshape(outer, run, inner)
    made = []
    for coordinate, held in zip(group, parts(step.target, run, len(group)), strict=True):
        pieces = [view[:, start : start + length] for start, length in held] or [view[:, :0]]
        made.append(np.concatenate(pieces, axis=1).reshape(local_shape(shape, step.after, mesh_shape, coordinate)))
    return made
