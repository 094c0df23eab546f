"""Files of `torch.save` with a state: its tensors in place, its values, and no code of it run."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint.disk.files import Chunk, Entry, Kind, sizes_of, whole
from hp_checkpoint.disk.manifest import FileSums, Manifest
from hp_checkpoint.disk.storage import opened, read_at
from hp_checkpoint.errors import InvalidCheckpointError, shown
from hp_checkpoint.formats.unpickling import Factory, Names, Ordered, Plain, Storage, read_pickle
from hp_checkpoint.layout.state import TensorPlace, address, top_part

# ---- names in pickles: see `unpickling` ----
_DTYPES = """
float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64
int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool
""".split()
_KINDS = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
}


def plain(name: str) -> Factory:
    """Return what stands for another library's class of this name."""
    return Factory(lambda *_: Plain(name))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a pickle: the record with its elements, and where in it they are, in elements.

    Attributes:
        storage: the record.
        offset: of the first element.
        size: its shape.
        stride: of each dim.
        dtype: its name in PyTorch.
    """

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


def _empty(kind: type) -> Factory:
    def make(*arguments: Any) -> Any:
        if arguments:
            raise ValueError(f"an ordered dictionary of {shown(arguments)}")
        return kind()

    return Factory(make)


def _size(*arguments: Any) -> tuple[int, ...]:
    (sizes,) = arguments
    if not isinstance(sizes, (tuple, list)):
        raise ValueError(f"a size of {shown(sizes)}")
    return tuple(map(whole, sizes))


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> StoredTensor:
    """Return a tensor of what torch makes one of: after the strides requires_grad, hooks, and the dtype of bytes."""
    if not isinstance(storage, Storage):
        raise ValueError(f"a tensor of {shown(storage)}")
    dtype = others[2] if storage.kind == "Untyped" else _KINDS[storage.kind]
    sizes, strides = sizes_of(size), tuple(map(whole, stride))
    if len(sizes) != len(strides) or not isinstance(dtype, str):
        raise ValueError(f"a tensor {shown(dtype)} of shape {shown(sizes)} and strides {shown(strides)}")
    return StoredTensor(storage, whole(offset), sizes, strides, dtype)


def _of_parameter(data: Any, *_: Any) -> StoredTensor:
    if not isinstance(data, StoredTensor):
        raise ValueError(f"a parameter of {shown(data)}")
    return data


def value_names(ordered: type = dict) -> dict[tuple[str, str], Factory]:
    """Return the names that a pickle of numbers, strings and containers may have.

    Args:
        ordered: what an ordered dictionary becomes.
    """
    return {("collections", "OrderedDict"): _empty(ordered), ("torch", "Size"): Factory(_size)}


def tensor_names(ordered: type = dict) -> dict[tuple[str, str], Any]:
    """Return the names that a pickle of tensors may have; see `value_names`."""
    storages = {
        (module, f"{kind}Storage"): kind for kind in (*_KINDS, "Untyped") for module in ("torch", "torch.storage")
    }
    dtypes = {("torch", name): name for name in _DTYPES}
    rebuilt = {("torch._utils", f"_rebuild_tensor_v{version}"): Factory(_tensor) for version in (2, 3)}
    parameter = {("torch._utils", "_rebuild_parameter"): Factory(_of_parameter)}
    return {**value_names(ordered), **storages, **dtypes, **rebuilt, **parameter}


# ---- archives of torch.save ----
TORCH_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
"""The dtypes of safetensors by their names in PyTorch."""

_EDGE = 4096  # bytes read at once at both ends of an archive, which have all but the elements


class Archive(io.RawIOBase):
    """The archive of `torch.save` in a range of a file.

    Args:
        descriptor: of the open file.
        path: of the file.
        offset: where the archive starts.
        length: its bytes.
        size: of the file.
        where: file and tensor, for errors.

    Raises:
        InvalidCheckpointError: the file ends before, or it is no archive.
    """

    def __init__(self, descriptor: int, path: Path, offset: int, length: int, size: int, where: str) -> None:
        if not 0 <= offset <= offset + length <= size:
            raise InvalidCheckpointError(
                f"{where} is said to be at [{offset}, {offset + length}) of {size} bytes: the file is cut off"
            )
        self._descriptor, self._path, self._offset, self._length = descriptor, path, offset, length
        self._at, self._where = 0, where
        ends = (0, min(_EDGE, length)), (max(0, length - _EDGE), length)
        self._edges = [(start, stop, self._bytes(start, stop)) for start, stop in ends]
        try:
            listed = zipfile.ZipFile(self).infolist()
        except InvalidCheckpointError:
            raise
        except Exception as error:  # whatever a damaged one leads to
            raise InvalidCheckpointError(f"{where} is no archive of torch.save: {str(error)[:300]}") from None
        self._records: dict[str, list[zipfile.ZipInfo]] = {}
        for info in listed:
            self._records.setdefault(info.filename.partition("/")[2], []).append(info)
        self._little = "byteorder" not in self._records or self.record("byteorder") == b"little"

    def elements(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Return where in the file the elements of the archive's tensor start.

        Raises:
            InvalidCheckpointError: the archive has no tensor, or one of another shape or order of elements.
        """
        tensor = self.content()
        if not isinstance(tensor, StoredTensor) or tensor.size != shape:
            got = shown(list(tensor.size)) if isinstance(tensor, StoredTensor) else type(tensor).__name__
            raise InvalidCheckpointError(f"{self._where} has {got}, expected a tensor of shape {list(shape)}")
        expected = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        if any(size > 1 and a != b for size, a, b in zip(shape, tensor.stride, expected, strict=True)) and prod(shape):
            raise InvalidCheckpointError(f"{self._where} has strides {tensor.stride}, expected a row-major tensor")
        return self.place(tensor, itemsize)

    def content(self, names: Names | None = None) -> Any:
        """Return what was saved, with a `StoredTensor` for each tensor.

        Args:
            names: what the pickle may name. Default None: what that of one tensor may.
        """
        names = tensor_names() if names is None else names
        return read_pickle(self.record("data.pkl"), names, self._where, beside=self._length)

    def place(self, tensor: StoredTensor, itemsize: int) -> int:
        """Return where in the file the elements of a tensor start.

        Raises:
            InvalidCheckpointError: they are outside of the archive, or of another byte order.
        """
        if not self._little:
            raise InvalidCheckpointError(f"{self._where} was written by a big-endian machine")
        start, stop = self._range(f"data/{tensor.storage.key}")
        first = start + tensor.offset * itemsize
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size, tensor.stride, strict=True))
        if first + (extent if prod(tensor.size) else 0) * itemsize > stop:
            raise InvalidCheckpointError(f"{self._where} has {stop - start} bytes, too few for {list(tensor.size)}")
        return self._offset + first

    def record(self, name: str) -> bytes:
        """Return the content of a record."""
        return self._bytes(*self._range(name))

    def _range(self, name: str) -> tuple[int, int]:
        found = self._records.get(name, [])
        if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
            raise InvalidCheckpointError(f"{self._where} has no record {shown(name)} that is not compressed")
        at = found[0].header_offset
        header = self._bytes(at, at + 30)
        start = at + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if start + found[0].file_size > self._length:
            raise InvalidCheckpointError(f"{self._where}: record {shown(name)} is cut off")
        return start, start + found[0].file_size

    def _bytes(self, start: int, stop: int) -> bytes:
        for low, high, content in getattr(self, "_edges", ()):
            if low <= start <= stop <= high:
                return content[start - low : stop - low]
        if not 0 <= start <= stop <= self._length:
            raise InvalidCheckpointError(f"{self._where}: [{start}, {stop}) is outside of its {self._length} bytes")
        data = np.empty(stop - start, np.uint8)
        read_at(self._descriptor, data, self._offset + start, self._path)
        return data.tobytes()

    def seekable(self) -> bool:
        """Say that `seek` works."""
        return True

    def readable(self) -> bool:
        """Say that `read` works."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"position {base + offset}")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return bytes from the position on."""
        stop = self._length if size < 0 else min(self._at + size, self._length)
        data = self._bytes(min(self._at, stop), stop)
        self._at = max(self._at, stop)
        return data


