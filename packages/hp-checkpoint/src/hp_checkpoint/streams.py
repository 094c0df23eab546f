"""Tensors of a checkpoint on disk, range by range in the order of their elements, in bounded memory; no framework."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from hp_checkpoint.files import Chunk, Entry
from hp_checkpoint.pieces import Piece, chunk_pieces, clip, move, scale
from hp_checkpoint.storage import opened, read_at

__all__ = ["read_range", "stream"]

_CHUNK = 16 << 20


def stream(entry: Entry, folder: Path) -> Iterator[np.ndarray]:
    """List the bytes of a tensor, row-major, in parts of whole elements.

    Args:
        entry: of the tensor.
        folder: of the checkpoint.
    """
    for start in range(0, entry.kind.nbytes, _CHUNK):
        yield read_range(entry, folder, start, min(start + _CHUNK, entry.kind.nbytes))


def read_range(entry: Entry, folder: Path, start: int, stop: int) -> np.ndarray:
    """Read a range of a tensor's bytes, row-major, wherever its chunks are.

    Args:
        entry: of the tensor.
        folder: of the checkpoint.
        start: the first byte.
        stop: the end.
    """
    data = np.empty(stop - start, np.uint8)
    if not entry.chunks:
        path = folder / entry.file
        with opened(path) as descriptor:
            read_at(descriptor, data, entry.offset + start, path)
    for chunk in entry.chunks:
        parts = [part for piece in _turned(entry, chunk) for part in clip(piece, start, stop)]
        if not parts:
            continue
        path = folder / chunk.file
        with opened(path) as descriptor:
            for part in parts:
                _fill(data, start, part, descriptor, path)
    return data


def _fill(data: np.ndarray, start: int, part: Piece, descriptor: int, path: Path) -> None:
    """Read runs that are near each other at once."""
    span = (part.count - 1) * part.local_stride + part.length
    if part.count == 1:
        read_at(descriptor, data[part.first - start :][: part.length], part.local, path)
    elif span <= 2 * part.size:
        found = np.empty(span, np.uint8)
        read_at(descriptor, found, part.local, path)
        move(part.length, part.count, found, 0, part.local_stride, data, part.first - start, part.stride)
    else:
        for number in range(part.count):
            at = part.first - start + number * part.stride
            read_at(descriptor, data[at : at + part.length], part.local + number * part.local_stride, path)


@lru_cache(maxsize=1024)
def _turned(entry: Entry, chunk: Chunk) -> tuple[Piece, ...]:
    """Return a chunk's pieces in bytes of the tensor, with their places in the file as the local ones."""
    size = entry.kind.itemsize
    pieces = [scale(piece, size, chunk.offset) for piece in chunk_pieces(entry.kind.shape, (), (), (), chunk)]
    return tuple(Piece(p.local, p.length, p.count, p.local_stride, p.first, p.stride) for p in pieces)
