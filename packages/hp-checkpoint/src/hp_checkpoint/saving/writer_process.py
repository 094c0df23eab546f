"""The writer process: writes snapshots to files and commits them, beside the training.

It is started as ``python -m hp_checkpoint.saving.writer_process DESCRIPTOR``, with the descriptor of an `Arena`. Jobs
come from its standard input and replies go to its standard output, as JSON texts with their lengths before them.

Note [Writers of one save]
    Each rank has a writer, and they need no process group: each leaves a file ``rank-<k>.done`` with its checksums in
    the save's folder, or ``rank-<k>.failed`` with its error. Rank 0's waits for all of them, removes them and commits;
    where one failed it removes the folder. When a training process ends, its writer ends the job that it has first.

    A writer that has a job holds a lock on its ``rank-<k>.writing`` until it ends. So rank 0's knows of one of its
    machine that was killed: its file can be locked. A rank that was lost before it handed its job over has no such
    file; once rank 0's own training has ended, too, there will be none soon.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from hp_checkpoint.disk.manifest import Keep, prune
from hp_checkpoint.disk.storage import Arena, in_progress, read_small, write_small
from hp_checkpoint.errors import describe
from hp_checkpoint.layout.tensors import Piece
from hp_checkpoint.saving.arrangements import Output
from hp_checkpoint.saving.background import failed_file, failures, receive, send
from hp_checkpoint.saving.saving import finish, write_outputs

_POLL = 0.02
_PATIENCE = 60.0  # seconds that an orphaned writer waits for the others
_WITHOUT_JOB = 10.0  # the same for those that have no job


def main(descriptor: int) -> None:
    """Write jobs until the standard input ends: a signal to all processes of a job doesn't interrupt a save."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    arena = Arena(descriptor)
    while (job := receive(sys.stdin.buffer)) is not None:
        try:
            _run(job, arena)
            _reply(end=True)
        except Exception as error:
            _reply(end=True, error=describe(error))


def _reply(*, end: bool, error: str | None = None) -> None:
    try:
        send(sys.stdout.buffer, {"end": end, "error": error})
    except BrokenPipeError:  # the training has ended; what the buffer has is not written again when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(job: Mapping[str, Any], arena: Arena) -> None:
    part, rank = Path(job["part"]), job["rank"]
    with nullcontext() if rank else in_progress(part), _writing(part, rank):
        _write(job, arena, part, rank)
        if rank:
            return
        rows = _gathered(part, job["size"])
        finish(part, Path(job["target"]), job["tree"], job["names"], rows)
        if job["keep"] is not None:
            prune(Path(job["run"]), Keep(**job["keep"]), job["tree"]["step"])


@contextmanager
def _writing(part: Path, rank: int) -> Iterator[None]:
    """Hold the lock that says that this writer lives."""
    path = _lock_file(part, rank)
    hidden = path.with_name(f".{path.name}")
    with open(hidden, "wb") as file:
        with suppress(OSError):  # a file system without locks: then nobody can tell
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(_machine())
            file.flush()
        os.rename(hidden, path)
        yield


def _lock_file(part: Path, rank: int) -> Path:
    return part / f"rank-{rank}.writing"


def _write(job: Mapping[str, Any], arena: Arena, part: Path, rank: int) -> None:
    memory = arena.reserve(job["arena"])
    listed = [
        Output(
            file, lambda start=start, size=size: memory[start : start + size], tuple(Piece(*each) for each in pieces)
        )
        for file, start, size, pieces in job["outputs"]
    ]
    try:
        rows = write_outputs(part, listed, job["names"], job["block_bytes"])
        _leave(part / f"rank-{rank}.done", rows.tobytes())
        _reply(end=False)
    except Exception as error:
        _leave(failed_file(part, rank), describe(error).encode())
        raise


def _leave(path: Path, content: bytes) -> None:
    """Write a file that is complete as soon as it is there."""
    hidden = path.with_name(f".{path.name}")
    write_small(hidden, content)
    os.rename(hidden, path)


def _gathered(part: Path, size: int) -> list[bytes]:
    """Return the rows of all ranks, once they are there.

    Raises:
        RuntimeError: a writer failed, or did not end.
    """
    rows: dict[int, bytes] = {}
    alone = 0.0
    while len(rows) < size:
        if failed := failures(part):
            raise RuntimeError(f"the writers of {len(failed)} of {size} ranks failed: {'; '.join(failed[:4])}")
        ended = [rank for rank in range(1, size) if rank not in rows and _ended(part, rank)]
        for rank in set(range(size)) - set(rows):
            if (part / f"rank-{rank}.done").exists():
                rows[rank] = read_small(part / f"rank-{rank}.done")
        if len(rows) < size:
            missing = sorted(set(range(size)) - set(rows))
            killed = [rank for rank in ended if rank in missing]
            if killed and not failures(part):
                raise RuntimeError(f"the writers of the ranks {killed[:8]} were killed")
            alone = alone or (time.monotonic() if _orphaned() else 0.0)
            waited = time.monotonic() - alone if alone else 0.0
            idle = [rank for rank in missing if not _lock_file(part, rank).exists()]
            if waited > _PATIENCE or idle and waited > _WITHOUT_JOB:
                late = idle if waited <= _PATIENCE else missing
                raise RuntimeError(f"the writers of the ranks {late[:8]} did not end, and the training has ended")
            time.sleep(_POLL)
    for rank in range(size):
        (part / f"rank-{rank}.done").unlink()
        _lock_file(part, rank).unlink(missing_ok=True)
    return [rows[rank] for rank in range(size)]


def _ended(part: Path, rank: int) -> bool:
    """Tell whether a writer of this machine that had a job has ended; what it left is there by then."""
    with suppress(OSError):
        with open(_lock_file(part, rank), "rb") as file:
            if file.read() == _machine() != b"":  # a lock may be known to one machine alone
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
    return False


def _machine() -> bytes:
    """Return what names this machine until it is started again; nothing where the system has no such name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return b""


def _orphaned() -> bool:
    """Tell whether the training process has ended: its end of the standard input is closed."""
    poll = select.poll()
    poll.register(sys.stdin.buffer, select.POLLHUP)
    return bool(poll.poll(0))


if __name__ == "__main__":
    main(int(sys.argv[1]))
