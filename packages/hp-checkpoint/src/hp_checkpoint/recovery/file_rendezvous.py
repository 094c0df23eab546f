"""Ranks that are left of a run that failed, who agree by files: no process group of theirs may be whole.

Note [Agreement by files]
    Each rank that is left writes ``joined-<rank>`` into a folder of the run, breaks its connections, so that those who
    wait for it stop and come as well, and waits until every rank has joined or is known to be lost. Whoever sees that
    first writes the list of members, by a link that only one can make. From then on they exchange numbered files. The
    folder's name has a nonce of the run, so that nobody meets files of an earlier one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint.errors import CheckpointError
from hp_checkpoint.recovery.ranks import Ranks

_POLL = 0.02


def join(folder: Path, rank: int, record: dict[str, Any]) -> None:
    """Say that a rank is left, before others can notice that it stopped.

    Args:
        folder: of the run; made here.
        rank: the global rank.
        record: for `meet` of all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"joined-{rank}", json.dumps(record).encode())


def meet(folder: Path, rank: int, size: int, lost: Iterable[int], deadline: float) -> dict[int, dict[str, Any]]:
    """Wait for the ranks that are left, and return the record of each; the same on all of them.

    Args:
        folder: that of `join`.
        rank: the global rank, which has joined.
        size: the number of ranks.
        lost: those that this one knows to be lost; what others know is in their records under "lost".
        deadline: on the monotonic clock; then whoever is there begins.

    Raises:
        CheckpointError: the others have begun without this rank.
    """
    listed = folder / "members"
    while not listed.exists():
        there = _joined(folder, size)
        gone = {each for record in there.values() for each in record["lost"]} | set(lost)
        if len(there.keys() | gone) == size or time.monotonic() > deadline:
            own = folder / f"members-{rank}"
            own.write_text(json.dumps(sorted(there)))
            with suppress(FileExistsError):
                os.link(own, listed)
        else:
            time.sleep(_POLL)
    members = json.loads(listed.read_text())
    if rank not in members:
        raise CheckpointError(f"the ranks {members} have begun without rank {rank}, which came too late")
    there = _joined(folder, size)
    return {member: there[member] for member in members}


def _joined(folder: Path, size: int) -> dict[int, dict[str, Any]]:
    there = {}
    for rank in range(size):
        with suppress(FileNotFoundError):
            there[rank] = json.loads((folder / f"joined-{rank}").read_bytes())
    return there


class Survivors(Ranks):
    """Some ranks of a world, under their numbers in it: what others would say is empty.

    Args:
        folder: where they met.
        rank: the global rank.
        size: the number of ranks in the world.
        members: those that take part.
        deadline: on the monotonic clock.
    """

    def __init__(self, folder: Path, rank: int, size: int, members: Sequence[int], deadline: float) -> None:
        self.rank, self.size, self.leader = rank, size, min(members)
        self.last = max(members)
        self._folder, self._members, self.deadline = folder, members, deadline
        self._number = 0

    def collect(self, payload: bytes) -> list[bytes]:
        """Return all members' payloads on the leader; an empty list on the others."""
        everyone = self.gather(payload)
        return everyone if self.rank == self.leader else []

    def gather(self, record: bytes) -> list[bytes]:
        """Return all members' records, and nothing for those that are no members.

        Raises:
            CheckpointError: a member did not answer in time.
        """
        self._number += 1
        _write(self._folder / f"{self._number}-{self.rank}", record)
        everyone = [b""] * self.size
        for member in self._members:
            everyone[member] = self._read(self._folder / f"{self._number}-{member}", member)
        return everyone

    def all_to_all(self, data: np.ndarray, received: Sequence[int], sent: Sequence[int]) -> np.ndarray:
        """Refuse: a save has no use for it."""
        raise NotImplementedError("survivors save, and load nothing")

    def leave(self) -> None:
        """Take leave of the others; the leader removes the folder when all have."""
        _write(self._folder / f"left-{self.rank}", b"")
        if self.rank == self.leader:
            with suppress(CheckpointError):
                for member in self._members:
                    self._read(self._folder / f"left-{member}", member)
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)
            with suppress(OSError):  # a rank that came too late
                self._folder.rmdir()

    def _share(self, payload: bytes) -> list[bytes]:
        return self.gather(payload)

    def _read(self, path: Path, member: int) -> bytes:
        while True:
            with suppress(FileNotFoundError):
                return path.read_bytes()
            if time.monotonic() > self.deadline:
                raise CheckpointError(f"rank {member} did not answer in time", [member])
            time.sleep(_POLL)


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}")
    part.write_bytes(content)
    os.rename(part, path)
