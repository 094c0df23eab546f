"""Tensors of a state, of the framework or NumPy arrays, and their pieces: runs of elements that a rank has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from hp_checkpoint.disk.files import Chunk, Entry, Kind, casts_to, converted
from hp_checkpoint.port import port
from hp_dtensor import Placement
from hp_dtensor.extend import Box, TensorSpec, boxes, local_shape


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` runs of ``length`` elements, ``stride`` apart in the global tensor, and their place in the local one.

    Where a file is read, the place in the file stands for one of the two, and all numbers are bytes; it is said which.

    Attributes:
        first: the first element's index in the global tensor, row-major.
        length: elements of a run.
        count: number of runs.
        stride: elements from the start of a run to the start of the next one; 0 where there is one run.
        local: the first element's index in the local tensor, row-major.
        local_stride: the runs' distance there; 0 where there is one run.
    """

    first: int
    length: int
    count: int = 1
    stride: int = 0
    local: int = 0
    local_stride: int = 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.length * self.count

    @property
    def end(self) -> int:
        """The index after the last element in the global tensor."""
        return self.first + (self.count - 1) * self.stride + self.length


@lru_cache(maxsize=8192)
def pieces(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[Piece, ...]:
    """Return the pieces of a tensor on the rank at ``coordinate``; none where its shard is empty.

    Example:
        >>> pieces((3, 4), (Shard(1),), (2,), (1,))
        (Piece(first=2, length=2, count=3, stride=4, local=0, local_stride=2),)

    Args:
        shape: the global shape.
        placements: one for each mesh axis; ``()`` for a tensor that is not distributed.
        mesh_shape: ranks on each mesh axis.
        coordinate: the rank's index on each mesh axis.

    Raises:
        ValueError: a ``Partial``, or a placement that doesn't fit the shape.
    """
    if not prod(shape):
        return ()
    local = local_shape(shape, placements, mesh_shape, coordinate)
    return tuple(
        piece
        for box in boxes(shape, placements, mesh_shape, coordinate)
        if prod(box.sizes)
        for piece in _of_box(box, _row_major(shape), local)
    )


def chunk_pieces(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    chunk: Chunk,
) -> tuple[Piece, ...]:
    """Return the pieces of a tensor on a rank that a chunk has; ``first`` and ``stride`` count the chunk's elements.

    Example:
        >>> chunk_pieces((3, 4), (Shard(1),), (2,), (1,), Chunk((1, 0), (2, 3), "file", 0, (3, 1)))
        (Piece(first=2, length=1, count=2, stride=3, local=2, local_stride=2),)

        All of a tensor (2, 3) that is the columns 4 to 6 of a stored matrix with 100 columns, and one that is stored
        turned, of which each row is a piece:
        >>> chunk_pieces((2, 3), (), (), (), Chunk((0, 0), (2, 3), "file", 0, (100, 1)))
        (Piece(first=0, length=3, count=2, stride=100, local=0, local_stride=3),)
        >>> chunk_pieces((2, 3), (), (), (), Chunk((0, 0), (2, 3), "file", 0, (1, 2)))[1]
        Piece(first=1, length=1, count=3, stride=2, local=3, local_stride=1)

    Args:
        shape: the global shape.
        placements: as those of `pieces`.
        mesh_shape: likewise.
        coordinate: likewise.
        chunk: a box of the tensor.
    """
    if not prod(shape):
        return ()
    local = local_shape(shape, placements, mesh_shape, coordinate)
    found: list[Piece] = []
    for box in boxes(shape, placements, mesh_shape, coordinate):
        low = [max(a, b) for a, b in zip(box.offsets, chunk.offsets, strict=True)]
        ends = [(a + n, b + m) for a, n, b, m in zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)]
        sizes = tuple(min(pair) - start for pair, start in zip(ends, low, strict=True))
        if all(size > 0 for size in sizes):
            at = tuple(own + start - offset for own, start, offset in zip(box.at, low, box.offsets, strict=True))
            within = tuple(start - offset for start, offset in zip(low, chunk.offsets, strict=True))
            found += _of_box(Box(within, sizes, box.ragged, at), chunk.strides, local)
    return tuple(found)


