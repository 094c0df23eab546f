"""Models written in other formats from a checkpoint on disk, in bounded memory; no framework."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hp_checkpoint.disk.files import File, Kind, index_of, lay_out
from hp_checkpoint.disk.manifest import Manifest
from hp_checkpoint.disk.storage import (
    check_space,
    local_folder,
    make_folder,
    opened,
    part_folder,
    read_small,
    sync,
    sync_folder,
    write_at,
    write_small,
)
from hp_checkpoint.formats.conversions import casts_to, converted, dtype_named
from hp_checkpoint.loading.loading import verify_files
from hp_checkpoint.loading.reads import stream
from hp_checkpoint.loading.sources import open_source

MODEL = "model"
ADAPTER = "adapter_model"
"""The part of a checkpoint that has an adapter, in place of a model: peft's name of the file."""

# What transformers' tokenizers save beside a model; which of them there are depends on the tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
_TEXTS = ("config.json", "adapter_config.json", "generation_config.json", *TOKENIZER_FILES)


def to_hugging_face(folder: Path, target: Path, *, dtype: str | None = None) -> list[str]:
    """Write a checkpoint's model, or adapter, alone as a Hugging Face folder, verified, and return its files.

    Args:
        folder: a checkpoint, one of torch.distributed.checkpoint, a Hugging Face folder, or a file, as `open_source`
            takes it.
        target: a folder that doesn't exist.
        dtype: of floating-point tensors, as "bfloat16". Default None: as they are.

    Raises:
        FileExistsError: the target exists.
        InvalidCheckpointError: a file differs from its checksums.
    """
    own = None if dtype is None else dtype_named(dtype)
    manifest, folder = opened_model(folder)
    part = model_part(manifest)
    entries = manifest.parts[part]
    kinds = {}
    for name, entry in entries.items():
        changed = own is not None and casts_to(name, entry.kind.dtype, own)
        kinds[name] = Kind(str(own), entry.kind.shape) if changed else entry.kind
    files = lay_out(part, kinds)

    def content(name: str) -> Iterator[np.ndarray]:
        for data in stream(entries[name], folder):
            yield converted(data, entries[name].kind.dtype, kinds[name].dtype)

    with new_folder(target, sum(file.size for file in files)) as place:
        names = write_files(place, files, content)
        for name in _TEXTS:
            if (folder / name).is_file():
                text = read_small(folder / name)
                write_small(place / name, with_dtype(text, dtype) if dtype and name == "config.json" else text)
                names.append(name)
    return sorted(names)


def model_part(manifest: Manifest) -> str:
    """Return the name of the part that has the model, or its adapter."""
    return ADAPTER if MODEL not in manifest.parts and ADAPTER in manifest.parts else MODEL


def opened_model(source: Path) -> tuple[Manifest, Path]:
    """Open a folder or a file that has a model, and verify the model's files; return their folder, too.

    Raises:
        ValueError: it has tensors of other parts alone.
        InvalidCheckpointError: a file differs from its checksums.
    """
    manifest, folder, _ = open_source(source)
    own = model_part(manifest)
    if own not in manifest.parts:
        raise ValueError(f"{source} has no tensors under 'model', but the parts {', '.join(manifest.parts) or 'none'}")
    if any(file.rows for file in manifest.files.values()):
        used = {file for entry in manifest.parts[own].values() for file in entry.files} | {*_TEXTS}
        files = {name: file for name, file in manifest.files.items() if name in used}
        verify_files(Manifest(None, manifest.parts, files, {}, manifest.block_bytes), folder)
    return manifest, folder


@contextmanager
def new_folder(target: Path, needed: int = 0) -> Iterator[Path]:
    """Make a folder that is renamed once it is complete and on the disk, and removed if it does not come to that.

    Args:
        target: its name, of a folder that doesn't exist.
        needed: bytes.

    Raises:
        FileExistsError: it exists.
    """
    local_folder(target)
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists; name a folder that doesn't")
    part = part_folder(target, f"{os.getpid():x}")
    make_folder(part.parent)
    part.mkdir()
    try:
        check_space(part, needed)
        yield part
        sync_folder(part)
        os.rename(part, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_files(folder: Path, files: Iterable[File], content: Callable[[str], Iterator[np.ndarray]]) -> list[str]:
    """Write safetensors, and their index where there are several; return their names.

    Args:
        folder: to write to.
        files: as `lay_out` gives them.
        content: gives the bytes of a tensor in parts, by its name.
    """
    files = list(files)
    for file in files:
        path = folder / file.name
        with opened(path, write=True) as descriptor:
            write_at(descriptor, np.frombuffer(file.header, np.uint8), 0, path)
            for entry in file.entries:
                at = entry.offset
                for data in content(entry.name):
                    write_at(descriptor, data, at, path)
                    at += len(data)
                if at != entry.offset + entry.kind.nbytes:
                    raise AssertionError(f"{entry.name!r} has {at - entry.offset} bytes, not {entry.kind.nbytes}")
            sync(descriptor, path)
    names = [file.name for file in files]
    if len(files) > 1:
        write_small(folder / f"{MODEL}.safetensors.index.json", json.dumps(index_of(files), indent=2).encode())
        names.append(f"{MODEL}.safetensors.index.json")
    return names


def with_dtype(content: bytes, dtype: str) -> bytes:
    """Return a config.json that says the dtype of the weights beside it."""
    config = json.loads(content)
    changed: Mapping[str, str] = {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    return json.dumps({**config, **changed}, indent=2, sort_keys=True).encode() if changed else content
