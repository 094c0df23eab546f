"""The functions of a program: save a state, load into a state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hp_checkpoint.dcp import dcp_values, is_dcp
from hp_checkpoint.loading import Verify, load_tensors, read_tree
from hp_checkpoint.manifest import Manifest
from hp_checkpoint.ranks import Ranks
from hp_checkpoint.saving import STATE, save_state
from hp_checkpoint.sources import open_checkpoint
from hp_checkpoint.state import State, decode, fill, flatten
from hp_checkpoint.tied import check_tied

__all__ = ["flattened", "load", "read_values", "save", "versions"]


def save(state_dict: Mapping[str, Any], *, checkpoint_id: str | os.PathLike[str], no_dist: bool = False) -> Manifest:
    """Save a state of all ranks in one folder; all ranks call it together.

    Tensors may be DTensors of any layout, plain tensors (the same on all ranks that have them) and NumPy arrays; other
    values are what JSON has, equal on all ranks that have them. The tensors under "model" are a Hugging Face model's
    files. An existing checkpoint of this name is replaced once the new one is complete.

    Example:
        >>> save({"model": model.state_dict(), "step": 100}, checkpoint_id="runs/step-100")

    Args:
        state_dict: nested dictionaries and lists.
        checkpoint_id: the folder.
        no_dist: save from this process alone. Default False: from all ranks of the default group.

    Returns:
        The checkpoint's manifest.

    Raises:
        CheckpointError: it failed on some rank; on all ranks.
        TypeError: a value that is neither a tensor nor JSON.
        FileExistsError: the folder exists and is no checkpoint.
    """
    ranks = Ranks(alone=no_dist)
    state = flattened(state_dict, ranks)
    return save_state(state, Path(checkpoint_id).absolute(), ranks, versions=versions())


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str],
    no_dist: bool = False,
    verify: Verify = "read",
) -> None:
    """Load a state in place; all ranks call it together, each with the tensors that it wants, in any layout.

    Tensors keep their memory and get the saved values; other values are replaced. What the checkpoint has beyond the
    state is not read.

    Example:
        >>> state = {"model": model.state_dict(), "step": 0}
        >>> load(state, checkpoint_id="runs/step-100")

    Args:
        state_dict: of the structure that was saved, or a part of it.
        checkpoint_id: the folder.
        no_dist: load in this process alone. Default False: on all ranks of the default group.
        verify: "read" compares what is read with its checksums, "all" all of the checkpoint.

    Raises:
        CheckpointError: it failed on some rank; on all ranks.
        ValueError: tensors or values that the checkpoint lacks, or of another shape or dtype.
    """
    ranks = Ranks(alone=no_dist)
    folder = Path(checkpoint_id).absolute()
    opened: list[Any] = []

    def prepare() -> bytes:
        manifest = open_checkpoint(folder)
        opened.extend([manifest, flatten(state_dict), read_values(manifest, folder)])
        return b""

    ranks.agree(prepare, "load")
    manifest, state, saved = opened
    check_tied(state.aliases, manifest, folder, ranks)
    load_tensors(state.tensors, manifest, folder, ranks, verify=verify)
    if saved is not None:
        ranks.agree(lambda: _fill(state_dict, saved), "load")


def flattened(state_dict: Mapping[str, Any], ranks: Ranks) -> State:
    """Divide a state into tensors and JSON values on all ranks together, see `flatten`."""
    states: list[State] = []

    def divide() -> bytes:
        states.append(flatten(state_dict))
        return b""

    ranks.agree(divide, "save")
    return states[0]


def read_values(manifest: Manifest, folder: Path) -> Any:
    """Read the values of a state that are no tensors, with None in the tensors' places; None where there are none."""
    if STATE in manifest.files:
        return decode(read_tree(manifest, folder), lambda address: None)
    return dcp_values(folder) if is_dcp(folder) else None


def _fill(state: dict[str, Any], saved: Any) -> bytes:
    fill(state, saved)
    return b""


def versions() -> dict[str, str]:
    """Return the version of this package, for a manifest."""
    try:
        return {"hp-checkpoint": version("hp-checkpoint")}
    except PackageNotFoundError:  # a checkout
        return {}
