"""Which states are coded in eight bits, and whether a layout leaves their blocks whole.

Note [Blocks of elements]
    A block is 256 elements that follow one another in the whole parameter, in row-major order; the last one may have
    fewer. All of a block is on one rank, so its scale and its codes do not depend on the layout. Which parameters are
    coded depends on the number of elements of the whole parameter, not of a rank's part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from hp_dtensor import Placement
from hp_dtensor.extend import Box, boxes

BLOCK = 256
"""Elements that have one scale."""
CODED_NUMEL = 4096
"""Parameters with fewer elements keep states in float32: they are few bytes, and often norms and biases."""


def check_blocks(
    name: str, shape: Sequence[int], placements: tuple[Placement, ...] = (), mesh_shape: tuple[int, ...] = ()
) -> None:
    """Raise, on all ranks alike, for a parameter whose layout cuts blocks; see Note [Blocks of elements].

    Args:
        name: of the parameter.
        shape: of the whole parameter.
        placements: one for each axis of its mesh.
        mesh_shape: ranks on each axis.

    Raises:
        ValueError: some rank has a part of a block.
    """
    if leaves_blocks_whole(tuple(shape), placements, mesh_shape):
        return
    raise ValueError(
        f"AdamW8bit: parameter {name!r} of shape {tuple(shape)}, placed {placements} on a mesh of {mesh_shape}, is cut"
        f" inside of blocks of {BLOCK} elements, so its states would depend on the layout."
        " fully_shard cuts large parameters between blocks; with shard_placement_fn, as with a Shard of your own, each"
        f" rank needs multiples of {BLOCK} elements of a row, or whole rows of them. Or give the parameter to AdamW"
    )


@lru_cache(maxsize=1024)
def leaves_blocks_whole(shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> bool:
    """Tell whether each block is on one rank, whole and in the order of its elements.

    Args:
        shape: of the whole parameter.
        placements: one for each axis of its mesh; none of them is partial.
        mesh_shape: ranks on each axis.
    """
    ranks = [range(1 if each.is_replicate() else size) for each, size in zip(placements, mesh_shape)]
    elements = prod(shape)
    if not elements:
        return True
    for coordinate in itertools.product(*ranks):
        end, local = -1, 0
        for box in boxes(shape, placements, mesh_shape, coordinate):
            for start, length, step, count in _runs(box, shape):
                if count > 1 and (step % BLOCK or length % BLOCK):
                    return False
                if start != end and (start % BLOCK or local % BLOCK):
                    return False
                end, local = start + step * (count - 1) + length, local + length * count
        if end % BLOCK and end not in (-1, elements):
            return False
    return True


def _runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """List a box's runs of elements as starts, lengths, steps from one to the next, and how many there are so."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length, dim = 1, len(shape)
    while dim and (length == strides[dim - 1]):
        dim -= 1
        length *= box.sizes[dim]
    if not dim:
        yield sum(a * b for a, b in zip(box.offsets, strides)), length, 0, 1
        return
    rows = [range(offset, offset + size) for offset, size in zip(box.offsets[: dim - 1], box.sizes[: dim - 1])]
    inner = sum(a * b for a, b in zip(box.offsets[dim - 1 :], strides[dim - 1 :]))
    for index in itertools.product(*rows):
        yield sum(a * b for a, b in zip(index, strides)) + inner, length, strides[dim - 1], box.sizes[dim - 1]
