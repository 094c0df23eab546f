"""Background saves: a snapshot is handed to the writer process, or a future is returned, and the training goes on."""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hp_checkpoint.api import FileSystemWriter, StandardSavePlanner, checked, flattened, versions
from hp_checkpoint.disk.manifest import MANIFEST, Keep, Manifest
from hp_checkpoint.disk.storage import Arena, read_json, read_small
from hp_checkpoint.errors import CheckpointError, Ranks
from hp_checkpoint.saving.arrangements import Layout
from hp_checkpoint.saving.saving import Prepared, begun, prepare_save
from hp_platform import LostRankError

# ---- messages of JSON ----
_LENGTH = 8


def send(stream: BinaryIO, message: Mapping[str, Any]) -> None:
    """Write a message."""
    content = json.dumps(message).encode()
    stream.write(len(content).to_bytes(_LENGTH, "little") + content)
    stream.flush()


def receive(stream: BinaryIO) -> dict[str, Any] | None:
    """Read a message; None at the end of the stream."""
    length = stream.read(_LENGTH)
    if len(length) < _LENGTH:
        return None
    content = stream.read(int.from_bytes(length, "little"))
    return json.loads(content)


def failures(part: Path) -> list[str]:
    """List the ranks that failed, with their errors; none of a folder that is committed or removed meanwhile."""
    try:
        files = sorted(part.glob("rank-*.failed"))
        return [f"{path.stem.replace('-', ' ')}: {read_small(path).decode()}" for path in files]
    except FileNotFoundError:
        return []


def failed_file(part: Path, rank: int) -> Path:
    """Return the file that says that a rank failed."""
    return part / f"rank-{rank}.failed"


@dataclass(frozen=True, slots=True)
class Committed:
    """A save that is complete: its step, and its folder; None where it was skipped."""

    step: int
    folder: Path | None


class Pending:
    """A save under way. All ranks wait for it together; the next save and `Checkpointer.close` do so as well.

    Args:
        committed: what `wait` returns.
        ranks: who saves.
        writer: this rank's; None for a save that is complete.
    """

    def __init__(self, committed: Committed, ranks: Ranks | None = None, writer: Writer | None = None) -> None:
        self._committed, self._ranks, self._writer = committed, ranks, writer
        self._error: Exception | None = None

    @property
    def settled(self) -> bool:
        """True once somebody has waited."""
        return self._writer is None

    def done(self) -> bool:
        """Tell whether this rank has nothing left to write; other ranks may have."""
        return self._writer is None or self._writer.done()

    def wait(self) -> Committed:
        """Wait until the checkpoint is complete; all ranks call it together.

        Raises:
            CheckpointError: it failed on some rank; on all ranks.
            LostRankError: a rank has ended.
        """
        writer, self._writer = self._writer, None
        if writer is not None and self._ranks is not None:
            try:
                self._ranks.agree(writer.written, "save")
                self._ranks.agree(writer.committed, "save")
            except Exception as error:
                writer.fail(error)
                self._error = error
            except BaseException:  # an interrupt: the writer goes on reading the arena
                self._writer = writer
                raise
        if self._error is not None:
            raise self._error
        return self._committed


class Writer:
    """The writer process of this rank and the arena that they share; started anew where it was killed."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._job: Path | None = None
        self._rank = 0
        self._started()  # it has imported what it needs when the first job comes

    def start(self, prepared: Prepared, ranks: Ranks, keep: Keep | None) -> None:
        """Copy the bytes of this rank, and hand them over; the tensors may change when it returns.

        Args:
            prepared: the save.
            ranks: who saves.
            keep: what stays of the older checkpoints; None for all.
        """
        sizes = [sum(piece.size for piece in output.pieces) for output in prepared.outputs]
        process = self._started()
        assert self._arena is not None and process.stdin is not None
        starts = self._arena.store(sizes, lambda number: prepared.outputs[number].source())
        outputs = [
            [output.file, start, size, [list(_fields(piece)) for piece in output.pieces]]
            for output, start, size in zip(prepared.outputs, starts, sizes, strict=False)
        ]
        first = ranks.rank == 0
        self._job, self._rank = prepared.part, ranks.rank
        job = {
            "part": str(prepared.part),
            "target": str(prepared.target),
            "names": prepared.names,
            "block_bytes": prepared.block_bytes,
            "arena": starts[-1],
            "outputs": outputs,
            "rank": ranks.rank,
            "size": ranks.size,
            "tree": prepared.tree if first else None,
            "run": str(prepared.run),
            "keep": None if keep is None or not first else asdict(keep),
        }
        part, found = prepared.part, weakref.ref(process)  # what is noted keeps nothing alive
        if first:  # the writer that renames the folder, or removes it
            begun(prepared.target, lambda: not part.exists() or (own := found()) is None or own.poll() is not None)
        send(process.stdin, job)  # type: ignore[arg-type]

    def done(self) -> bool:
        """Tell whether the writer has replied, or has ended."""
        if self._job is None or self._process is None:
            return True
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)  # type: ignore[arg-type]
        return bool(poll.poll(0))

    def written(self) -> bytes:
        """Wait until this rank's files are written and synced.

        Raises:
            CheckpointError: the writer failed or was killed.
        """
        self._reply()
        return b""

    def committed(self) -> bytes:
        """Wait until the writer has ended the job: on rank 0, until the checkpoint is complete.

        Raises:
            CheckpointError: the writer failed or was killed.
        """
        while self._job is not None:
            self._reply()
        return b""

    def fail(self, error: Exception) -> None:
        """End the job, which failed on some rank: the writer of rank 0 doesn't wait for the others.

        Where a rank is lost, its writer may go on, so the writers are left to complete the checkpoint.
        """
        if isinstance(error, LostRankError):
            self.leave()
        elif self._job is not None:
            with suppress(OSError):  # the folder may be gone
                failed_file(self._job, self._rank).write_text("the save failed on another rank")
            with suppress(CheckpointError):
                self.committed()

    def _reply(self) -> None:
        process, job = self._process, self._job
        if process is None or job is None:
            return
        assert process.stdout is not None
        reply = receive(process.stdout)  # type: ignore[arg-type]
        if reply is None:
            code = process.wait()
            self._process = self._job = None
            text = f"the writer process ended with status {code} during the save"
            with suppress(OSError):  # the other writers see it there
                failed_file(job, self._rank).write_text(text)
            raise CheckpointError(text)
        if reply["end"]:
            self._job = None
        if reply["error"] is not None:
            raise CheckpointError(reply["error"])

    def close(self) -> None:
        """End the writer when it has written what it has."""
        process = self._process
        self.leave()
        if process is not None:
            process.wait()

    def leave(self) -> None:
        """Let the writer end the job that it has, and itself then, without waiting for it."""
        process, self._process, self._job = self._process, None, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
            threading.Thread(target=process.wait, name="hp-checkpoint writer", daemon=True).start()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._arena = self._arena or Arena()
            descriptor = self._arena.descriptor
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hp_checkpoint.saving.writer_process", str(descriptor)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[descriptor],
                # An interrupt of the training doesn't interrupt a save. It stays in the training's session: between
                # sessions Linux shares processors evenly (autogroups), whatever the priorities of their processes.
                process_group=0,
            )
        return self._process


def _fields(piece: object) -> tuple[int, ...]:
    return tuple(getattr(piece, name) for name in ("first", "length", "count", "stride", "local", "local_stride"))


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
