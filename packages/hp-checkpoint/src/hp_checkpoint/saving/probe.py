"""Whether two ranks can write one file of a folder: tried, as file systems don't say.

Note [Probe of shared writes]
    Two ranks, the first and the last, which are most likely on different hosts, write every other stripe of one file at
    the same time, sync it, and then read all of it. The stripes end within pages: a client that writes back whole pages
    loses the other's bytes there. What fails, as with an error about locks, or differs means that the file system does
    not take shared files. The answer is kept for each file system, so a program asks once.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hp_checkpoint.disk.storage import make_folder, new_nonce, opened, part_folder, read_at, sync, write_at
from hp_checkpoint.errors import InvalidCheckpointError
from hp_checkpoint.recovery.ranks import Ranks, describe
from hp_checkpoint.saving.arrangements import Files, Layout

_STRIPES, _STRIPE = 64, 3000  # number, and bytes of each
_known: dict[int, str] = {}
"""Why shared files fail on a file system, by its device number; "" where they don't."""


def agreed_layout(layout: Layout, target: Path, ranks: Ranks) -> Files:
    """Return the layout of files that a save has; all ranks call it together and get the same.

    With "auto" that is "files", or "shards" where two ranks can't write one file; see Note [Probe of shared writes].
    The first such save of a program warns, on the leader.

    Args:
        layout: that was asked for, the same on all ranks.
        target: the checkpoint's folder.
        ranks: who saves.

    Raises:
        CheckpointError: the folder above the target can't be written; on all ranks.
    """
    if layout != "auto":
        return layout
    if ranks.last == ranks.leader:
        return "files"
    said = ranks.first(lambda: _prepared(target), "save").decode()
    if said.startswith("="):
        return "shards" if said[1:] else "files"
    part = part_folder(target, said)

    def attempt(action: Callable[[], None]) -> bytes:
        try:
            if ranks.rank in (ranks.leader, ranks.last):
                action()
        except (OSError, InvalidCheckpointError) as error:
            return describe(error).encode()
        return b""

    first = int(ranks.rank == ranks.last)
    texts = ranks.agree(lambda: attempt(lambda: _write(part / "probe", first)), "save")
    texts += ranks.agree(lambda: attempt(lambda: _read(part / "probe")), "save")
    reason = next((text.decode() for text in texts if text), "")
    ranks.first(lambda: _ended(part, reason), "save")
    return "shards" if reason else "files"


def _prepared(target: Path) -> bytes:
    """Return what is known, after "="; else the nonce of a folder that was made for the probe."""
    make_folder(target.parent)
    known = _known.get(os.stat(target.parent).st_dev)
    if known is not None:
        return f"={known}".encode()
    nonce = new_nonce()
    part_folder(target, nonce).mkdir()
    return nonce.encode()


def _ended(part: Path, reason: str) -> bytes:
    _known[os.stat(part.parent).st_dev] = reason
    shutil.rmtree(part, ignore_errors=True)
    if reason:
        warnings.warn(
            f"{part.parent}: two ranks can't write one file here: {reason}. Checkpoints are saved with"
            " layout='shards', in files of each rank; `hyper-parallel checkpoint convert` joins them",
            RuntimeWarning,
            stacklevel=2,
        )
    return b""


def _content() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (_STRIPES, _STRIPE), np.uint8)  # no zeros, as holes are


def _write(path: Path, first: int) -> None:
    content = _content()
    with opened(path, write=True) as descriptor:
        for number in range(first, _STRIPES, 2):
            write_at(descriptor, content[number], number * _STRIPE, path)
        sync(descriptor, path)


def _read(path: Path) -> None:
    """Compare the file with what both ranks wrote.

    Raises:
        InvalidCheckpointError: it differs.
    """
    found, expected = np.empty((_STRIPES, _STRIPE), np.uint8), _content()
    with opened(path) as descriptor:
        read_at(descriptor, found.reshape(-1), 0, path)
    lost = int((found != expected).sum())
    if lost:
        raise InvalidCheckpointError(f"{lost:,} of {expected.size:,} bytes that two ranks wrote and synced were lost")
