"""Random layouts for tests: mesh shapes, shapes and placements that fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from hypothesis import strategies as st

from hp_dtensor import Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.extend import local_shape

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (8,), (2, 4), (2, 2, 2)]
SIZES = [0, 1, 2, 3, 4, 5, 6, 7, 8]

Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of several: ``random.choice``, or a draw of hypothesis."""


def choose_placements(pick: Pick, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[Placement, ...]:
    """Choose placements of a tensor that fit on every rank."""
    placements: list[Any] = []
    for _ in mesh_shape:
        kind = pick(["replicate", "shard", "shard", "strided"] if shape else ["replicate"])
        if kind == "replicate":
            placements.append(Replicate())
            continue
        dim = pick(range(len(shape)))
        factors = [f for f in (2, 3) if shape[dim] % f == 0]
        if kind == "strided" and factors and not any(not p.is_replicate() and p.dim == dim for p in placements):
            placements.append(StridedShard(dim, pick(factors)))
        else:
            placements.append(Shard(dim))
    if shape and pick([False, True]):
        axis = pick(range(len(mesh_shape)))
        start = pick(range(len(shape)))
        dims = tuple(range(start, pick(range(start, len(shape))) + 1))
        units = _units(pick, shape, placements, mesh_shape, axis, dims)
        placements[axis] = RaggedShard(dims, units, _owners(pick, units) if pick([False, True]) else ())
    for coordinate in coordinates(mesh_shape):  # a factor may not divide what other axes leave
        try:
            local_shape(shape, placements, mesh_shape, coordinate)
        except ValueError:
            return tuple(Replicate() for _ in mesh_shape)
    return tuple(placements)


def choose_shape(pick: Pick) -> tuple[int, ...]:
    """Choose a shape of up to three dims."""
    return tuple(pick(SIZES) for _ in range(pick(range(4))))


def _units(pick: Pick, shape, placements, mesh_shape, axis, dims) -> tuple[int, ...]:
    """Choose units whose sum divides the elements on every rank of the other axes: one rank's where they differ."""
    others = tuple(Replicate() if at == axis else each for at, each in enumerate(placements))
    sizes = set()
    for coordinate in coordinates(mesh_shape):
        try:
            local = local_shape(shape, others, mesh_shape, coordinate)
        except ValueError:
            return (1,) + (0,) * (mesh_shape[axis] - 1)
        sizes.add(prod(local[dim] for dim in dims))
    if len(sizes) > 1 or 0 in sizes:
        place = pick(range(mesh_shape[axis]))
        return tuple(int(at == place) for at in range(mesh_shape[axis]))
    total = sizes.pop()
    cuts = sorted(pick(range(total + 1)) for _ in range(mesh_shape[axis] - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total]))


def _owners(pick: Pick, units: tuple[int, ...]) -> tuple[int, ...]:
    """Choose the rank of each block."""
    left, owners = [rank for rank, count in enumerate(units) for _ in range(count)], []
    while left:
        owners.append(left.pop(pick(range(len(left)))))
    return tuple(owners)


def coordinates(mesh_shape: Sequence[int]) -> list[tuple[int, ...]]:
    """List the coordinates of a mesh, row-major."""
    return list(itertools.product(*(range(n) for n in mesh_shape)))


@st.composite
def placed(draw, shape: tuple[int, ...], mesh_shape: tuple[int, ...]):
    """Draw placements."""
    return choose_placements(lambda options: draw(st.sampled_from(options)), shape, mesh_shape)


@st.composite
def tensors(draw):
    """Draw a shape, a mesh shape and placements."""
    shape = choose_shape(lambda options: draw(st.sampled_from(options)))
    mesh_shape = draw(st.sampled_from(MESHES))
    return shape, mesh_shape, draw(placed(shape, mesh_shape))
