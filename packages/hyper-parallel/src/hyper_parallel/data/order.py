"""The order of samples: a permutation that is computed for each number, not stored, or none."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def permuted(numbers: NDArray[np.int64], *, count: int, seed: int | None) -> NDArray[np.int64]:
    """Return which of `count` items come at the places `numbers` of a random order.

    Each run of `count` places, an epoch, has every item once, in an order of its own. Nothing is stored: a
    generalised Feistel network over a grid of `a x b >= count` cells, whose few cells beyond `count` are walked over
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        numbers: places, from 0, of any shape.
        count: items of an epoch, at least 1.
        seed: another seed is another order; None is the order of the items themselves, in every epoch.

    >>> permuted(np.arange(10), count=5, seed=0).tolist()
    [1, 3, 2, 4, 0, 0, 2, 1, 3, 4]
    >>> permuted(np.arange(10), count=5, seed=None).tolist()
    [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    """
    if count < 1:
        raise ValueError(f"an order needs at least one item, got count={count}")
    places = np.asarray(numbers, dtype=np.int64)
    if places.size and int(places.min()) < 0:
        raise ValueError(f"places are counted from 0, got {int(places.min())}")
    if seed is None:
        return places % count
    epochs, rest = np.divmod(places.ravel(), count)
    keys = _mixed(epochs.astype(np.uint64) + _mixed(np.full(1, seed % 2**64, np.uint64)))
    rows = math.isqrt(count - 1) + 1
    columns = -(-count // rows)
    items = _network(rest.astype(np.uint64), keys, rows, columns)
    while (outside := np.flatnonzero(items >= count)).size:
        items[outside] = _network(items[outside], keys[outside], rows, columns)
    return items.astype(np.int64).reshape(places.shape)


def _network(cells: NDArray[np.uint64], keys: NDArray[np.uint64], rows: int, columns: int) -> NDArray[np.uint64]:
    """Permute the cells of a grid, by additions of one coordinate's hash to the other."""
    height, width = np.uint64(rows), np.uint64(columns)
    row, column = np.divmod(cells, width)
    for number in range(_ROUNDS):
        key = keys + np.uint64(number)
        if number % 2:
            column = (column + _mixed(row ^ key) % width) % width
        else:
            row = (row + _mixed(column ^ key) % height) % height
    return row * width + column


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64 bits to 64 bits (SplitMix64: Steele, Lea and Flood, 2014)."""
    values = (values + np.uint64(1)) * _STEP
    values = (values ^ (values >> _SHIFTS[0])) * _FIRST
    values = (values ^ (values >> _SHIFTS[1])) * _SECOND
    return values ^ (values >> _SHIFTS[2])
