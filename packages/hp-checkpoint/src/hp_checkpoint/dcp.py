"""Checkpoints of torch.distributed.checkpoint, read in place: each tensor's chunks are ranges of its files.

Note [Files of torch.distributed.checkpoint]
    ``.metadata`` is a pickle: for each tensor its shape and its chunks (boxes), for each chunk a file and the range of
    it in which ``torch.save`` has written one tensor: a zip archive that is not compressed. So the elements of a chunk
    are a range of the file, whatever the layout that they were saved in. No pickle runs code: see `pickles`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hp_checkpoint.archives import TORCH_NAMES, Archive
from hp_checkpoint.errors import InvalidCheckpointError
from hp_checkpoint.files import DTYPES, Chunk, Entry, Kind, check_cover, check_file_name
from hp_checkpoint.manifest import MANIFEST, FileSums, Manifest
from hp_checkpoint.pickles import plain, read_pickle, value_names
from hp_checkpoint.state import Address, Unreadable, address
from hp_checkpoint.storage import opened, read_small

__all__ = ["CHECKPOINT", "METADATA", "dcp_manifest", "dcp_values", "is_dcp"]

METADATA = ".metadata"
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
        text = f"{folder / METADATA} contradicts itself: {type(error).__name__}: {error}"
        raise InvalidCheckpointError(text) from error


def _manifest(folder: Path, metadata: Any) -> Manifest:
    places, addresses = _places(folder, metadata), _addresses(metadata)
    parts: dict[str, dict[str, Entry]] = {}
    tensors: dict[tuple[str, tuple[int, ...]], tuple[Entry, tuple[int, ...]]] = {}
    listed: dict[Address, list[Chunk]] = {}
    for name, described in metadata.state_dict_metadata.items():
        if not hasattr(described, "chunks"):
            continue
        part, own = addresses[name]
        entry = Entry(own, _kind(folder, name, described), "", 0)
        parts.setdefault(part, {})[own] = entry
        for chunk in described.chunks:
            tensors[name, tuple(chunk.offsets)] = (entry, tuple(chunk.sizes))
            listed[part, own] = []
    sizes: dict[str, FileSums] = {}
    for file, infos in _by_file(places).items():
        with opened(folder / file) as descriptor:
            size = os.fstat(descriptor).st_size
            sizes[file] = FileSums(size, ())
            for (name, offsets), info in infos:
                if offsets is None or (name, offsets) not in tensors:
                    continue
                entry, shape = tensors[name, offsets]
                where = f"{folder / file}: {name!r}"
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
    places, addresses = _places(folder, metadata), _addresses(metadata)
    result: dict[Any, Any] = {}
    for name in metadata.state_dict_metadata:
        info = places.get((name, None))
        value = tensor(addresses[name]) if info is None else _value(folder, name, info)
        inner, (*above, last) = result, _path(metadata, name)
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return _with_lists(result)


def _value(folder: Path, name: str, info: Any) -> Any:
    path = folder / info.relative_path
    where = f"{path}: {name!r}"
    try:
        with opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            archive = Archive(descriptor, path, info.offset, info.length, size, where)
            return read_pickle(archive.record("data.pkl"), value_names(), where)
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
    names |= {(older, "TensorProperties"): plain("TensorProperties"), (older, "MEM_FORMAT_ENCODING"): int}
    names |= {(module, "_MEM_FORMAT_ENCODING"): int, ("torch.serialization", "_get_layout"): str}
    names |= {("torch", name): name for name in (*TORCH_NAMES, "complex128", "strided")}
    names |= {(place, "PosixPath"): _joined for place in ("pathlib", "pathlib._local")}
    content = read_small(folder / METADATA)
    metadata = read_pickle(content, {**value_names(), **names}, str(folder / METADATA))
    if type(metadata).__name__ != "Metadata" or not isinstance(getattr(metadata, "storage_data", None), dict):
        raise InvalidCheckpointError(f"{folder / METADATA} is not the metadata of {CHECKPOINT}.FileSystemWriter")
    return metadata


def _joined(*parts: str) -> str:
    return "/".join(parts)


def _places(folder: Path, metadata: Any) -> dict[tuple[str, tuple[int, ...] | None], Any]:
    """Return file, offset and length of each chunk and value, by name and the chunk's offsets."""
    result: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in metadata.storage_data.items():
        check_file_name(info.relative_path, str(folder / METADATA))
        if getattr(info, "transform_descriptors", None):
            raise InvalidCheckpointError(
                f"{folder}: {index.fqn!r} was written with {info.transform_descriptors}; only files that are not"
                " compressed are read"
            )
        offsets = getattr(index, "offset", None)
        result[index.fqn, None if offsets is None else tuple(offsets)] = info
    return result


def _by_file(places: Mapping[Any, Any]) -> dict[str, list[tuple[Any, Any]]]:
    result: dict[str, list[tuple[Any, Any]]] = {}
    for key, info in places.items():
        result.setdefault(info.relative_path, []).append((key, info))
    return result


def _path(metadata: Any, name: str) -> tuple[Any, ...]:
    paths = metadata.planner_data
    return tuple(paths[name]) if isinstance(paths, dict) and name in paths else (name,)


def _addresses(metadata: Any) -> dict[str, Address]:
    """Return the addresses that `state.flatten` gives the tensors of the state that was saved."""
    paths = {name: _path(metadata, name) for name in metadata.state_dict_metadata}
    top = "state" if any(path[0] == "model" for path in paths.values()) else "model"
    return {name: address(path, top) for name, path in paths.items()}


def _kind(folder: Path, name: str, described: Any) -> Kind:
    dtype = described.properties.fields[0]
    if dtype not in TORCH_NAMES:
        raise InvalidCheckpointError(f"{folder}: {name!r} has dtype {dtype}, which safetensors lacks")
    assert TORCH_NAMES[dtype] in DTYPES
    return Kind(TORCH_NAMES[dtype], tuple(int(size) for size in described.size))


def _with_lists(value: Any) -> Any:
    """Return nested dictionaries with lists in place of those whose keys are 0, 1, 2, ..."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(each) for key, each in value.items()}
    return [inner[at] for at in range(len(inner))] if inner and set(inner) == set(range(len(inner))) else inner
