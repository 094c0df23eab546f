"""Run a plan on numpy arrays for all ranks of a mesh in one process: for tests and dry runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from hp_dtensor.layout.sharding import local_shape
from hp_dtensor.redistribution.cuts import Place
from hp_dtensor.redistribution.executor import Arrays, exchange, local_run
from hp_dtensor.redistribution.steps import AllReduce, ReduceScatter, Step

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
            places = [Place.of(step, tuple(shape), tuple(mesh_shape), coordinate) for coordinate in group]
            after.update(zip(group, _run(step, places, [held[coordinate] for coordinate in group]), strict=True))
        held = after
    return held


def reduce_arrays(arrays: Sequence[Any], op: str) -> Any:
    """Reduce arrays of equal shape by a ``Partial`` op; integers keep their type, and avg rounds down for them."""
    stacked = np.stack(arrays)
    if op == "avg":
        total = stacked.sum(0, dtype=stacked.dtype)
        return total // len(arrays) if stacked.dtype.kind in "iu" else total / len(arrays)
    if op in ("sum", "product"):
        return (stacked.sum if op == "sum" else stacked.prod)(0, dtype=stacked.dtype)
    return stacked.min(0) if op == "min" else stacked.max(0)


_ARRAYS = Arrays(
    lambda x, dim, start, length: x[(slice(None),) * dim + (slice(start, start + length),)],
    lambda x, sizes: np.split(x, np.cumsum(sizes)[:-1]),
    np.concatenate,
    lambda like, shape: np.empty(shape, like.dtype),
    lambda like, shape, value: np.full(shape, value, like.dtype),
    np.copy,
)


def _run(step: Step, places: Sequence[Place], locals_: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Do a step for all ranks of a group."""
    runs = [local_run(step, place, _ARRAYS) for place in places]
    if any(runs):
        return [run(local) for run, local in zip(runs, locals_, strict=True) if run is not None]
    if isinstance(step, AllReduce):
        return [reduce_arrays(locals_, step.op)] * len(places)
    op = step.op if isinstance(step, ReduceScatter) else ""
    ways = [exchange(step, place, op, _ARRAYS) for place in places]
    sent = [way.pack(local) for way, local in zip(ways, locals_, strict=True)]
    if ways[0].collective == "all_gather":
        got = [np.concatenate(sent)] * len(ways)
    elif ways[0].collective == "reduce_scatter":
        got = np.split(reduce_arrays(sent, op), len(ways))
    else:  # sizes sent are the second argument
        pieces = [_ARRAYS.split(each, way.arguments[1]) for each, way in zip(sent, ways, strict=True)]
        got = [np.concatenate(received) for received in zip(*pieces, strict=True)]
    return [way.unpack(each) for way, each in zip(ways, got, strict=True)]