def torch_file(path: Path) -> tuple[Manifest, Any]:
    """Return the tensors of a file of `torch.save`, and the state, with a `TensorPlace` for each tensor.

    Args:
        path: of the file.

    Raises:
        InvalidCheckpointError: it is damaged, of the format before PyTorch 1.6, or names code.
    """
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        archive = Archive(descriptor, path, 0, size, size, str(path))
        state = archive.content(tensor_names(Ordered))
        if not isinstance(state, Mapping):
            raise InvalidCheckpointError(f"{path} has a {type(state).__name__}, expected a dictionary")
        top = top_part(state)
        parts: dict[str, dict[str, Entry]] = {}

        def place(tensor: StoredTensor, keys: tuple[Any, ...]) -> TensorPlace:
            at = TensorPlace(address(keys, top))
            entry = _entry(path, archive, at[1], tensor)
            if parts.setdefault(at[0], {}).setdefault(at[1], entry) is not entry:
                raise InvalidCheckpointError(f"{path} has two tensors that are {shown(at[1])} in {at[0]!r} here")
            return at

        tree = _placed(state, (), place)
    return Manifest(None, parts, {path.name: FileSums(size, ())}), tree


def _placed(value: Any, keys: tuple[Any, ...], place: Callable[[StoredTensor, tuple[Any, ...]], TensorPlace]) -> Any:
    """Return a value with the place that ``place`` gives it in the place of each tensor."""
    if isinstance(value, StoredTensor):
        return place(value, keys)
    if isinstance(value, Mapping):
        return {key: _placed(inner, (*keys, key), place) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(inner, (*keys, number), place) for number, inner in enumerate(value))
    return value


def _entry(path: Path, archive: Archive, name: str, tensor: StoredTensor) -> Entry:
    where = f"{path}: {shown(name)}"
    if tensor.dtype not in TORCH_NAMES:
        raise InvalidCheckpointError(f"{where} has dtype {shown(tensor.dtype)}, which safetensors lacks")
    if any(size > 1 and not stride for size, stride in zip(tensor.size, tensor.stride, strict=True)):
        raise InvalidCheckpointError(f"{where} repeats elements (strides {tensor.stride}); save it after .contiguous()")
    kind = Kind(TORCH_NAMES[tensor.dtype], tensor.size)
    start = archive.place(tensor, kind.itemsize)
    if tensor.stride == tuple(prod(tensor.size[dim + 1 :]) for dim in range(len(tensor.size))):
        return Entry(name, kind, path.name, start)
    return Entry(
        name, kind, path.name, start, (Chunk((0,) * len(tensor.size), tensor.size, path.name, start, tensor.stride),)
    )