def box_pieces(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[Piece, ...]], ...]:
    """Return the boxes of a tensor on a rank: start, sizes, and pieces whose ``first`` counts the box's own elements.

    Example:
        >>> box_pieces((3, 4), (Shard(1),), (2,), (1,))
        (((0, 2), (3, 2), (Piece(first=0, length=6, count=1, stride=0, local=0, local_stride=0),)),)

    Args:
        shape: the global shape.
        placements: as those of `pieces`.
        mesh_shape: likewise.
        coordinate: likewise.
    """
    if not prod(shape):
        return ()
    local = local_shape(shape, placements, mesh_shape, coordinate)
    return tuple(
        (box.offsets, box.sizes, tuple(_of_box(Box((0,) * len(shape), box.sizes, box.ragged, box.at), strides, local)))
        for box in boxes(shape, placements, mesh_shape, coordinate)
        if prod(box.sizes)
        for strides in [_row_major(box.sizes)]
    )


def clip(piece: Piece, start: int, stop: int) -> tuple[Piece, ...]:
    """Return the part of a piece in the range ``[start, stop)`` of the global tensor, as at most three pieces."""
    if piece.first >= start and piece.end <= stop:
        return (piece,)
    if piece.count == 1:
        low, high = max(piece.first, start), min(piece.end, stop)
        return (Piece(low, high - low, local=piece.local + low - piece.first),) if low < high else ()
    first = max(0, -((piece.first + piece.length - start - 1) // piece.stride))  # the first run that ends after start
    last = min(piece.count - 1, (stop - 1 - piece.first) // piece.stride)  # the last one that starts before stop
    if first > last:
        return ()
    edges = [number for number in dict.fromkeys((first, last)) if not _inside(piece, number, start, stop)]
    inner_first, inner_last = first + (first in edges), last - (last in edges and last != first)
    result: list[Piece] = []
    if first in edges:
        result += clip(_part(piece, first, 1), start, stop)
    if inner_first <= inner_last:
        result.append(_part(piece, inner_first, inner_last - inner_first + 1))
    if last in edges and last != first:
        result += clip(_part(piece, last, 1), start, stop)
    return tuple(result)


def scale(piece: Piece, itemsize: int, offset: int) -> Piece:
    """Convert elements to bytes of a file in which the tensor starts at ``offset``."""
    return Piece(
        offset + piece.first * itemsize,
        piece.length * itemsize,
        piece.count,
        piece.stride * itemsize,
        piece.local * itemsize,
        piece.local_stride * itemsize,
    )


def runs(piece: Piece) -> Iterator[tuple[int, int]]:
    """List (global start, local start) of each run."""
    return (
        (piece.first + number * piece.stride, piece.local + number * piece.local_stride)
        for number in range(piece.count)
    )


def gather(array: np.ndarray, start: int, length: int, count: int, stride: int) -> np.ndarray:
    """Return runs of a 1-d array as one contiguous array: a view where they touch, else a copy."""
    if count == 1 or stride == length:
        return array[start : start + length * count]
    return np.ascontiguousarray(_strided(array, start, length, count, stride)).reshape(-1)


def move(
    length: int, count: int, source: np.ndarray, start: int, stride: int, target: np.ndarray, at: int, step: int
) -> None:
    """Copy runs of a 1-d array into another one.

    Args:
        length: elements of a run.
        count: number of runs.
        source: to copy from.
        start: its first run's first element.
        stride: elements from one run to the next; any where there is one run.
        target: to copy to.
        at: its first run's first element.
        step: elements from one run to the next; any where there is one run.
    """
    if count == 1 or stride == step == length:
        target[at : at + length * count] = source[start : start + length * count]
    else:
        _strided(target, at, length, count, step)[...] = _strided(source, start, length, count, stride)


def _strided(array: np.ndarray, start: int, length: int, count: int, stride: int) -> np.ndarray:
    if start < 0 or start + (count - 1) * stride + length > len(array):
        raise IndexError(f"{count} runs of {length} from {start}, {stride} apart, in an array of {len(array)}")
    step = array.itemsize
    return np.lib.stride_tricks.as_strided(array[start:], (count, length), (stride * step, step))


def _inside(piece: Piece, number: int, start: int, stop: int) -> bool:
    begin = piece.first + number * piece.stride
    return start <= begin and begin + piece.length <= stop


def _part(piece: Piece, number: int, count: int) -> Piece:
    """Return ``count`` of the runs from ``number`` on."""
    first, local = piece.first + number * piece.stride, piece.local + number * piece.local_stride
    if count == 1:
        return Piece(first, piece.length, local=local)
    return Piece(first, piece.length, count, piece.stride, local, piece.local_stride)


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _of_box(box: Box, strides: tuple[int, ...], local: tuple[int, ...]) -> Iterator[Piece]:
    """Express a box by runs: the inner dims that are contiguous in both tensors are a run, the next ones its stride."""
    local_strides, base = _row_major(local), 0
    if box.ragged is not None:  # the local tensor has some dims flattened; the box lies in a block of them
        dim, start, block = box.ragged
        flat = local_strides[dim]
        within = tuple(flat * stride for stride in _row_major(block))
        local_strides, base = (*local_strides[:dim], *within, *local_strides[dim + 1 :]), start * flat
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    base += sum(at * stride for at, stride in zip(box.at, local_strides, strict=True))
    dims: list[tuple[int, int, int]] = []  # size, stride, local stride; the innermost last
    for size, stride, own in zip(box.sizes, strides, local_strides, strict=True):
        if dims and (dims[-1][1], dims[-1][2]) == (size * stride, size * own):
            dims[-1] = (dims[-1][0] * size, stride, own)
        elif size > 1:
            dims.append((size, stride, own))
    length = dims.pop()[0] if dims and dims[-1][1:] == (1, 1) else 1
    count, stride, own = dims.pop() if dims else (1, 0, 0)
    for indices in itertools.product(*(range(size) for size, _, _ in dims)):
        at = sum(index * each[1] for index, each in zip(indices, dims, strict=True))
        at_local = sum(index * each[2] for index, each in zip(indices, dims, strict=True))
        yield Piece(first + at, length, count, stride, base + at_local, own)


_NUMPY = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "complex64": "C64",
}
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}


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


class Cast:
    """A tensor of floating-point numbers that is saved in another dtype.

    Args:
        value: the tensor.
        own: its dtype, by its name in safetensors.
        saved: the other one.
    """

    def __init__(self, value: Any, own: str, saved: str) -> None:
        self.value, self.own, self.saved = value, own, saved
        self.shape, self._spec = value.shape, _spec(value)


def cast_to(name: str, value: Any, dtype: str) -> Any:
    """Return what saves a tensor in a dtype; the tensor itself where it has that, or no floating-point numbers."""
    own = kind_of(name, value).dtype
    return Cast(value, own, dtype) if casts_to(name, own, dtype) else value


def is_tensor(value: object) -> bool:
    """Tell tensors and arrays from the other values of a state."""
    if isinstance(value, np.ndarray):
        return True
    plain = isinstance(value, (type(None), bool, int, float, str, dict, list, tuple))
    return not plain and port().is_tensor(value)


def kind_of(name: str, value: Any) -> Kind:
    """Return dtype and global shape of a tensor.

    Raises:
        TypeError: a dtype that safetensors lacks, or a kind of tensor whose layout is not known.
    """
    if isinstance(value, Cast):
        return Kind(value.saved, kind_of(name, value.value).shape)
    array = isinstance(value, np.ndarray)
    dtype = _NUMPY.get(value.dtype.name) if array else port().dtype_of(value)
    reason = _array_refusal(value) if array else port().refusal(value)
    if dtype is None:
        reason = f"has dtype {value.dtype}, which safetensors lacks; convert it before the call"
    if dtype is None or reason is not None:
        raise TypeError(f"checkpoint: {name!r} {reason}")
    spec = _spec(value)
    return Kind(dtype, tuple(int(size) for size in (value.shape if spec is None else spec.shape)))


def _array_refusal(value: np.ndarray) -> str | None:
    """Return the reason why an array can't be saved or loaded, None where it can."""
    if not value.dtype.isnative:
        return f"has dtype {value.dtype.str}, of the other byte order; convert it, as by .astype({value.dtype.name!r})"
    if isinstance(value, np.ma.MaskedArray):
        return "is a masked array, whose mask would be lost; save its .data and its .mask"
    return None


def array_of(name: str, kind: Kind) -> np.ndarray:
    """Return an array for a tensor's values.

    Raises:
        TypeError: NumPy lacks the dtype.
    """
    try:
        return np.empty(kind.shape, _NAMES[kind.dtype])
    except (KeyError, TypeError):
        raise TypeError(
            f"checkpoint: {name!r} is {kind.dtype}, which NumPy lacks, and beside model and optimizer tensors are"
            " loaded as arrays; convert it before the call, as by .float()"
        ) from None


def holding_of(name: str, value: Any, rank: int, world_size: int) -> Holding:
    """Return a tensor's layout; a tensor that is no DTensor is complete on this rank.

    Raises:
        ValueError: a DTensor with a Partial, or on ranks that don't take part.
    """
    spec = _spec(value)
    if spec is None:
        return Holding((rank,))
    if spec.partial:
        raise ValueError(
            f"checkpoint: {name!r} is placed {spec.placements}, and no rank has elements of a Partial's value."
            " Reduce it first: tensor.reduce_partial()"
        )
    ranks = tuple(spec.mesh.ranks.reshape(-1).tolist())
    if max(ranks) >= world_size:
        raise ValueError(
            f"checkpoint: {name!r} is on the ranks {ranks}, and {world_size} take part; call without no_dist, on all"
            " ranks"
        )
    return Holding(ranks, tuple(spec.mesh.shape), tuple(spec.placements))


def local_pieces(value: Any) -> tuple[Piece, ...]:
    """Return the pieces of a tensor on this rank, in elements."""
    layout = _layout(value)
    return () if layout is None else pieces(*layout)


def local_boxes(value: Any) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[Piece, ...]], ...]:
    """Return the boxes of a tensor on this rank: start, sizes, and pieces in elements of the box."""
    layout = _layout(value)
    return () if layout is None else box_pieces(*layout)


