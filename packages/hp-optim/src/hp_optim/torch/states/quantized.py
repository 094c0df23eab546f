"""States in eight bits: codes, a step of AdamW on them, and the layouts that leave their blocks whole.

Note [Codes]
    Elements are divided by the largest magnitude of their block, and are then at most 1. Their code is the upper bits
    of a float32, counted down from that of 1: for ``exp_avg`` a sign, four bits of exponent and three of mantissa, for
    the root of ``exp_avg_sq`` four bits of each. So steps are relative to the value, over five decades; taking the root
    doubles these, and its relative precision is that of the update's denominator. The root is never rounded to zero.

    A code moves only if the average changes by a part of a step, and averages change by less. So before bits are cut
    off, a part of a step is added that differs from one element to the next and from one optimizer step to the next
    and is uniform in the long run: what is cut off comes back on average. It depends on the place in the block
    and on the count of steps alone, not on the layout.

    Decoded, the largest magnitude of a block is exact, and coding the decoded values again, to the nearest, gives the
    same codes: states are saved in float32 without a loss.

Note [Blocks of elements]
    A block is 256 elements that follow one another in the whole parameter, in row-major order; the last one may have
    fewer. All of a block is on one rank, so its scale and its codes do not depend on the layout. Which parameters are
    coded depends on the number of elements of the whole parameter, not of a rank's part.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hp_dtensor import Placement
from hp_dtensor.extend import Box, boxes
from hp_platform import get_platform

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


_ONE = 127 << 23
_MEAN = 20
_ROOT = 19
_ROWS = 2048
"""Blocks that a CPU updates at a time, so that what is in between stays in its cache."""
_NO_COMPILER = ("BackendCompilerFailed", "InductorError")
"""Errors of torch.compile, raised before anything has run."""
_UP = 1.0 + 2.0**-22
"""Above the rounding of a reciprocal: the largest magnitude of a block becomes no less than 1."""


def dithers(step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is added before bits are cut off, for both states; see Note [Codes].

    Args:
        step: count of steps.
    """
    place = torch.arange(BLOCK, dtype=torch.int64, device=step.device)
    fraction = (place * 2654435769 + step.to(torch.int64) * 3242174889) & 0xFFFFFFFF
    return (fraction >> (32 - _MEAN)).to(torch.int32), (fraction >> (32 - _ROOT)).to(torch.int32)


def nearest(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for rounding to the nearest."""
    return (
        torch.full((BLOCK,), 1 << (_MEAN - 1), dtype=torch.int32, device=device),
        torch.full((BLOCK,), 1 << (_ROOT - 1), dtype=torch.int32, device=device),
    )


def decoded_mean(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``exp_avg``, of ``[blocks, 256]`` codes and a scale for each block."""
    number = codes.to(torch.int32)
    size = ((number.abs() << _MEAN) + (_ONE - (127 << _MEAN))).view(torch.float32)
    return torch.where(number == 0, 0.0, torch.where(number < 0, -size, size)) * scales[:, None]


def _decoded_root(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return ((codes.to(torch.int32) << _ROOT) + (_ONE - (255 << _ROOT))).view(torch.float32) * scales[:, None]


def decoded_square(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``exp_avg_sq``, of ``[blocks, 256]`` codes and a scale for each block."""
    return _decoded_root(codes, scales).square()


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    return (_UP / torch.where(scales > 0, scales, 1.0))[:, None]


def encoded_mean(values: torch.Tensor, dither: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of ``exp_avg``, of ``[blocks, 256]``."""
    sizes = values.abs()
    scales = sizes.amax(1)
    bits = (sizes * _inverse(scales)).view(torch.int32) + (dither - (_ONE - (127 << _MEAN)))
    number = (bits >> _MEAN).clamp(0, 127)
    return torch.where(values < 0, -number, number).to(torch.int8), scales


def _encoded_root(roots: torch.Tensor, dither: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = roots.amax(1)
    bits = (roots * _inverse(scales)).view(torch.int32) + (dither - (_ONE - (255 << _ROOT)))
    return (bits >> _ROOT).clamp(0, 255).to(torch.uint8), scales


def encoded_square(values: torch.Tensor, dither: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of ``exp_avg_sq``, of ``[blocks, 256]``."""
    return _encoded_root(values.sqrt(), dither)


def _update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    root: torch.Tensor,
    mean_scale: torch.Tensor,
    root_scale: torch.Tensor,
    mean_dither: torch.Tensor,
    root_dither: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """Take a step of AdamW in place; ``numbers``: see `hp_optim.torch.adamw8bit`."""
    gradient = gradient.to(torch.float32)
    average = decoded_mean(mean, mean_scale) * numbers[3] + gradient * numbers[4]
    before = _decoded_root(root, root_scale)
    after = (before * before * numbers[5] + gradient * gradient * numbers[6]).sqrt()
    weight = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
    parameter.copy_(weight * numbers[0] - numbers[1] * (average / (after * numbers[2] + numbers[7])))
    codes, scales = encoded_mean(average, mean_dither)
    mean.copy_(codes)
    mean_scale.copy_(scales)
    codes, scales = _encoded_root(after, root_dither)
    root.copy_(codes)
    root_scale.copy_(scales)


def update(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], compiled: bool | None) -> None:
    """Take a step in place.

    Args:
        tensors: a parameter, its gradient, the codes of both states and their scales, each of as many blocks.
        others: what `dithers` returns, and the step's numbers.
        compiled: compile it. Default: on CPU and CUDA.
    """
    device, blocks = get_platform().devices.kind_of(tensors[0].device), len(tensors[0])
    if blocks == 1:  # compiled code for one block would be other code
        pairs = [torch.cat([each, each]) for each in tensors]
        update(pairs, others, compiled)
        for each, pair in zip(tensors, pairs):
            each.copy_(pair[:1])
        return
    run = _compiled() if compiled or (compiled is None and device in ("cpu", "cuda")) else _update
    pieces = -(-blocks // _ROWS) if device == "cpu" else 1
    for parts in zip(*(each.tensor_split(pieces) for each in tensors)):
        run(*(part.data for part in parts), *others)  # .data: compiled code looks at what a view is a view of


@functools.cache
def _compiled() -> Callable[..., None]:
    """Return `_update` compiled, or as it is where torch can't."""
    chosen: Any = torch.compile(_update, dynamic=True, fullgraph=True)

    def run(*tensors: torch.Tensor) -> None:
        nonlocal chosen
        try:
            with _disable_current_modes():  # for a dispatch mode, torch would refuse to make one graph of it
                chosen(*tensors)
        except RuntimeError as error:
            if type(error).__name__ not in _NO_COMPILER:
                raise
            warnings.warn(
                "AdamW8bit: torch.compile failed, so steps run uncompiled, which is many times as slow on CPU. It needs"
                f" a C++ compiler there; compiled=False is silent. {' '.join(str(error).split()[:40])}",
                RuntimeWarning,
                stacklevel=2,
            )
            chosen = _update
            chosen(*tensors)

    return run
