"""Folders that can be loaded: checkpoints with a manifest, and plain safetensors of a Hugging Face model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint.disk.files import Entry, check_file_name, header_length, read_header
from hp_checkpoint.disk.json_texts import strict_json
from hp_checkpoint.disk.manifest import MANIFEST, FileSums, Manifest
from hp_checkpoint.disk.storage import local_folder, opened, read_at, read_json
from hp_checkpoint.errors import InvalidCheckpointError, shown
from hp_checkpoint.formats.dcp import dcp_manifest, is_dcp
from hp_checkpoint.formats.mindspore_files import mindspore_file
from hp_checkpoint.formats.torch_files import torch_file

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
TORCH_FILES = (".pt", ".pth", ".bin")
_PICKLES = ("*.distcp", "*.bin", "*.pt", "*.pth", "*.ckpt")


def open_checkpoint(folder: Path) -> Manifest:
    """Read the manifest of a folder; that of a model's folder without one is made of its files' headers.

    Raises:
        FileNotFoundError: there is no such folder.
        InvalidCheckpointError: it is no checkpoint, or a damaged one.
        ValueError: it is a URL.
    """
    local_folder(folder)
    if not folder.is_dir():
        beside = sorted(each.name for each in folder.parent.glob("*") if (each / MANIFEST).exists())
        has = f"; {folder.parent} has the checkpoints {', '.join(beside[-5:])}" if beside else ""
        raise FileNotFoundError(f"there is no checkpoint {folder}{has}")
    if os.path.lexists(folder / MANIFEST):
        return Manifest.from_bytes(read_json(folder / MANIFEST), str(folder / MANIFEST))
    if (folder / _INDEX).exists():
        what = str(folder / _INDEX)
        names = strict_json(read_json(folder / _INDEX), what).get("weight_map")
        if not isinstance(names, dict):
            raise InvalidCheckpointError(f"{what} has the weight_map {shown(names)}, expected files by tensors")
        files = sorted({check_file_name(name, what) for name in names.values()})
        return _of_headers(folder, files)
    if (folder / _SINGLE).exists():
        return _of_headers(folder, [_SINGLE])
    if is_dcp(folder):
        return dcp_manifest(folder)
    pickles = [each.name for pattern in _PICKLES for each in folder.glob(pattern)]
    if pickles:
        raise InvalidCheckpointError(
            f"{folder} has {', '.join(sorted(pickles)[:3])}, which are pickles: loading them would run code, so they"
            " are refused. `hyper-parallel checkpoint convert FILE TARGET` reads one of torch.save without running it;"
            " else load it with the library that wrote it, and save the state with hp_checkpoint.save or safetensors"
        )
    within = sorted(each.parent for pattern in ("*", "*/*") for each in folder.glob(f"{pattern}/{MANIFEST}"))
    has = f", but the checkpoints {', '.join(map(str, within[-5:]))}: name one of them" if within else ""
    raise InvalidCheckpointError(f"{folder} is no checkpoint: it has neither {MANIFEST} nor {_SINGLE}{has}")


def open_source(path: Path) -> tuple[Manifest, Path, Any]:
    """Return the manifest of a checkpoint's folder or of a file, the folder, and the state that a file has.

    A file is one of safetensors, of `torch.save` or of `mindspore.save_checkpoint`.

    Raises:
        FileNotFoundError: there is no such folder or file.
        InvalidCheckpointError: it is damaged, or a file of another format.
    """
    if not path.is_file():
        return open_checkpoint(path), path, None
    if path.suffix == ".safetensors":
        return _of_headers(path.parent, [path.name]), path.parent, None
    if path.suffix in TORCH_FILES:
        manifest, state = torch_file(path)
        return manifest, path.parent, state
    if path.suffix == ".ckpt":
        return mindspore_file(path), path.parent, None
    raise InvalidCheckpointError(
        f"{path} is a file of another format; expected .safetensors, {', '.join(TORCH_FILES)} of torch.save, .ckpt of"
        " MindSpore, or a checkpoint's folder"
    )


def has_safetensors(folder: Path) -> bool:
    """Tell whether a folder has a model in safetensors, under the names of the Hugging Face hub."""
    return (folder / _INDEX).exists() or (folder / _SINGLE).exists()


def _of_headers(folder: Path, files: Iterable[str]) -> Manifest:
    entries: dict[str, Entry] = {}
    sizes: dict[str, FileSums] = {}
    for name in files:
        path = folder / name
        with opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            prefix = np.empty(min(8, size), np.uint8)
            read_at(descriptor, prefix, 0, path)
            try:
                content = np.empty(header_length(name, size, prefix.tobytes()), np.uint8)
                read_at(descriptor, content, 8, path)
                listed = read_header(name, size, prefix.tobytes(), content.tobytes())
            except InvalidCheckpointError as error:
                raise InvalidCheckpointError(f"{folder}: {error}") from None
        for entry in listed:
            if entry.name in entries:
                raise InvalidCheckpointError(
                    f"{folder}: tensor {shown(entry.name)} is in {entries[entry.name].file} and {name}"
                )
            entries[entry.name] = entry
        sizes[name] = FileSums(size, ())
    return Manifest(None, {"model": entries}, sizes)
