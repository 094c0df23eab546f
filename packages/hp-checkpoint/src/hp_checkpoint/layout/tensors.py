"""Tensors of a state: of the framework, or NumPy arrays, with their kind and layout."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_checkpoint.disk.files import Entry, Kind, casts_to, converted
from hp_checkpoint.layout.pieces import Piece, box_pieces, chunk_pieces, pieces, scale
from hp_checkpoint.port import port
from hp_dtensor import Placement
from hp_dtensor.extend import TensorSpec

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
    ranks = tuple(int(each) for each in spec.mesh.ranks.reshape(-1))
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
