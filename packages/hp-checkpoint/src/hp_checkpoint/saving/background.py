"""Background saves: a snapshot is handed to the writer process, and the training goes on."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hp_checkpoint.disk.retention import Keep
from hp_checkpoint.disk.storage import Arena, read_small
from hp_checkpoint.errors import CheckpointError
from hp_checkpoint.recovery.ranks import Ranks
from hp_checkpoint.saving.saving import Prepared
from hp_checkpoint.saving.under_way import begun
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