def stored_pieces(entry: Entry, value: Any) -> Iterator[tuple[str, Piece]]:
    """List the pieces of a tensor on this rank with the files that have them, in bytes of these."""
    layout = _layout(value)
    if layout is None:
        return
    size = entry.kind.itemsize
    if not entry.chunks:
        yield from ((entry.file, scale(piece, size, entry.offset)) for piece in pieces(*layout))
    for chunk in entry.chunks:
        yield from ((chunk.file, scale(piece, size, chunk.offset)) for piece in chunk_pieces(*layout, chunk))


def _layout(value: Any) -> tuple[Any, Any, Any, Any] | None:
    """Return shape, placements, mesh shape and this rank's coordinate; None on a rank that has no part of it."""
    spec = _spec(value)
    if spec is None:
        return tuple(value.shape), (), (), ()
    coordinate = spec.mesh.get_coordinate()
    return None if coordinate is None else (spec.shape, spec.placements, tuple(spec.mesh.shape), tuple(coordinate))


def read_bytes(value: Any) -> np.ndarray:
    """Return the local bytes, row-major; a view where possible."""
    if isinstance(value, Cast):
        return converted(read_bytes(value.value), value.own, value.saved)
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return port().read_bytes(value)


def memory_of(value: Any) -> Hashable:
    """Return what is equal for two tensors that are one in memory, and have the same value at any time."""
    if isinstance(value, np.ndarray):
        return (value.ctypes.data, value.shape, value.strides, value.dtype.str) if value.size else id(value)
    return port().memory_of(value)


def written_bytes(value: Any) -> tuple[np.ndarray, Callable[[], None] | None]:
    """Return local bytes to write, and a function that brings them into the tensor, None where they are its own."""
    if not isinstance(value, np.ndarray):
        return port().written_bytes(value)
    if value.flags.c_contiguous and value.flags.writeable:
        return value.reshape(-1).view(np.uint8), None
    copy = np.ascontiguousarray(value)

    def store() -> None:
        value[...] = copy

    return copy.reshape(-1).view(np.uint8), store


def _spec(value: Any) -> TensorSpec | None:
    return getattr(value, "_spec", None) if not isinstance(value, np.ndarray) else None
