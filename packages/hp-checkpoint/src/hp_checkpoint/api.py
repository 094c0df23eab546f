"""The functions of a program: save a state, load into a state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hp_checkpoint.disk.file_systems import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    bytes_of,
    place_of,
)
from hp_checkpoint.disk.manifest import Manifest, entry_of
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
from hp_checkpoint.layout.tied import checked_tensors
from hp_checkpoint.loading.loading import Verify, load_tensors, read_tree
from hp_checkpoint.loading.sources import has_safetensors
from hp_checkpoint.recovery.ranks import Ranks
from hp_checkpoint.saving.arrangements import Layout, check_layout
from hp_checkpoint.saving.planners import StandardLoadPlanner, StandardSavePlanner, planner_or
from hp_checkpoint.saving.saving import STATE, save_state


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


def versions() -> dict[str, str]:
    """Return the version of this package, for a manifest."""
    try:
        return {"hp-checkpoint": version("hp-checkpoint")}
    except PackageNotFoundError:  # a checkout
        return {}
