"""Writers: the ranks that write a tensor's shards, each shard once, the bytes balanced over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, TypeVar

import numpy as np

from hp_checkpoint.layout.pieces import Piece, pieces
from hp_dtensor import Placement, RaggedShard
from hp_dtensor.extend import cut_dim, intervals

Name = TypeVar("Name", bound=Any)


@dataclass(frozen=True, slots=True)
class Holding:
    """A tensor's layout: its placements over a mesh of global ranks.

    Attributes:
        ranks: the mesh's ranks, row-major.
        mesh_shape: ranks on each axis; ``()`` for one rank that has the complete tensor.
        placements: one for each axis.
    """

    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape, size of an element, and where a tensor is.

    Attributes:
        shape: the global shape.
        itemsize: bytes of an element.
        holdings: layouts, each of which covers the tensor and is that of all its ranks. Several are replicas: the same
            tensor on the sub-meshes of several tensor-parallel groups.
        shards: instead of layouts, the different shards, as (number of elements, the ranks that have it).
    """

    shape: tuple[int, ...]
    itemsize: int
    holdings: tuple[Holding, ...] = ()
    shards: tuple[tuple[int, tuple[int, ...]], ...] = ()


def writers(tensors: Mapping[Name, Tensor], world_size: int) -> dict[Name, frozenset[int]]:
    """Choose for each tensor the ranks that write their shard of it, so that each shard is written once.

    Shards without replicas are written where they are. The others go, the largest first, to the rank with the fewest
    bytes among those that have it. It is a pure function: all ranks compute the same.

    Example:
        >>> writers({"w": Tensor((4,), 4, (Holding((0,)), Holding((1,))))}, 2)
        {'w': frozenset({0})}

    Args:
        tensors: by name, or by another key that can be sorted.
        world_size: the number of ranks.
    """
    load = np.zeros(world_size, dtype=np.int64)
    chosen: dict[Name, list[int]] = {}
    replicated: list[tuple[int, Name, np.ndarray]] = []
    for name, tensor in tensors.items():
        if not tensor.holdings:
            chosen[name] = []
            replicated += [(size * tensor.itemsize, name, np.array(ranks)) for size, ranks in tensor.shards]
            continue
        sizes, ranks = _shards(tensor)
        sizes = sizes * tensor.itemsize
        if ranks.shape[1] == 1:
            own = ranks[sizes > 0, 0]
            np.add.at(load, own, sizes[sizes > 0])
            chosen[name] = own.tolist()
        else:
            chosen[name] = []
            replicated += [(int(sizes[shard]), name, ranks[shard]) for shard in np.flatnonzero(sizes)]
    replicated.sort(key=lambda each: (-each[0], each[1]))
    for size, name, ranks in replicated:
        rank = int(ranks[load[ranks].argmin()])
        load[rank] += size
        chosen[name].append(rank)
    return {name: frozenset(ranks) for name, ranks in chosen.items()}


def shards_of(
    shape: tuple[int, ...], members: Mapping[Holding, Iterable[int]], what: str
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """List a tensor's different shards and the ranks that have each, where each rank knows its own shard only.

    Ranks have different placements where tensor parallelism is uneven: the units of a ``RaggedShard`` divide what a
    rank has. And some ranks lack the tensor, as an optimizer's state of a shard without elements.

    Args:
        shape: the global shape.
        members: the ranks that have the tensor in this layout.
        what: the tensor's name, for the error.

    Raises:
        ValueError: the shards don't cover the tensor once.
    """
    ranks: dict[tuple[Piece, ...], list[int]] = {}
    for holding, own in members.items():
        position = {rank: number for number, rank in enumerate(holding.ranks)}
        for rank in own:
            coordinate = tuple(int(each) for each in np.unravel_index(position[rank], holding.mesh_shape))
            shard = pieces(shape, holding.placements, holding.mesh_shape, coordinate)
            if shard:
                ranks.setdefault(shard, []).append(rank)
    sizes = [sum(piece.size for piece in shard) for shard in ranks]
    if sum(sizes) != prod(shape):
        raise ValueError(
            f"save: the ranks' shards of {what!r} have {sum(sizes)} of its {prod(shape)} elements, shape {list(shape)}:"
            " its layout is not the same on all ranks, or a rank lacks it"
        )
    return tuple((size, tuple(own)) for size, own in zip(sizes, ranks.values(), strict=True))


def shard_sizes(shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> np.ndarray:
    """Return the number of elements on each rank of a mesh, as an array of the mesh's shape.

    ``shard_sizes((5, 2), (Shard(0),), (2,)).tolist() == [6, 4]``
    """
    sizes = np.ones(tuple(mesh_shape), dtype=np.int64)
    for dim, size in enumerate(shape):
        axes = [axis for axis, placement in enumerate(placements) if cut_dim(placement) == dim]
        lengths = _lengths(size, tuple((placements[axis], mesh_shape[axis]) for axis in axes))
        sizes *= lengths.reshape([mesh_shape[axis] if axis in axes else 1 for axis in range(len(mesh_shape))])
    for axis, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            units = np.array(placement.units, dtype=np.int64)
            along = [len(units) if other == axis else 1 for other in range(len(mesh_shape))]
            sizes = sizes * units.reshape(along) // max(int(units.sum()), 1)
    return sizes


@lru_cache(maxsize=4096)
def _lengths(size: int, shards: tuple[tuple[Placement, int], ...]) -> np.ndarray:
    """Return the length of a dim on each rank of the axes that shard it."""
    lengths = [
        sum(
            length
            for _, length in intervals(size, [(each, n, at) for (each, n), at in zip(shards, coordinate, strict=True)])
        )
        for coordinate in product(*(range(n) for _, n in shards))
    ]
    return np.array(lengths, dtype=np.int64)


def _shards(tensor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the sizes of the different shards, and the ranks that have each, as a row of an array."""
    first = tensor.holdings[0]
    sizes = shard_sizes(tensor.shape, first.placements, first.mesh_shape)
    cut = [axis for axis, placement in enumerate(first.placements) if not placement.is_replicate()]
    kept = [axis for axis in range(len(first.mesh_shape)) if axis not in cut]
    count = prod(first.mesh_shape[axis] for axis in cut)
    by_mesh = [
        np.array(each.ranks).reshape(first.mesh_shape).transpose(cut + kept).reshape(count, -1)
        for each in _alike(tensor.holdings)
    ]
    flat = sizes.transpose(cut + kept).reshape(count, -1)
    return flat[:, 0], np.concatenate(by_mesh, axis=1)


def _alike(holdings: Iterable[Holding]) -> list[Holding]:
    """Return the layouts that differ from the first one in their ranks only."""
    first, *others = holdings
    same = [each for each in others if (each.mesh_shape, each.placements) == (first.mesh_shape, first.placements)]
    return [first, *same]
