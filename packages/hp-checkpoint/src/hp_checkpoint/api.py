"""The functions of a program, which save a state and load into a state, with their readers, writers and planners."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from hp_checkpoint.disk.manifest import Manifest, entry_of
from hp_checkpoint.disk.storage import local_folder
from hp_checkpoint.errors import InvalidCheckpointError, Ranks
from hp_checkpoint.formats.dcp import dcp_values, is_dcp
from hp_checkpoint.layout.state import (
    Address,
    State,
    Unreadable,
    changes,
    decode,
    flatten,
    present,
    top_part,
    values_of,
    without_tensors,
)
from hp_checkpoint.loading.loading import (
    Verify,
    checked_tensors,
    has_safetensors,
    load_tensors,
    open_checkpoint,
    read_tree,
)
from hp_checkpoint.saving.arrangements import Layout, check_layout
from hp_checkpoint.saving.saving import STATE, save_state

T = TypeVar("T")


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]i?|)B?")


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: FileSystemWriter | None = None,
    planner: StandardSavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    layout: Layout = "auto",
) -> Manifest:
    """Save a state of all ranks in one folder; all ranks call it together.

    Tensors may be DTensors of any layout, plain tensors (the same on all ranks that have them) and NumPy arrays; other
    values are what JSON has, equal on all ranks that have them. The tensors under "model" are a Hugging Face model's
    files. An existing checkpoint of this name is replaced once the new one is complete.

    Example:
        >>> save({"model": model.state_dict(), "step": 100}, checkpoint_id="runs/step-100")

    Args:
        state_dict: nested dictionaries and lists.
        checkpoint_id: the folder. Default None: that of `storage_writer`.
        storage_writer: the folder with options. Default None: none of them.
        planner: its one option is what happens. Default None.
        no_dist: save from this process alone. Default False: from all ranks of the default group.
        use_collectives: agree by collectives. Always True, as the ranks write one checkpoint.
        layout: "files" for files that all ranks write together, a Hugging Face model; "shards" for files of each rank
            that writes, on a file system where several can't write one file, or where shards are narrow columns.
            Either loads into any layout of tensors. Default "auto": the first, unless two ranks that try to write one
            file in this folder lose bytes or fail, of which the first save warns.

    Returns:
        The checkpoint's manifest.

    Raises:
        CheckpointError: it failed on some rank; on all ranks.
        TypeError: a value that is neither a tensor nor JSON.
        ValueError: an option that is not supported, no folder or two.
        FileExistsError: the folder exists and is no checkpoint, or may not be replaced.
    """
    ranks = Ranks(alone=no_dist)
    target, options = checked(checkpoint_id, storage_writer, planner, use_collectives, ranks, layout)
    state = flattened(state_dict, ranks)
    return save_state(state, target, ranks, versions=versions(), **options)


def checked(
    checkpoint_id: Any, storage_writer: Any, planner: Any, use_collectives: bool, ranks: Ranks, layout: Layout
) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a save and its options, from the arguments of `save`, on all ranks together."""
    found: list[tuple[Path, dict[str, Any]]] = []

    def check() -> bytes:
        planner_or(planner, StandardSavePlanner)
        check_layout(layout, "save")
        if use_collectives is not True:
            raise ValueError(
                f"save: use_collectives={use_collectives!r}, but the ranks write one checkpoint, of which they have"
                " to agree. Save what each rank has alone with no_dist=True, into a folder for each"
            )
        target = place_of(checkpoint_id, storage_writer, (FileSystemWriter,))
        writer = storage_writer or FileSystemWriter(target)
        options = {"limit": bytes_of(writer.max_shard_size), "overwrite": writer.overwrite, "layout": layout}
        found.append((target, options))
        return b""

    ranks.agree(check, "save")
    return found[0]


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: FileSystemReader | HuggingFaceStorageReader | None = None,
    planner: StandardLoadPlanner | None = None,
    no_dist: bool = False,
    broadcast_replicated_tensors: bool = True,
    verify: Verify = "read",
) -> None:
    """Load a state in place; all ranks call it together, each with the tensors that it wants, in any layout.

    Tensors keep their memory and get the saved values; other values are replaced, and an empty dictionary takes the
    values that were saved in it. What the checkpoint has beyond the state is not read. A state that is refused is left
    as it was.

    Example:
        >>> state = {"model": model.state_dict(), "step": 0}
        >>> load(state, checkpoint_id="runs/step-100")

    Args:
        state_dict: of the structure that was saved, or a part of it.
        checkpoint_id: the folder. Default None: that of `storage_reader`.
        storage_reader: the folder, and what is read of it. Default None: all.
        planner: whether the checkpoint may lack something. Default None: it may not.
        no_dist: load in this process alone. Default False: on all ranks of the default group.
        broadcast_replicated_tensors: read what several ranks want on one of them, which sends it to the others. Default
            True; with False each rank reads by itself what it wants.
        verify: "read" compares what is read with its checksums, "all" all of the checkpoint.

    Raises:
        CheckpointError: it failed on some rank; on all ranks.
        ValueError: tensors or values that the checkpoint lacks, or of another shape or dtype; an empty dictionary where
            tensors were saved, as the states of an optimizer before its first step; no folder or two.
    """
    ranks = Ranks(alone=no_dist)
    opened: list[Any] = []

    def prepare() -> bytes:
        partial = planner_or(planner, StandardLoadPlanner).allow_partial_load
        folder = place_of(checkpoint_id, storage_reader, (FileSystemReader, HuggingFaceStorageReader))
        manifest = (storage_reader or FileSystemReader(folder)).open()
        saved = read_values(manifest, folder, lambda address: Unreadable("it is a tensor in the checkpoint"))
        values = [] if saved is not None or partial else list(values_of(state_dict))
        if values:
            raise ValueError(f"load: {folder} has tensors alone, and the state has the values {', '.join(values[:5])}")
        values_to_set = [] if saved is None else list(changes(state_dict, saved, partial=partial))
        state = _of_load(state_dict, manifest, saved, partial)
        opened.extend([folder, manifest, state, values_to_set, partial])
        return json.dumps(list(without_tensors(state_dict, saved))).encode()

    empty = [set(json.loads(each)) for each in ranks.agree(prepare, "load")]
    if nowhere := sorted(set.intersection(*empty)):
        raise ValueError(
            f"load: {nowhere[0]!r} is empty, and the checkpoint has tensors in it, which are loaded into tensors alone."
            " Make them first, as an optimizer does in its first step, or leave the key out"
        )
    folder, manifest, state, values_to_set, partial = opened
    tensors = checked_tensors(state, manifest, folder, ranks)
    share = broadcast_replicated_tensors
    load_tensors(tensors, manifest, folder, ranks, verify=verify, partial=partial, share=share)
    for container, key, value in values_to_set:
        container[key] = value


