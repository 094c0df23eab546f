"""Which rank has which piece of a matrix, by the layout of its parameter.

Note [Streams]
    A message is the concatenation of pieces, each in row-major order of its box in the parameter. The sender and the
    receiver cut it differently: a `Region` says where in a rank's local tensor, or in the owner's buffer, the next
    elements of the message lie. Both sides list their regions in the order of matrices, and of boxes within one, so the
    orders are equal without any agreement, and each side may join regions that touch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hp_dtensor import Placement, RaggedShard
from hp_dtensor.extend import Box, boxes, local_shape
from hp_optim.muon.rules import Matrix


@dataclass(frozen=True)
class Region:
    """A part of a contiguous tensor, whose elements are read in row-major order.

    A run of ``length`` elements from ``start`` on, of the flattened tensor or of its dim ``dim``. With a ``block`` the
    run is seen as a block of these sizes, and all dims are narrowed to ``sizes`` at ``offsets``.

    Attributes:
        start: where the run starts.
        length: how many elements it has.
        dim: of the tensor; None: the flattened tensor.
        block: the sizes of the block; None: the region is the run.
        offsets: where the region starts, along each dim.
        sizes: how far it goes.
    """

    start: int
    length: int
    dim: int | None = None
    block: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.length if self.block is None else prod(self.sizes)


@dataclass(frozen=True)
class Piece:
    """What a rank has of a matrix, or a box of it.

    Attributes:
        local: where it lies in the local tensor.
        matrix: where it lies in the matrix.
    """

    local: Region
    matrix: Region

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.local.elements


@dataclass(frozen=True)
class Part:
    """What several ranks have alike of a parameter.

    Attributes:
        places: the row-major places of these ranks in the mesh, ascending.
        pieces: for each matrix of which they have something its number and the pieces.
    """

    places: tuple[int, ...]
    pieces: tuple[tuple[int, tuple[Piece, ...]], ...]


@lru_cache(maxsize=1024)
def parts_of(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    matrices: tuple[Matrix, ...],
) -> tuple[Part, ...]:
    """List what the ranks of a mesh have of a parameter's matrices; ranks that have nothing are left out.

    Args:
        shape: the global shape.
        placements: one for each axis of the mesh; none of them is partial.
        mesh_shape: ranks on each axis.
        matrices: of the parameter.
    """
    along = [_holders(placement, size) for placement, size in zip(placements, mesh_shape)]
    replicas = [range(size if placement.is_replicate() else 1) for placement, size in zip(placements, mesh_shape)]
    found = []
    for coordinate in itertools.product(*along):
        own = boxes(shape, placements, mesh_shape, coordinate) if prod(shape) else ()
        local = local_shape(shape, placements, mesh_shape, coordinate)
        pieces = []
        for number, matrix in enumerate(matrices):
            here = tuple(piece for box in own if (piece := _overlap(box, matrix, local)) is not None)
            if here:
                pieces.append((number, here))
        if pieces:
            shifts = itertools.product(*replicas)
            places = sorted(_place([a + b for a, b in zip(coordinate, shift)], mesh_shape) for shift in shifts)
            found.append(Part(tuple(places), tuple(pieces)))
    return tuple(found)


def flat_region(start: int, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Region:
    """Return a box of a contiguous block as a run of elements where it is one, else as a box.

    Args:
        start: where the block starts in the flattened tensor.
        shape: of the block.
        offsets: where the box starts in the block.
        sizes: how far it goes.
    """
    first = 0
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for dim, size in enumerate(sizes):
        if size > 1:
            first = dim
            break
    else:
        first = len(sizes)
    if all(sizes[dim] == shape[dim] for dim in range(first + 1, len(sizes))):
        at = start + sum(offset * stride for offset, stride in zip(offsets, strides))
        return Region(at, prod(sizes))
    return Region(start, prod(shape), None, tuple(shape), tuple(offsets), tuple(sizes))


def joined(regions: Sequence[tuple[int, Region]]) -> tuple[tuple[int, Region], ...]:
    """Join runs that follow one another in one tensor; see Note [Streams].

    Args:
        regions: numbers of tensors, and where in them the elements of a stream lie, in its order.
    """
    done: list[tuple[int, Region]] = []
    for number, region in regions:
        if done and region.block is None and done[-1][0] == number:
            last = done[-1][1]
            if last.block is None and last.start + last.length == region.start:
                done[-1] = number, Region(last.start, last.length + region.length)
                continue
        done.append((number, region))
    return tuple(done)


def paired(
    ones: Sequence[tuple[int, Region]], others: Sequence[tuple[int, Region]]
) -> tuple[tuple[int, Region, int, Region], ...]:
    """Cut two lists of regions of one stream at each other's borders; a region with a block is never cut.

    Args:
        ones: numbers of tensors, and regions of them.
        others: the same, of as many elements.
    """
    pairs = []
    left, right = list(reversed(ones)), list(reversed(others))
    while left:
        (number, one), (place, other) = left.pop(), right.pop()
        elements = min(one.elements, other.elements)
        if one.elements > elements:
            left.append((number, Region(one.start + elements, one.length - elements)))
            one = Region(one.start, elements)
        if other.elements > elements:
            right.append((place, Region(other.start + elements, other.length - elements)))
            other = Region(other.start, elements)
        pairs.append((number, one, place, other))
    return tuple(pairs)


def _holders(placement: Placement, size: int) -> Sequence[int]:
    """Return the coordinates on an axis that may have elements, of replicas the first one."""
    if isinstance(placement, RaggedShard):  # on a large axis nearly all have none
        return [index for index, units in enumerate(placement.units) if units]
    return range(1 if placement.is_replicate() else size)


def _place(coordinate: Sequence[int], mesh_shape: Sequence[int]) -> int:
    place = 0
    for index, size in zip(coordinate, mesh_shape):
        place = place * size + index
    return place


def _overlap(box: Box, matrix: Matrix, local: Sequence[int]) -> Piece | None:
    """Return the part of a matrix in a box that a rank has, None where there is none."""
    low = [max(a, b) for a, b in zip(box.offsets, matrix.offsets)]
    high = [min(a + n, b + m) for a, n, b, m in zip(box.offsets, box.sizes, matrix.offsets, matrix.sizes)]
    if any(a >= b for a, b in zip(low, high)):
        return None
    sizes = tuple(b - a for a, b in zip(low, high))
    inside = flat_region(0, matrix.sizes, [a - b for a, b in zip(low, matrix.offsets)], sizes)
    at = tuple(a + b - c for a, b, c in zip(box.at, low, box.offsets))
    if box.ragged is None:
        return Piece(flat_region(0, local, at, sizes), inside)
    dim, start, block = box.ragged
    if len(local) == 1:
        return Piece(flat_region(start, block, at, sizes), inside)
    return Piece(Region(start, prod(block), dim, block, at, sizes), inside)
