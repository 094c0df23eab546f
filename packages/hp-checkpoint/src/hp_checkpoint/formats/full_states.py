"""Complete states of one process: read from checkpoints, written as checkpoints, converted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hp_checkpoint.api import (
    FileSystemReader,
    HuggingFaceStorageReader,
    bytes_of,
    flattened,
    read_values,
    save,
    versions,
)
from hp_checkpoint.disk.manifest import Manifest
from hp_checkpoint.disk.storage import local_folder
from hp_checkpoint.errors import InvalidCheckpointError, Ranks, shown
from hp_checkpoint.formats.dcp_export import to_dcp
from hp_checkpoint.formats.hugging_face import MODEL
from hp_checkpoint.layout.state import Address, unreadable
from hp_checkpoint.layout.tensors import is_tensor
from hp_checkpoint.loading.loading import TORCH_FILES, load_tensors
from hp_checkpoint.port import port
from hp_checkpoint.saving.saving import save_state

Folder = str | os.PathLike[str]


def save_checkpoint(path: Folder, state: Mapping[str, Any]) -> None:
    """Save a complete state of this process alone.

    Args:
        path: the folder; a checkpoint there is replaced.
        state: as that of `save`, of plain tensors.

    Raises:
        CheckpointError: it failed.
        TypeError: a value that is neither a tensor nor JSON.
    """
    save(state, checkpoint_id=path, no_dist=True)


def load_checkpoint(path: Folder) -> dict[str, Any]:
    """Load a complete state in this process alone, and return it.

    Example:
        >>> save_checkpoint("first", {"model": {"w": w}, "step": 3})
        >>> load_checkpoint("first")["step"]
        3

    Args:
        path: the folder of any checkpoint: of `save_checkpoint`, of all ranks, of torch.distributed.checkpoint, or a
            Hugging Face model's.

    Returns:
        The state, with plain tensors of the framework on the host.

    Raises:
        CheckpointError: its files can't be read.
        ValueError: a value that can't be read without running code.
    """
    return _full_state(local_folder(path), FileSystemReader(path).open())


def dcp_to_full_state_dict(dir: Folder) -> dict[str, Any]:
    """Return the complete state of a checkpoint that several ranks saved, in this process alone.

    Args:
        dir: the folder of a checkpoint, or of one of torch.distributed.checkpoint.

    Raises:
        CheckpointError: its files can't be read.
        ValueError: a value that can't be read without running code.
    """
    return load_checkpoint(dir)


def parse_checkpoint_from_huggingface(dir: Folder) -> dict[str, Any]:
    """Return the tensors of a Hugging Face model's folder by name, in this process alone.

    Args:
        dir: a folder with safetensors.

    Raises:
        CheckpointError: its files can't be read.
        InvalidCheckpointError: it has no safetensors.
    """
    manifest = HuggingFaceStorageReader(dir).open()
    return _full_state(local_folder(dir), manifest)


def save_state_dict_as_huggingface_format(
    dir: Folder, state_dict: Mapping[str, Any], max_shard_size: int | str = "5GB"
) -> None:
    """Save tensors by name as the safetensors of a Hugging Face model; all ranks call it together.

    A model's `config.json` is not written: `save_model` does that, of a model that has one.

    Args:
        dir: the folder; a checkpoint there is replaced.
        state_dict: tensors by name, in any layout.
        max_shard_size: of a file, unless one tensor has more.

    Raises:
        CheckpointError: it failed on some rank; on all ranks.
        TypeError: a value that is no tensor.
    """
    ranks = Ranks()
    options: list[Any] = []

    def check() -> bytes:
        options.extend([local_folder(dir), bytes_of(max_shard_size)])
        for name, value in state_dict.items():
            if not is_tensor(value):
                raise TypeError(
                    f"checkpoint: {name!r} is a {type(value).__name__}; a Hugging Face model has tensors alone"
                )
        return b""

    ranks.agree(check, "save")
    state = flattened({MODEL: state_dict}, ranks)
    save_state(state, options[0], ranks, versions=versions(), limit=options[1], layout="files")


def convert_full_checkpoint_to_dcp(src: Folder, dst: Folder, src_platform: Literal["torch", "mindspore"]) -> None:
    """Write a complete checkpoint so that torch.distributed.checkpoint loads it into any layout, in bounded memory.

    Args:
        src: a checkpoint's or a Hugging Face model's folder, a file of safetensors, of `torch.save` (.pt, .pth, .bin;
            its pickle is read without running it) or of `mindspore.save_checkpoint` (.ckpt).
        dst: a folder that doesn't exist.
        src_platform: the framework that saved it.

    Raises:
        ValueError: another platform, or a file of another format.
        FileExistsError: ``dst`` exists.
    """
    if src_platform not in ("torch", "mindspore"):
        raise ValueError(f"src_platform={src_platform!r}: expected 'torch' or 'mindspore'")
    source = local_folder(src)
    other = {".ckpt": "mindspore"} | dict.fromkeys(TORCH_FILES, "torch")
    if source.is_file() and other.get(source.suffix, src_platform) != src_platform:
        raise ValueError(f"{source} is a file of {other[source.suffix]}, and src_platform={src_platform!r}")
    to_dcp(source, local_folder(dst))


def _full_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    tensors: dict[Address, Any] = {}
    for part, entries in manifest.parts.items():
        for name, entry in entries.items():
            tensors[part, name] = port().empty(entry.kind.dtype, entry.kind.shape)

    def tensor(at: Address) -> Any:
        if at not in tensors:
            raise InvalidCheckpointError(f"{folder} has no tensor {shown(at[1])} in {shown(at[0])}, as its values say")
        return tensors[at]

    state = read_values(manifest, folder, tensor)
    for path, found in unreadable(state):
        raise ValueError(f"load: {shown('.'.join(map(str, path)))} can't be read: {found.text}")
    load_tensors(tensors, manifest, folder, Ranks(alone=True))
    if state is not None:
        return state
    aliases = manifest.aliases.get(MODEL, {})
    names = {name: tensor for (_, name), tensor in tensors.items()}
    return names | {name: names[first] for name, first in aliases.items()}
