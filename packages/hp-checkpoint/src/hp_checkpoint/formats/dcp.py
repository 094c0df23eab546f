"""Checkpoints of torch.distributed.checkpoint, read in place: each tensor's chunks are ranges of its files.

Note [Files of torch.distributed.checkpoint]
    ``.metadata`` is a pickle: for each tensor its shape and its chunks (boxes), for each chunk a file and the range of
    it in which ``torch.save`` has written one tensor: a zip archive that is not compressed. So the elements of a chunk
    are a range of the file, whatever the layout that they were saved in. No pickle runs code: see `pickles`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from hp_checkpoint.disk.files import Chunk, Entry, Kind, check_cover, check_file_name, sizes_of, whole
from hp_checkpoint.disk.manifest import MANIFEST, FileSums, Manifest
from hp_checkpoint.disk.storage import bytes_beside, opened, read_small
from hp_checkpoint.errors import InvalidCheckpointError, shown
from hp_checkpoint.formats.torch_files import TORCH_NAMES, Archive, plain, value_names
from hp_checkpoint.formats.unpickling import Factory, Plain, read_pickle
from hp_checkpoint.layout.state import Address, Unreadable, address, top_part

METADATA = ".metadata"
_DEPTH = 100  # keys of a value's path
CHECKPOINT = "torch.distributed.checkpoint"


def is_dcp(folder: Path) -> bool:
    """Tell whether torch.distributed.checkpoint wrote a folder, and no checkpoint of ours took its place."""
    return os.path.lexists(folder / METADATA) and not os.path.lexists(folder / MANIFEST)


def dcp_manifest(folder: Path) -> Manifest:
    """Return the tensors of a folder that torch.distributed.checkpoint wrote, with their places in its files.

    Raises:
        InvalidCheckpointError: files that are missing or damaged, a pickle that would run code, compressed files.
    """
    try:
        return _manifest(folder, _metadata(folder))
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        if isinstance(error, InvalidCheckpointError):
            raise
        text = f"{folder / METADATA} contradicts itself: {type(error).__name__}: {str(error)[:300]}"
        raise InvalidCheckpointError(text) from error


def _manifest(folder: Path, metadata: Any) -> Manifest:
    places, addresses = _places(folder, metadata), _addresses(folder, metadata)
    parts: dict[str, dict[str, Entry]] = {}
    tensors: dict[tuple[str, tuple[int, ...]], tuple[Entry, tuple[int, ...]]] = {}
    listed: dict[Address, list[Chunk]] = {}
    for name, described in metadata.state_dict_metadata.items():
        if not hasattr(described, "chunks"):
            continue
        part, own = addresses[name]
        entry = Entry(own, _kind(folder, name, described), "", 0)
        if parts.setdefault(part, {}).setdefault(own, entry) is not entry:
            raise InvalidCheckpointError(f"{folder} has two tensors that are {shown(own)} in {part!r} here")
        listed[part, own] = []
        for chunk in described.chunks:
            tensors[name, sizes_of(chunk.offsets)] = (entry, sizes_of(chunk.sizes))
    sizes: dict[str, FileSums] = {}
    for file, infos in _by_file(places).items():
        with opened(folder / file) as descriptor:
            size = os.fstat(descriptor).st_size
            sizes[file] = FileSums(size, ())
            left = size
            for (name, offsets), info in infos:
                if offsets is None or (name, offsets) not in tensors:
                    continue
                entry, shape = tensors[name, offsets]
                where = f"{folder / file}: {shown(name)}"
                left -= prod(shape) * entry.kind.itemsize
                if left < 0:
                    raise InvalidCheckpointError(f"{where} is beyond what a file of {size:,} bytes can have")
                archive = Archive(descriptor, folder / file, info.offset, info.length, size, where)
                start = archive.elements(shape, entry.kind.itemsize)
                listed[addresses[name]].append(Chunk.dense(offsets, shape, file, start))
    for (part, own), chunks in listed.items():
        entry = parts[part][own]
        check_cover(str(folder), entry, chunks)
        parts[part][own] = Entry(own, entry.kind, chunks[0].file if chunks else "", 0, tuple(chunks))
    return Manifest(None, parts, sizes)


def dcp_values(folder: Path, tensor: Callable[[Address], Any]) -> dict[str, Any]:
    """Return the state that was saved, in nested dictionaries and lists.

    Args:
        folder: that of the checkpoint.
        tensor: returns what stands for the tensor of an address.
    """
    metadata = _metadata(folder)
    places, addresses = _places(folder, metadata), _addresses(folder, metadata)
    result: dict[Any, Any] = _Nested()
    for name, described in metadata.state_dict_metadata.items():
        info = places.get((name, None))
        if info is None and not hasattr(described, "chunks"):
            raise InvalidCheckpointError(f"{folder / METADATA} has no place of the value {shown(name)}")
        value = tensor(addresses[name]) if info is None else _value(folder, name, info)
        path = _path(folder, metadata, name)
        inner: Any = result
        for key in path[:-1]:
            inner = inner.setdefault(key, _Nested()) if type(inner) is _Nested else None
        if type(inner) is not _Nested or path[-1] in inner:
            raise InvalidCheckpointError(f"{folder / METADATA} has two values at {shown(path)}")
        inner[path[-1]] = value
    return _with_lists(result)


class _Nested(dict[Any, Any]):
    """A dictionary of the state, which is no value of it."""


def _value(folder: Path, name: str, info: Any) -> Any:
    path = folder / info.relative_path
    where = f"{path}: {shown(name)}"
    try:
        with opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            archive = Archive(descriptor, path, info.offset, info.length, size, where)
            return archive.content(value_names())
    except InvalidCheckpointError as error:
        return Unreadable(str(error))


def _metadata(folder: Path) -> Any:
    module = f"{CHECKPOINT}.metadata"
    classes = (
        "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex"
        " StorageMeta"
    )
    names: dict[tuple[str, str], Any] = {(module, name): plain(name) for name in classes.split()}
    names |= {(f"{CHECKPOINT}.filesystem", name): plain(name) for name in ("_StorageInfo", "_StoragePrefix")}
    older = "torch.distributed._shard.sharded_tensor.metadata"
    names[older, "TensorProperties"] = plain("TensorProperties")
    inert = [(older, "MEM_FORMAT_ENCODING"), (module, "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout")]
    inert += [(place, "PosixPath") for place in ("pathlib", "pathlib._local")]
    names |= {each: plain(each[1]) for each in inert}
    names |= {(place, "getattr"): Factory(_member) for place in ("builtins", "__builtin__")}
    names |= {("torch", name): name for name in (*TORCH_NAMES, "complex128", "strided")}
    path = folder / METADATA
    content = read_small(path)
    metadata = read_pickle(content, {**value_names(), **names}, str(path), beside=bytes_beside(path))
    dictionaries = [getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data")]
    if getattr(metadata, "kind", "") != "Metadata" or not all(isinstance(each, dict) for each in dictionaries):
        raise InvalidCheckpointError(f"{path} is not the metadata of {CHECKPOINT}.FileSystemWriter")
    if not all(isinstance(name, str) for name in metadata.state_dict_metadata):
        raise InvalidCheckpointError(f"{path} has a name that is no text")
    return metadata


def _member(kind: Any, name: Any) -> Plain:
    """Return what stands for a member of an enumeration, as Python 3.11.0 to 3.11.3 pickle it."""
    if not isinstance(kind, Factory) or not isinstance(name, str):
        raise ValueError(f"a member {shown(name)} of {shown(kind)}")
    return Plain(name)


def _places(folder: Path, metadata: Any) -> dict[tuple[str, tuple[int, ...] | None], Any]:
    """Return file, offset and length of each chunk and value, by name and the chunk's offsets."""
    result: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in metadata.storage_data.items():
        check_file_name(info.relative_path, str(folder / METADATA))
        name, offsets = index.fqn, getattr(index, "offset", None)
        if not isinstance(name, str):
            raise InvalidCheckpointError(f"{folder / METADATA} has the name {shown(name)}, expected a text")
        if getattr(info, "transform_descriptors", None):
            raise InvalidCheckpointError(
                f"{folder}: {shown(name)} was written with {shown(info.transform_descriptors)}; only files that are not"
                " compressed are read"
            )
        for number in (info.offset, info.length):
            whole(number)
        key = name, None if offsets is None else sizes_of(offsets)
        if result.setdefault(key, info) is not info:
            raise InvalidCheckpointError(f"{folder / METADATA} has two places of {shown(name)} at {offsets}")
    return result


