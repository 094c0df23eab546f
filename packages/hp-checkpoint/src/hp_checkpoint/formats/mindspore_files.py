"""Files of `mindspore.save_checkpoint`, read in place.

Note [Files of mindspore.save_checkpoint]
    Such a file is a message of Protocol Buffers: a sequence of (1: value), each of them (1: name, 2: tensor), a tensor
    being (1: dims, 2: dtype, 3: elements). A large tensor is cut into several values of its name, with its elements one
    after the other. Only what is before the elements is read, a few bytes for each.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from hp_checkpoint.disk.files import Chunk, Entry, Kind, sizes_of
from hp_checkpoint.disk.manifest import FileSums, Manifest
from hp_checkpoint.disk.storage import opened, read_at
from hp_checkpoint.errors import InvalidCheckpointError, shown

_DTYPES = {f"{kind}{bits}": f"{kind[0]}{bits}" for kind in ("Float", "Int", "UInt") for bits in (8, 16, 32, 64)}
_DTYPES |= {"BFloat16": "BF16", "Bool": "BOOL", "Complex64": "C64"}
_VARINT, _BYTES = 0, 2  # how a field is written
_SUM = b"crc_num"  # begins a checksum after the last value
_SHORT = 1 << 16
_DIMS = 64


@dataclass
class _Found:
    """A tensor: its kind, and where its elements are: (offset, bytes)."""

    kind: Kind
    ranges: list[tuple[int, int]] = field(default_factory=list)


def mindspore_file(path: Path) -> Manifest:
    """Return the tensors of a file of `mindspore.save_checkpoint`, which are those of a model.

    Raises:
        InvalidCheckpointError: it is damaged, encrypted, or has something that is no tensor.
    """
    tensors: dict[str, _Found] = {}
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        message = _Message(descriptor, path)
        end = size - len(_SUM) - 10
        if end > 0 and message.content(end, end + len(_SUM)) == _SUM:
            size = end
        for number, kind, start, stop in message.fields(0, size):
            if (number, kind) != (1, _BYTES):
                raise message.wrong(start)
            name, found = _value(message, start, stop)
            known = tensors.setdefault(name, found)
            if known is not found:
                if known.kind != found.kind:
                    raise InvalidCheckpointError(f"{path}: {shown(name)} is {known.kind} and {found.kind}")
                known.ranges += found.ranges
    entries = {name: _entry(path, name, found) for name, found in tensors.items()}
    if not entries:
        raise InvalidCheckpointError(f"{path} has no tensors")
    return Manifest(None, {"model": entries}, {path.name: FileSums(os.stat(path).st_size, ())})


def _value(message: _Message, start: int, stop: int) -> tuple[str, _Found]:
    name, tensor = None, None
    for number, kind, low, high in message.fields(start, stop):
        if kind != _BYTES or number not in (1, 2):
            raise InvalidCheckpointError(
                f"{message.path}: {shown(name)} is no tensor, but a MapParameter of MindSpore; save its get_keys() and"
                " get_values() in its place"
            )
        if number == 1:
            name = message.content(low, high).decode("utf-8", "replace")
        else:
            tensor = low, high
    if name is None or tensor is None:
        raise message.wrong(start)
    shape: list[int] = []
    dtype, ranges = "", []
    for number, kind, low, high in message.fields(*tensor):
        if (number, kind) == (1, _VARINT):
            shape.append(message.varint(low)[0])
            if len(shape) > _DIMS:
                raise message.wrong(low)
        elif (number, kind) == (2, _BYTES):
            dtype = message.content(low, high).decode("utf-8", "replace")
        elif (number, kind) == (3, _BYTES):
            ranges.append((low, high - low))
        else:
            raise message.wrong(low)
    if dtype not in _DTYPES or _DTYPES[dtype] == "F8":
        raise InvalidCheckpointError(f"{message.path}: {shown(name)} has dtype {shown(dtype)}, which safetensors lacks")
    try:
        return name, _Found(Kind(_DTYPES[dtype], sizes_of(shape)), ranges)
    except ValueError as error:
        raise InvalidCheckpointError(f"{message.path}: {shown(name)}: {error}") from None


def _entry(path: Path, name: str, found: _Found) -> Entry:
    size, kind = found.kind.itemsize, found.kind
    total = sum(length for _, length in found.ranges)
    if total != kind.nbytes or any(length % size for _, length in found.ranges):
        raise InvalidCheckpointError(f"{path}: {shown(name)}, {kind}, has {total} bytes, expected {kind.nbytes}")
    if len(found.ranges) == 1:
        return Entry(name, kind, path.name, found.ranges[0][0])
    chunks, at = [], 0
    for start, length in found.ranges:
        for offsets, sizes in _boxes(kind.shape, at, at + length // size):
            strides = tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
            chunks.append(Chunk(offsets, sizes, path.name, start, strides))
            start += prod(sizes) * size
        at += length // size
    return Entry(name, kind, path.name, 0, tuple(chunks))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide a range of the row-major order of a shape into boxes of consecutive elements: (offsets, sizes)."""
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    while start < stop:
        at, within = divmod(start, inner)
        whole = 0 if within else (stop - start) // inner
        if whole:
            yield (at, *itertools.repeat(0, len(shape) - 1)), (whole, *shape[1:])
            start += whole * inner
        else:
            end = min(stop, (at + 1) * inner)
            for offsets, sizes in _boxes(shape[1:], within, end - at * inner):
                yield (at, *offsets), (1, *sizes)
            start = end


class _Message:
    """A message of Protocol Buffers in a file.

    Args:
        descriptor: of the open file.
        path: its path.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self.path = descriptor, path

    def fields(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """List the fields of a range of the file: number, how it is written, and the range of its content."""
        while start < stop:
            key, low = self.varint(start)
            if key & 7 == _BYTES:
                length, low = self.varint(low)
                high = low + length
            elif key & 7 == _VARINT:
                high = self.varint(low)[1]
            else:
                raise self.wrong(start)
            if high > stop:
                raise self.wrong(start)
            yield key >> 3, key & 7, low, high
            start = high

    def varint(self, at: int) -> tuple[int, int]:
        """Return a number, and where it ends."""
        content = self.content(at, min(at + 10, os.fstat(self._descriptor).st_size))
        value = 0
        for place, byte in enumerate(content):
            value |= (byte & 127) << (7 * place)
            if byte < 128:
                return value, at + place + 1
        raise self.wrong(at)

    def content(self, start: int, stop: int) -> bytes:
        """Return short content of the file."""
        if not 0 <= stop - start <= _SHORT:
            raise self.wrong(start)
        data = np.empty(stop - start, np.uint8)
        read_at(self._descriptor, data, start, self.path)
        return data.tobytes()

    def wrong(self, at: int) -> InvalidCheckpointError:
        """Return the error for content that is none of MindSpore's."""
        return InvalidCheckpointError(
            f"{self.path} is no file of mindspore.save_checkpoint, or encrypted, or damaged at byte {at:,}"
        )
