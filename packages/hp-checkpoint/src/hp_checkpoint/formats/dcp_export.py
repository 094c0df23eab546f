"""Checkpoints of torch.distributed.checkpoint, written from a checkpoint on disk, in bounded memory; no framework.

See Note [Files of torch.distributed.checkpoint] in `dcp`. A tensor is divided into chunks, so that none of the ranks
that load it has to read all of it.
"""

from __future__ import annotations

import itertools
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hp_checkpoint.disk.files import Entry, Kind, casts_to, converted, dtype_named
from hp_checkpoint.disk.manifest import Manifest
from hp_checkpoint.disk.storage import sync, write_small
from hp_checkpoint.errors import InvalidCheckpointError, shown
from hp_checkpoint.formats.dcp import CHECKPOINT, METADATA, is_dcp
from hp_checkpoint.formats.hugging_face import MODEL, new_folder
from hp_checkpoint.formats.torch_files import TORCH_NAMES
from hp_checkpoint.layout.state import Address, TensorPlace, decode
from hp_checkpoint.loading.loading import open_source, read_tree, verify_files
from hp_checkpoint.loading.reads import read_range
from hp_checkpoint.saving.saving import STATE

# ---- writing pickles ----


@dataclass(frozen=True, slots=True, eq=False)  # keys of dictionaries, whatever they hold
class Name:
    """A class or function, by its module and its name there."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a function returns for arguments."""

    function: Name
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Object:
    """An object of a class, made without its constructor.

    Attributes:
        kind: the class.
        state: its attributes by name, or what its ``__setstate__`` takes; None for an object without any.
    """

    kind: Name
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Something that is not in the pickle, by what its reader finds it with."""

    found_by: tuple[Any, ...]


def pickled(value: Any) -> bytes:
    """Return a pickle of protocol 2 of a value of JSON, tuples and the classes here.

    Example:
        >>> pickle.loads(pickled({"a": (1, None), "b": Call(Name("builtins", "complex"), (1.0, 2.0))}))
        {'a': (1, None), 'b': (1+2j)}

    Raises:
        TypeError: a value of another class.
    """
    parts: list[bytes] = [pickle.PROTO, b"\x02"]
    _append(value, parts.append)
    return b"".join([*parts, pickle.STOP])


def _append(value: Any, write: Callable[[bytes], None]) -> None:
    if value is None or isinstance(value, bool):
        write({None: pickle.NONE, True: pickle.NEWTRUE, False: pickle.NEWFALSE}[value])
    elif isinstance(value, int):
        write(_integer(value))
    elif isinstance(value, float):
        write(pickle.BINFLOAT + struct.pack(">d", value))
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        write(pickle.BINUNICODE + struct.pack("<I", len(text)) + text)
    elif isinstance(value, Name):
        write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
    elif isinstance(value, tuple):
        _append_all(pickle.MARK, value, pickle.TUPLE, write)
    elif isinstance(value, list):
        _append_all(pickle.EMPTY_LIST + pickle.MARK, value, pickle.APPENDS, write)
    elif isinstance(value, dict):
        items = [each for item in value.items() for each in item]
        _append_all(pickle.EMPTY_DICT + pickle.MARK, items, pickle.SETITEMS, write)
    elif isinstance(value, Call):
        _append_all(b"", (value.function, value.arguments), pickle.REDUCE, write)
    elif isinstance(value, Object):
        _append_all(b"", (value.kind, ()), pickle.NEWOBJ, write)
        if value.state is not None:
            _append_all(b"", (value.state,), pickle.BUILD, write)
    elif isinstance(value, Reference):
        _append_all(b"", (value.found_by,), pickle.BINPERSID, write)
    else:
        raise TypeError(f"{value!r} is a {type(value).__name__}, which is not written into a pickle here")


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    content = pickle.encode_long(value)
    return pickle.LONG4 + struct.pack("<i", len(content)) + content


def _append_all(before: bytes, values: Any, after: bytes, write: Callable[[bytes], None]) -> None:
    write(before)
    for each in values:
        _append(each, write)
    write(after)


Keys = tuple[str | int, ...]
Sizes = tuple[int, ...]
_CHUNK_BYTES = 64 << 20  # bytes of a tensor's chunk at most; an archive of less than 4 GiB is the older, simpler format
_FILE = 5 * 10**9
_AT_ONCE = 16 << 20
_DTYPES = {own: name for name, own in TORCH_NAMES.items()}
_SIZE = Name("torch", "Size")


def to_dcp(folder: Path, target: Path, *, dtype: str | None = None, weights_only: bool = False) -> list[str]:
    """Write a checkpoint as torch.distributed.checkpoint does, from checked bytes; return its files.

    The names are those of the state that was saved: ``model.layers.0.weight``, ``optimizer.layers.0.weight.exp_avg``,
    ``step``. The tensors of a folder without such a state, as the hub's, have the names of the model.

    Args:
        folder: a checkpoint, a Hugging Face folder, or a file, as `open_source` takes it.
        target: a folder that doesn't exist.
        dtype: of the model's floating-point tensors, as "bfloat16". Default None: as they are.
        weights_only: write the model's tensors alone, under the model's names.

    Raises:
        FileExistsError: the target exists.
        InvalidCheckpointError: a file differs from its checksums.
        ValueError: the folder is of torch.distributed.checkpoint, or two values have one name.
    """
    own = None if dtype is None else dtype_named(dtype)
    if is_dcp(folder):
        raise ValueError(f"{folder} is of torch.distributed.checkpoint already")
    manifest, folder, tree = open_source(folder)
    if weights_only and MODEL not in manifest.parts:
        raise ValueError(f"{folder} has no tensors under 'model', but the parts {', '.join(manifest.parts) or 'none'}")
    if any(file.rows for file in manifest.files.values()):
        verify_files(manifest, folder)
    if STATE in manifest.files:
        tree = decode(read_tree(manifest, folder), TensorPlace, str(folder / STATE))
    leaves = _leaves(manifest, None if weights_only else tree, str(folder))
    kinds: dict[Address, Kind] = {}
    for part, name in {leaf: None for leaf in leaves.values() if isinstance(leaf, TensorPlace)}:
        entry = manifest.parts.get(part, {}).get(name)
        if entry is None:
            raise InvalidCheckpointError(
                f"{folder} has no tensor {shown(name)} in {shown(part)}, which its values name"
            )
        changed = part == MODEL and own is not None and casts_to(name, entry.kind.dtype, own)
        kinds[part, name] = Kind(str(own), entry.kind.shape) if changed else entry.kind
    with new_folder(target, sum(kind.nbytes for kind in kinds.values())) as part_folder:
        with closing(_Files(part_folder)) as files:
            places = {at: list(_write(files, manifest.parts[at[0]][at[1]], kinds[at], folder)) for at in kinds}
            values = {name: files.archive(pickled(leaf)) for name, leaf in _values(leaves).items()}
        write_small(part_folder / METADATA, pickled(_metadata(leaves, kinds, places, values)))
        return [METADATA, *files.names]


def blocks(shape: Sizes, itemsize: int, limit: int = _CHUNK_BYTES) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide a tensor into boxes of consecutive elements, of at most ``limit`` bytes each: (offsets, sizes).

    >>> list(blocks((3, 4), 4, 32))
    [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    """
    dim = len(shape)
    while dim and prod(shape[dim - 1 :]) * itemsize <= limit:
        dim -= 1
    if not dim or not prod(shape):
        yield (0,) * len(shape), shape
        return
    inner = shape[dim:]
    rows = max(1, limit // (prod(inner) * itemsize))
    for outer in itertools.product(*(range(size) for size in shape[: dim - 1])):
        for start in range(0, shape[dim - 1], rows):
            sizes = (*(1 for _ in outer), min(rows, shape[dim - 1] - start), *inner)
            yield (*outer, start, *(0 for _ in inner)), sizes


def _leaves(manifest: Manifest, tree: Any, where: str) -> dict[Keys, Any]:
    """Return tensors and values by their paths in the state, as torch.distributed.checkpoint divides one.

    Args:
        manifest: of the checkpoint.
        tree: the state; None for the model's tensors alone.
        where: its place, for errors.
    """
    if tree is None:
        own: dict[Keys, Any] = {(name,): TensorPlace((MODEL, name)) for name in sorted(manifest.parts.get(MODEL, {}))}
        aliases = manifest.aliases.get(MODEL, {}).items()
        return own | {(name,): TensorPlace((MODEL, first)) for name, first in aliases}
    found: dict[Keys, Any] = {}
    _divide(tree, (), found)
    names: dict[str, Keys] = {}
    for path in found:
        other = names.setdefault(_dotted(path), path)
        if other != path:
            raise ValueError(f"{where}: {path} and {other} are both {_dotted(path)!r} in torch.distributed.checkpoint")
    return found


def _divide(value: Any, path: Keys, found: dict[Keys, Any]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _divide(inner, (*path, str(key)), found)
    elif isinstance(value, list) and _divided(value):
        for number, inner in enumerate(value):
            _divide(inner, (*path, number), found)
    elif isinstance(value, tuple) and not isinstance(value, TensorPlace) and _has_tensors(value):
        raise ValueError(
            f"{_dotted(path)!r} is a tuple with tensors, into which torch.distributed.checkpoint can't load"
        )
    else:
        found[path] = value


def _divided(values: list[Any]) -> bool:
    return any(isinstance(e, (Mapping, TensorPlace)) or isinstance(e, list) and _divided(e) for e in values)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, TensorPlace):
        return True
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(_has_tensors(each) for each in inner)


def _values(leaves: Mapping[Keys, Any]) -> dict[str, Any]:
    return {_dotted(path): leaf for path, leaf in leaves.items() if not isinstance(leaf, TensorPlace)}


def _dotted(path: Keys) -> str:
    return ".".join(map(str, path))


def _write(files: _Files, entry: Entry, kind: Kind, folder: Path) -> Iterator[tuple[Any, Any, Object]]:
    """Write a tensor's chunks: (offsets, sizes, place)."""
    at = 0
    for offsets, sizes in blocks(kind.shape, kind.itemsize):
        count = prod(sizes)
        first, stop = at * entry.kind.itemsize, (at + count) * entry.kind.itemsize
        data = (
            converted(read_range(entry, folder, low, min(low + _AT_ONCE, stop)), entry.kind.dtype, kind.dtype)
            for low in range(first, stop, _AT_ONCE)
        )
        yield offsets, sizes, files.archive(pickled(_tensor(kind, sizes)), data)
        at += count


def _tensor(kind: Kind, sizes: Sizes) -> Call:
    """Return the tensor of an archive's elements, as `torch.save` describes one."""
    strides = tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    storage = Name("torch.storage", "UntypedStorage")
    elements = Reference(("storage", storage, "0", "cpu", prod(sizes) * kind.itemsize))
    hooks = Call(Name("collections", "OrderedDict"), ())
    dtype = Name("torch", _DTYPES[kind.dtype])
    return Call(Name("torch._utils", "_rebuild_tensor_v3"), (elements, 0, sizes, strides, False, hooks, dtype))


def _metadata(
    leaves: Mapping[Keys, Any],
    kinds: Mapping[Address, Kind],
    places: Mapping[Address, list[tuple[Any, Any, Object]]],
    values: Mapping[str, Object],
) -> Object:
    def of(name: str, state: Any = None) -> Object:
        return Object(Name(f"{CHECKPOINT}.metadata", name), state)

    def size(sizes: Sizes) -> Call:
        return Call(_SIZE, (sizes,))

    described: dict[str, Object] = {}
    storage: dict[Object, Object] = {}
    for path, leaf in leaves.items():
        name = _dotted(path)
        if not isinstance(leaf, TensorPlace):
            described[name] = of("BytesStorageMetadata")
            storage[of("MetadataIndex", {"fqn": name, "index": None})] = values[name]
            continue
        chunks = places[leaf]
        listed = [of("ChunkStorageMetadata", {"offsets": size(at), "sizes": size(own)}) for at, own, _ in chunks]
        layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
        memory = Call(Name(f"{CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"), (0,))
        dtype = Name("torch", _DTYPES[kinds[leaf].dtype])
        properties = of("TensorProperties", (dtype, layout, False, memory, False))
        state = {"properties": properties, "size": size(kinds[leaf].shape), "chunks": listed}
        described[name] = of("TensorStorageMetadata", state)
        for number, (offsets, _, place) in enumerate(chunks):
            storage[of("MetadataIndex", {"fqn": name, "offset": size(offsets), "index": number})] = place
    state = {
        "state_dict_metadata": described,
        "planner_data": {_dotted(path): path for path in leaves},
        "storage_data": storage,
        "storage_meta": of("StorageMeta", {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}),
        "version": "1.0.0",
    }
    return of("Metadata", state)


class _Files:
    """The files of a folder, filled one after the other.

    Args:
        folder: that of the checkpoint.

    Attributes:
        names: of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self.names: list[str] = []

    def archive(self, content: bytes, elements: Iterable[np.ndarray] | None = None) -> Object:
        """Append what `torch.save` writes, and return its place.

        Args:
            content: of the pickle.
            elements: of the tensor in it, if it has one, in parts.
        """
        if self._file is None or self._file.tell() >= _FILE:
            self.close()
            self.names.append(f"__0_{len(self.names)}.distcp")
            self._file = open(self._folder / self.names[-1], "xb")
        start = self._file.tell()
        with zipfile.ZipFile(_After(self._file), "w") as archive:  # type: ignore[arg-type]
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/byteorder", sys.byteorder)
            archive.writestr("archive/version", "3\n")
            if elements is not None:
                with archive.open("archive/data/0", "w") as record:
                    for data in elements:
                        record.write(data.data)
        place = {"relative_path": self.names[-1], "offset": start, "length": self._file.tell() - start}
        return Object(Name(f"{CHECKPOINT}.filesystem", "_StorageInfo"), place)

    def close(self) -> None:
        """Write the last file to its end."""
        if self._file is not None:
            self._file.flush()
            sync(self._file.fileno(), self._folder / self.names[-1])
            self._file.close()
            self._file = None


class _After:
    """The rest of a file from where it is now, as a file of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._start = file, file.tell()
        self.write, self.flush = file.write, file.flush

    def tell(self) -> int:
        """Return the position."""
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position."""
        return self._file.seek(offset + (self._start if whence == os.SEEK_SET else 0), whence) - self._start
