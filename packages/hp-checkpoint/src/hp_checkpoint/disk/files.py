"""Files of a checkpoint: safetensors whose content follows from the tensors' names, shapes and dtypes; conversions.

Every rank computes each file's name, header and offsets by itself, so all ranks write their pieces into shared files at
the same time. Names and index are those of the Hugging Face hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hp_checkpoint.disk.storage import check_values, strict_json
from hp_checkpoint.errors import InvalidCheckpointError, shown

DTYPES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""The dtypes of safetensors, and the bytes of an element."""

PAGE = 4096
LIMIT = 5 * 10**9
"""Bytes of a file, unless one tensor alone has more."""
_DIMS = 64  # of a tensor, as PyTorch has them
_ELEMENTS = 2**59  # of a tensor, so that its bytes and strides are numbers of 64 bits
_HEADER_LIMIT = 100 * 10**6  # safetensors' own readers take no more
_METADATA = "__metadata__"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


@dataclass(frozen=True, slots=True)
class Kind:
    """Dtype (by its name in safetensors) and global shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the complete tensor."""
        return prod(self.shape) * DTYPES[self.dtype]


class Chunk(NamedTuple):
    """A box of a tensor that is stored by itself.

    Attributes:
        offsets: the box's start in the tensor.
        sizes: its length along each dim.
        file: the file that has it.
        offset: of its first element in the file, in bytes.
        strides: from an element to the next one along each dim in the file, in elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    strides: tuple[int, ...]

    @staticmethod
    def dense(offsets: tuple[int, ...], sizes: tuple[int, ...], file: str, offset: int) -> Chunk:
        """Return a chunk whose elements are side by side in the file, row-major."""
        return Chunk(offsets, sizes, file, offset, _row_major(sizes))


@lru_cache(maxsize=1024)
def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint: its name, kind, file, and the offset in bytes of its first element in the file.

    Of a tensor that is stored in chunks (a view with gaps is one chunk) those alone say where it is: file is the first
    one's or "", and offset means nothing. A tensor without elements may have neither.
    """

    name: str
    kind: Kind
    file: str
    offset: int
    chunks: tuple[Chunk, ...] = ()

    @property
    def files(self) -> frozenset[str]:
        """The files that have the tensor."""
        return frozenset(chunk.file for chunk in self.chunks) or frozenset({self.file} - {""})


@dataclass(frozen=True, slots=True)
class File:
    """A safetensors file: its name, the bytes before the first tensor, its size, and its tensors."""

    name: str
    header: bytes
    size: int
    entries: tuple[Entry, ...]


def lay_out(part: str, tensors: Mapping[str, Kind], *, limit: int = LIMIT) -> tuple[File, ...]:
    """Distribute tensors over files, in the order of their names.

    Inside a file those with the largest elements come first, so that each is aligned to its own elements. The header is
    padded, so that the first tensor starts at a page.

    Args:
        part: the files' first word: "model" for ``model.safetensors``, or ``model-00001-of-00002.safetensors``.
        tensors: by name.
        limit: bytes of a file, unless one tensor alone has more. Default 5 GB.

    Raises:
        ValueError: a name that safetensors reserves, or a header longer than its readers take.
    """
    if _METADATA in tensors:
        raise ValueError(f"save: a tensor is named {_METADATA!r}, a name that safetensors reserves; rename it")
    groups: list[list[str]] = [[]]
    filled = 0
    for name in sorted(tensors):
        if groups[-1] and filled + tensors[name].nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += tensors[name].nbytes
    if len(groups) == 1:
        return (packed_file(f"{part}.safetensors", groups[0], tensors),)
    count = len(groups)
    return tuple(
        packed_file(f"{part}-{number:05d}-of-{count:05d}.safetensors", names, tensors)
        for number, names in enumerate(groups, 1)
    )


def index_of(files: Sequence[File]) -> dict[str, Any]:
    """Return the content of ``model.safetensors.index.json``, which transformers reads where files are several."""
    entries = [entry for file in files for entry in file.entries]
    return {
        "metadata": {"total_size": sum(entry.kind.nbytes for entry in entries)},
        "weight_map": {entry.name: entry.file for entry in sorted(entries, key=lambda entry: entry.name)},
    }


