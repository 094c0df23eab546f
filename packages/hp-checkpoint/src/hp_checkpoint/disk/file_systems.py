"""Where a state is saved to and loaded from: folders, with what else a caller asks of them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hp_checkpoint.disk.manifest import Manifest
from hp_checkpoint.disk.storage import local_folder
from hp_checkpoint.errors import InvalidCheckpointError
from hp_checkpoint.loading.sources import has_safetensors, open_checkpoint

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]i?|)B?")


@dataclass(frozen=True, slots=True)
class FileSystemWriter:
    """A folder that `save` writes.

    Attributes:
        path: the folder.
        overwrite: replace a checkpoint there once the new one is complete. Default True; with False it is refused.
        max_shard_size: of a file that ranks share, as "5GB", unless one tensor has more.
    """

    path: str | os.PathLike[str]
    overwrite: bool = True
    max_shard_size: int | str = "5GB"


@dataclass(frozen=True, slots=True)
class FileSystemReader:
    """A folder that `load` reads: a checkpoint, one of torch.distributed.checkpoint, or a Hugging Face model's.

    Attributes:
        path: the folder.
    """

    path: str | os.PathLike[str]

    def open(self) -> Manifest:
        """Read the manifest."""
        return open_checkpoint(local_folder(self.path))


@dataclass(frozen=True, slots=True)
class HuggingFaceStorageReader:
    """A folder whose safetensors of a Hugging Face model `load` reads: tensors alone, at the top of the state.

    Attributes:
        path: the folder.
    """

    path: str | os.PathLike[str]

    def open(self) -> Manifest:
        """Read the manifest, of the model alone.

        Raises:
            InvalidCheckpointError: the folder has no model in safetensors.
        """
        folder = local_folder(self.path)
        manifest = open_checkpoint(folder)
        if not has_safetensors(folder) or "model" not in manifest.parts:
            raise InvalidCheckpointError(f"{folder} has no model in safetensors; read it by FileSystemReader")
        parts = {"model": manifest.parts["model"]}
        used = {file for entry in parts["model"].values() for file in entry.files}
        files = {name: file for name, file in manifest.files.items() if name in used}
        return Manifest(None, parts, files, {"model": manifest.aliases.get("model", {})}, manifest.block_bytes)


def place_of(
    checkpoint_id: str | os.PathLike[str] | None,
    storage: FileSystemWriter | FileSystemReader | HuggingFaceStorageReader | None,
    kinds: tuple[type, ...],
) -> Path:
    """Return the folder that a call names.

    Args:
        checkpoint_id: the folder, or None.
        storage: what has the folder, or None.
        kinds: the classes that storage may be of.

    Raises:
        TypeError: storage is of another class.
        ValueError: none of both is given, two different folders, or a URL.
    """
    if storage is not None and not isinstance(storage, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"storage is a {type(storage).__module__}.{type(storage).__qualname__}, expected {expected}")
    given = [local_folder(each) for each in (checkpoint_id, getattr(storage, "path", None)) if each is not None]
    if not given:
        raise ValueError("no folder is given; pass checkpoint_id")
    if given[0] != given[-1]:
        raise ValueError(f"checkpoint_id is {given[0]}, and {type(storage).__name__} has {given[1]}; give one")
    return given[0]


def bytes_of(size: int | str) -> int:
    """Return a number of bytes, of 5_000_000_000 or "5GB" or "4.5GiB".

    Raises:
        ValueError: it is none, or below 1.
    """
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    count = int(float(match[1]) * _UNITS[match[2]]) if match else size
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"max_shard_size={size!r}: expected bytes, as 5_000_000_000 or '5GB'")
    return count