def _by_file(places: Mapping[Any, Any]) -> dict[str, list[tuple[Any, Any]]]:
    result: dict[str, list[tuple[Any, Any]]] = {}
    for key, info in places.items():
        result.setdefault(info.relative_path, []).append((key, info))
    return result


def _path(folder: Path, metadata: Any, name: str) -> tuple[Any, ...]:
    paths = getattr(metadata, "planner_data", None)
    if not isinstance(paths, dict) or name not in paths:
        return (name,)
    path = paths[name]
    keys = isinstance(path, (tuple, list)) and all(isinstance(key, (str, int)) for key in path)
    if not keys or not 0 < len(path) <= _DEPTH:
        raise InvalidCheckpointError(
            f"{folder / METADATA} has {shown(name)} at {shown(path)}, expected at most {_DEPTH} keys"
        )
    return tuple(path)


def _addresses(folder: Path, metadata: Any) -> dict[str, Address]:
    """Return the addresses that `state.flatten` gives the tensors of the state that was saved."""
    paths = {name: _path(folder, metadata, name) for name in metadata.state_dict_metadata}
    top = top_part({path[0]: None for path in paths.values()})
    return {name: address(path, top) for name, path in paths.items()}


def _kind(folder: Path, name: str, described: Any) -> Kind:
    dtype = described.properties.fields[0]
    if not isinstance(dtype, str) or dtype not in TORCH_NAMES:
        raise InvalidCheckpointError(f"{folder}: {shown(name)} has dtype {shown(dtype)}, which safetensors lacks")
    return Kind(TORCH_NAMES[dtype], sizes_of(described.size))


def _with_lists(value: Any) -> Any:
    """Return nested dictionaries with lists in place of those whose keys are 0, 1, 2, ..."""
    if type(value) is not _Nested:
        return value
    inner = {key: _with_lists(each) for key, each in value.items()}
    return [inner[at] for at in range(len(inner))] if inner and set(inner) == set(range(len(inner))) else inner