def read_header(file: str, size: int, prefix: bytes, content: bytes) -> tuple[Entry, ...]:
    """Check a safetensors file's header and list its tensors.

    Args:
        file: the file's name.
        size: its bytes.
        prefix: its first 8 bytes, the header's length.
        content: the header.

    Raises:
        InvalidCheckpointError: the header is longer than the file, no JSON, or describes tensors that overlap, that lie
            outside of the file, or that have a dtype that is not known.
    """
    start = 8 + header_length(file, size, prefix)
    check_values(content, size - start, f"the header of {file}")
    header = strict_json(content, f"the header of {file}")
    header.pop(_METADATA, None)
    entries = []
    for name, description in header.items():
        try:
            dtype, shape = str(description["dtype"]), sizes_of(description["shape"])
            begin, end = map(whole, description["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise InvalidCheckpointError(
                f"{file}: tensor {shown(name)} is described by {shown(description)}; expected dtype, shape and"
                " data_offsets"
            ) from None
        if dtype not in DTYPES:
            raise InvalidCheckpointError(
                f"{file}: tensor {shown(name)} has dtype {shown(dtype)}, which is not one of {', '.join(DTYPES)}"
            )
        kind = Kind(dtype, shape)
        if begin > end or end - begin != kind.nbytes or start + end > size:
            raise InvalidCheckpointError(
                f"{file}: tensor {shown(name)}, {dtype} of shape {list(shape)}, needs {kind.nbytes} bytes, and is said"
                f" to be at [{begin}, {end}) of {size - start}: the file is cut off, or its header is wrong"
            )
        entries.append(Entry(name, kind, file, start + begin))
    check_overlaps(file, [(entry.offset, entry.kind.nbytes, entry.name) for entry in entries])
    return tuple(entries)


def header_length(file: str, size: int, prefix: bytes) -> int:
    """Return the length of a header, from a file's first 8 bytes.

    Raises:
        InvalidCheckpointError: it is longer than the file, or than the readers of safetensors take.
    """
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8:
        raise InvalidCheckpointError(
            f"{file}: its header would have {length} bytes, and the file has {size}: it is cut off, or no safetensors"
        )
    if length > _HEADER_LIMIT:
        raise InvalidCheckpointError(
            f"{file}: its header has {length} bytes, readers of safetensors take {_HEADER_LIMIT}"
        )
    return length


def check_file_name(name: str, what: str) -> str:
    """Return a file's name if it is one of the checkpoint's own folder.

    Raises:
        InvalidCheckpointError: it has a folder, as ``../x``.
    """
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise InvalidCheckpointError(f"{what} names the file {shown(name)}; expected a file of the same folder")
    return name


def whole(value: Any) -> int:
    """Return a number of a file's JSON, which has to be whole and at least 0.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{shown(value)} is no whole number from 0 on")
    return value


def all_whole(values: Collection[Any]) -> None:
    """Refuse numbers of which one is not `whole`; many are checked at once.

    Raises:
        ValueError: one is something else.
    """
    if set(map(type, values)) - {int} or min(values, default=0) < 0:
        for value in values:
            whole(value)


def sizes_of(values: Iterable[Any]) -> tuple[int, ...]:
    """Return a shape of a file, whose elements a program can count.

    Raises:
        ValueError: it is none.
    """
    sizes = tuple(map(whole, values))
    if len(sizes) > _DIMS or prod(size or 1 for size in sizes) > _ELEMENTS:
        raise ValueError(f"{shown(list(sizes))} is no shape of a tensor")
    return sizes


def check_overlaps(file: str, ranges: Iterable[tuple[int, int, str]]) -> None:
    """Check that no byte belongs to two tensors.

    Args:
        file: its name, for errors.
        ranges: first byte, number of bytes and name of each tensor.

    Raises:
        InvalidCheckpointError: one does.
    """
    end, before = 0, ""
    for offset, nbytes, name in sorted(ranges):
        if nbytes and offset < end:
            raise InvalidCheckpointError(f"{file}: the tensors {before!r} and {name!r} overlap")
        if nbytes:
            end, before = offset + nbytes, name


def check_cover(where: str, entry: Entry, chunks: Sequence[Chunk]) -> None:
    """Check that the chunks are the tensor, each element once.

    Raises:
        InvalidCheckpointError: they overlap, leave elements out, or reach beyond the tensor.
    """
    shape, text = entry.kind.shape, f"{where}: tensor {shown(entry.name)} of shape {list(entry.kind.shape)}"
    wrong = [chunk for chunk in chunks if not len(chunk.offsets) == len(chunk.sizes) == len(shape)]
    if not wrong:
        low = np.array([chunk.offsets for chunk in chunks]).reshape(len(chunks), len(shape))
        sizes = np.array([chunk.sizes for chunk in chunks]).reshape(len(chunks), len(shape))
        outside = (low < 0) | (sizes < 0) | (low > np.array(shape) - sizes)
        wrong = [chunks[at] for at in np.flatnonzero(outside.any(1)).tolist()]
    for chunk in wrong:
        raise InvalidCheckpointError(f"{text} has a chunk of {list(chunk.sizes)} at {list(chunk.offsets)}")
    counts = [prod(chunk.sizes) for chunk in chunks]
    if sum(counts) != prod(shape):
        raise InvalidCheckpointError(f"{text} has chunks of {sum(counts):,} elements")
    filled = np.flatnonzero(counts)
    if len(filled) > 1:
        along = max(range(len(shape)), key=lambda dim: len(set(low[:, dim].tolist())))
        order = filled[np.argsort(low[filled, along], kind="stable")]
        low, chunks = low[order], [chunks[at] for at in order.tolist()]
        high = low + sizes[order]
        # Sorted along a dim, so those that begin behind a chunk's end there, and all after them, are apart from it.
        stops = np.searchsorted(low[:, along], high[:, along])
        for one in np.flatnonzero(stops > np.arange(1, len(chunks) + 1)).tolist():
            stop = int(stops[one])
            both = (np.maximum(low[one], low[one + 1 : stop]) < np.minimum(high[one], high[one + 1 : stop])).all(1)
            if both.any():
                other = one + 1 + int(both.argmax())
                raise InvalidCheckpointError(f"{text} has chunks that overlap: {chunks[one]} and {chunks[other]}")


def packed_file(file: str, names: Sequence[str], tensors: Mapping[str, Kind]) -> File:
    """Lay tensors out in one file, those with the largest elements first.

    Args:
        file: its name.
        names: of its tensors.
        tensors: their kinds by name.

    Raises:
        ValueError: a header longer than the readers of safetensors take.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}  # what transformers asks for
    order = sorted(names, key=lambda name: (-tensors[name].itemsize, name))
    offset, offsets = 0, {}
    for name in order:
        kind = tensors[name]
        offsets[name] = offset
        header[name] = {
            "dtype": kind.dtype,
            "shape": list(kind.shape),
            "data_offsets": [offset, offset + kind.nbytes],
        }
        offset += kind.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(len(text) + 8) % PAGE)
    if len(text) > _HEADER_LIMIT:
        raise ValueError(f"save: the header of {file} would have {len(text)} bytes, readers take {_HEADER_LIMIT}")
    start = 8 + len(text)
    entries = tuple(Entry(name, tensors[name], file, start + offsets[name]) for name in order)
    return File(file, len(text).to_bytes(8, "little") + text, start + offset, entries)


FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CONVERTED_ELEMENTS = 1 << 20  # at a time


def name_of_dtype(dtype: Any) -> str:
    """Return the name of a framework's dtype, or of one that is named already.

    >>> name_of_dtype("bfloat16")
    'bfloat16'
    """
    return str(dtype).rpartition(".")[2].lower()  # torch.bfloat16, Float16


def dtype_named(name: str) -> str:
    """Return a floating-point dtype by its name, as "bfloat16".

    Raises:
        ValueError: it is none to convert to.
    """
    if name not in _NAMES:
        raise ValueError(f"dtype {name!r} is none to convert to; expected one of {', '.join(_NAMES)}")
    return _NAMES[name]


def converts(source: str, target: str) -> bool:
    """Tell whether a dtype is converted to another one, by their names in safetensors."""
    return {source, target} <= {*FLOATS, "BF16"}


def casts_to(name: str, source: str, target: str) -> bool:
    """Tell whether a tensor is converted where floating-point ones are asked for in another dtype.

    Raises:
        ValueError: it has numbers of eight bits, which have scales beside them.
    """
    if source.startswith("F8"):
        raise ValueError(f"{name!r} is {source}, which is not converted: its scales are other tensors")
    return source != target and converts(source, target)


def converted(data: np.ndarray, source: str, target: str) -> np.ndarray:
    """Convert elements as ``tensor.to(dtype)`` of the frameworks does: to the nearest number, to the even one of two.

    Args:
        data: bytes of the elements.
        source: their dtype, by its name in safetensors.
        target: the one to convert to.
    """
    if source == target:
        return data
    count = len(data) // DTYPES[source]
    result = np.empty(count * DTYPES[target], np.uint8)
    for start in range(0, count, _CONVERTED_ELEMENTS):
        stop = min(start + _CONVERTED_ELEMENTS, count)
        values = _decoded(data[start * DTYPES[source] : stop * DTYPES[source]], source)
        result[start * DTYPES[target] : stop * DTYPES[target]] = _encoded(values, target)
    return result


def _decoded(data: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (_aligned(data, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _aligned(data, FLOATS[dtype])


def _encoded(values: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != "BF16":
            return values.astype(FLOATS[dtype]).view(np.uint8)
        bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16).view(np.uint8)


def _aligned(data: np.ndarray, dtype: type) -> np.ndarray:
    data = np.ascontiguousarray(data)
    return data.view(dtype) if data.ctypes.data % np.dtype(dtype).itemsize == 0 else data.copy().view(dtype)