def flattened(state_dict: Mapping[str, Any], ranks: Ranks) -> State:
    """Divide a state into tensors and JSON values on all ranks together, see `flatten`."""
    states: list[State] = []

    def divide() -> bytes:
        states.append(flatten(state_dict))
        return b""

    ranks.agree(divide, "save")
    return states[0]


def read_values(manifest: Manifest, folder: Path, tensor: Callable[[Address], Any]) -> Any:
    """Read the state that was saved; None where a folder has tensors alone.

    Args:
        manifest: of the checkpoint.
        folder: its folder.
        tensor: returns what stands for the tensor of an address.
    """
    if STATE in manifest.files:
        return decode(read_tree(manifest, folder), tensor, str(folder / STATE))
    return dcp_values(folder, tensor) if is_dcp(folder) and not has_safetensors(folder) else None


def _of_load(state_dict: dict[str, Any], manifest: Manifest, saved: Any, partial: bool) -> State:
    """Divide a state into which a checkpoint is loaded; see `flatten`."""
    state = flatten(state_dict, top=top_part(saved), to_load=True)
    if saved is None:
        return state
    there = flatten(present(state_dict, saved), top=top_part(saved), to_load=True)
    places = {*there.tensors, *there.aliases}
    for at in () if partial else {*state.tensors, *state.aliases} - places:
        if entry_of(manifest, at) is not None:
            raise ValueError(
                f"load: the checkpoint has {at[1]!r} in another place than this state; name it as it was saved"
            )
    return there if partial else state


@functools.cache
def versions() -> dict[str, str]:
    """Return the version of this package, for a manifest."""
    try:
        return {"hp-checkpoint": version("hp-checkpoint")}
    except PackageNotFoundError:  # a checkout
        return {}


@dataclass(frozen=True, slots=True)
class StandardSavePlanner:
    """What each rank writes: of what several ranks have, one rank writes a part.

    Attributes:
        remove_redundancy: write what several ranks have once. Always True: in a checkpoint each element has one place.

    Raises:
        ValueError: it is False.
    """

    remove_redundancy: bool = True

    def __post_init__(self) -> None:
        if self.remove_redundancy is not True:
            raise ValueError(
                f"StandardSavePlanner: remove_redundancy={self.remove_redundancy!r}, but in the files each element has"
                " one place. For a copy of each rank's own, save with no_dist=True into a folder for each rank"
            )


@dataclass(frozen=True, slots=True)
class StandardLoadPlanner:
    """What a load has to find.

    Attributes:
        allow_partial_load: leave tensors and values as they are that the checkpoint lacks. Default False: an error.
    """

    allow_partial_load: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.allow_partial_load, bool):
            raise ValueError(f"StandardLoadPlanner: allow_partial_load={self.allow_partial_load!r}; expected a bool")


def planner_or(planner: object, kind: type[T]) -> T:
    """Return a planner, or the default one of its class for None.

    Raises:
        TypeError: it is of another class.
    """
    if planner is None:
        return kind()
    if not isinstance(planner, kind):
        own = type(planner)
        raise TypeError(f"planner is a {own.__module__}.{own.__qualname__}, expected hp_checkpoint.{kind.__name__}")
    return planner


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


def bytes_of(size: int | str, argument: str = "max_shard_size") -> int:
    """Return a number of bytes, of 5_000_000_000 or "5GB" or "4.5GiB".

    Args:
        size: the number.
        argument: which argument it is, for the error.

    Raises:
        ValueError: it is none, or below 1.
    """
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    count = int(float(match[1]) * _UNITS[match[2]]) if match else size
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{argument}={size!r}: expected bytes, as 5_000_000_000 or '5GB'")
    return count
