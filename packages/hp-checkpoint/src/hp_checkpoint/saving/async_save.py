"""Saves of a state beside the program: a future for each, which needs no collective."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_checkpoint.api import checked, flattened, versions
from hp_checkpoint.disk.file_systems import FileSystemWriter
from hp_checkpoint.disk.manifest import MANIFEST, Manifest
from hp_checkpoint.disk.storage import read_json
from hp_checkpoint.errors import CheckpointError
from hp_checkpoint.recovery.ranks import Ranks
from hp_checkpoint.saving.arrangements import Layout
from hp_checkpoint.saving.background import Writer, failures
from hp_checkpoint.saving.planners import StandardSavePlanner
from hp_checkpoint.saving.saving import prepare_save
from hp_checkpoint.saving.under_way import begun

_POLL = 0.02
_idle: list[Writer] = []  # with processes that have started and arenas that have memory


@dataclass(frozen=True)
class AsyncSaveResponse:
    """A save under way.

    Attributes:
        persist_completion: has the checkpoint's manifest once it is complete, or the error of this rank's save.
    """

    persist_completion: Future[Manifest]

    def get_result(self, timeout: float | None = None) -> Manifest:
        """Wait until the checkpoint is complete, and return its manifest.

        Args:
            timeout: in seconds. Default None: no limit.

        Raises:
            CheckpointError: the save failed.
            TimeoutError: it is not complete yet.
        """
        return self.persist_completion.result(timeout)


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: FileSystemWriter | None = None,
    planner: StandardSavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    layout: Layout = "auto",
    callback: Callable[[Future[Manifest]], object] | None = None,
) -> AsyncSaveResponse:
    """Copy a state of all ranks and save the copy beside the program; all ranks call it together, as `save`.

    The tensors may change once it returns. Each save that is under way has a writer process and a copy of its own; a
    save of the same folder waits for the one before it.

    Example:
        >>> response = async_save({"model": model.state_dict()}, checkpoint_id="runs/step-100")
        >>> response.get_result().step

    Args:
        state_dict: nested dictionaries and lists.
        checkpoint_id: the folder. Default None: that of `storage_writer`.
        storage_writer: as that of `save`.
        planner: likewise.
        no_dist: save from this process alone. Default False: from all ranks of the default group.
        use_collectives: as that of `save`.
        layout: likewise.
        callback: called with the future when the save has ended, in another thread.

    Raises:
        CheckpointError: the copy failed on some rank; on all ranks.
        TypeError: a value that is neither a tensor nor JSON.
        ValueError: as `save`.
        FileExistsError: the folder exists and is no checkpoint, or may not be replaced.
    """
    ranks = Ranks(alone=no_dist)
    target, options = checked(checkpoint_id, storage_writer, planner, use_collectives, ranks, layout)
    prepared = prepare_save(flattened(state_dict, ranks), target, ranks, versions=versions(), **options)
    folders: list[int] = []
    writer = _idle.pop() if _idle else Writer()

    def start() -> bytes:
        folders.append(os.stat(prepared.part).st_ino)
        writer.start(prepared, ranks, None)
        return b""

    try:
        ranks.agree(start, "async_save")
    except Exception as error:
        writer.fail(error)
        _idle.append(writer)
        raise
    future: Future[Manifest] = Future()
    part, leads = prepared.part, ranks.rank == ranks.leader  # the thread keeps no tensor alive
    begun(target, future.done)
    if callback is not None:
        future.add_done_callback(callback)

    def end() -> None:
        try:
            writer.written()
            writer.committed()
            manifest = _committed(part, target, folders[0], leads)
        except BaseException as error:
            writer.fail(CheckpointError(str(error)))
            _idle.append(writer)
            future.set_exception(error)
        else:
            _idle.append(writer)
            future.set_result(manifest)

    threading.Thread(target=end, name="hp-checkpoint async_save", daemon=True).start()
    return AsyncSaveResponse(future)


def _committed(part: Path, target: Path, folder: int, leads: bool) -> Manifest:
    """Wait until rank 0's writer has renamed a folder, and return its manifest.

    Args:
        part: the folder's name during the save.
        target: its name afterwards.
        folder: its inode.
        leads: this rank's writer is the one that has renamed it.
    """
    while True:
        under_way = part.exists()  # looked at first: the rename is later
        if target.exists() and os.stat(target).st_ino == folder:
            return Manifest.from_bytes(read_json(target / MANIFEST), str(target / MANIFEST))
        failed = failures(part)
        if failed or not under_way:
            if leads:
                raise CheckpointError(f"async_save of {target}: it was complete, and another process has replaced it")
            texts = "; ".join(failed[:4]) or "that rank has its error, or another process has replaced the checkpoint"
            raise CheckpointError(f"async_save of {target} failed on another rank: {texts}")
        time.sleep(_POLL)


@atexit.register
def _end() -> None:
    while _idle:
        _idle.pop().close()
