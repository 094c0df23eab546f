"""An exchange as gathers of elements, for a framework whose tensors can't be written in views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from hp_optim.muon.ownership import Exchange
from hp_optim.muon.pieces import Region


@dataclass(frozen=True)
class Gathers:
    """Which elements follow one another, as indices; all tensors are flattened and concatenated.

    Attributes:
        sent: what a rank sends, of its local tensors.
        batches: the matrices that it computes, of its local tensors and, behind them, what arrived.
        results_sent: what it sends back, of its results.
        locals: its part of all results, of its own results and, behind them, what arrived.
    """

    sent: np.ndarray
    batches: np.ndarray
    results_sent: np.ndarray
    locals: np.ndarray


def gathers_of(exchange: Exchange, shapes: Sequence[tuple[int, ...]]) -> Gathers:
    """Write an exchange out.

    Args:
        exchange: a rank's.
        shapes: of its local tensors.
    """
    own = _numbered([tuple(shape) for shape in shapes])
    matrices = _numbered([(batch.elements,) for batch in exchange.batches])
    elements, computed = sum(map(np.size, own)), sum(map(np.size, matrices))
    batches = np.full(computed, -1, dtype=np.int64)
    parts = np.full(elements, -1, dtype=np.int64)
    for number, region, batch, inside in exchange.kept:
        here, there = view(own[number], region).reshape(-1), view(matrices[batch], inside).reshape(-1)
        batches[there], parts[here] = here, there
    _number(batches, matrices, exchange.received, elements)
    _number(parts, own, exchange.results_received, computed)
    # Elements of no matrix, as of an empty one, get any value.
    return Gathers(
        _listed(own, exchange.sent),
        np.maximum(batches, 0),
        _listed(matrices, exchange.results_sent),
        np.maximum(parts, 0),
    )


def view(tensor: np.ndarray, region: Region) -> np.ndarray:
    """Return a region of a contiguous array, a view: of one dim, or a box."""
    tensor = tensor.reshape(-1) if region.dim is None else tensor
    dim = region.dim or 0
    tensor = tensor[(slice(None),) * dim + (slice(region.start, region.start + region.length),)]
    if region.block is None:
        return tensor
    tensor = tensor.reshape(*tensor.shape[:dim], *region.block, *tensor.shape[dim + 1 :])
    return tensor[tuple(slice(at, at + size) for at, size in zip(region.offsets, region.sizes))]


def _numbered(shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return the places of elements in the concatenation of tensors, in these shapes."""
    made, start = [], 0
    for shape in shapes:
        made.append(np.arange(start, start + prod(shape)).reshape(shape))
        start += prod(shape)
    return made


def _listed(tensors: Sequence[np.ndarray], regions: Sequence[tuple[int, Region]]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *(view(tensors[n], region).reshape(-1) for n, region in regions)])


def _number(
    places: np.ndarray, tensors: Sequence[np.ndarray], regions: Sequence[tuple[int, Region]], start: int
) -> None:
    """Note where a stream's elements, numbered from ``start`` on, belong."""
    for number, region in regions:
        there = view(tensors[number], region).reshape(-1)
        places[there] = np.arange(start, start + there.size)
        start += there.size
