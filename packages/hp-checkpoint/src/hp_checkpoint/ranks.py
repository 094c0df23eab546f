"""Ranks that save or load together: what one of them fails at, all of them raise."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hp_checkpoint.errors import CheckpointError
from hp_checkpoint.port import port
from hp_platform import LostRankError, get_platform

__all__ = ["Ranks", "describe"]

T = TypeVar("T")
_DIGEST = 16
_SHORT = 64  # bytes of a payload that is sent with its digest
_ARGUMENTS = (ValueError, TypeError, FileNotFoundError, FileExistsError)
"""Errors that are raised as they are where every rank has the same one: what was passed is wrong."""


class Ranks:
    """The ranks of the default process group, or this process alone.

    Args:
        alone: use no process group. Default False: the default group, where there is one.

    Attributes:
        rank: of this process.
        size: the number of ranks.
        leader: the rank that writes what is written once.
        last: the last rank that takes part.
    """

    leader = 0

    def __init__(self, *, alone: bool = False) -> None:
        groups = None if alone else get_platform().groups
        self._group: Any = groups.default_group() if groups is not None and groups.is_initialized() else None
        self.rank: int = 0 if self._group is None or groups is None else groups.rank()
        self.size: int = 1 if self._group is None or groups is None else groups.size()
        self.last = self.size - 1

    def agree(self, action: Callable[[], bytes], what: str) -> list[bytes]:
        """Run an action on every rank and return all ranks' results; each different result is sent once.

        Args:
            action: its result is short.
            what: the action's name, for the error.

        Raises:
            CheckpointError: it failed on a rank; on all ranks.
        """
        failure: Exception | None = None
        try:
            payload = b"+" + action()
        except LostRankError:
            raise
        except Exception as error:  # whatever it is, the others have to hear of it
            failure, payload = error, b"-" + describe(error).encode()
        everyone = self._share(payload)
        failed = {rank: each[1:].decode() for rank, each in enumerate(everyone) if each[:1] == b"-"}
        if failed:
            same = len(failed) == self.size and len(set(failed.values())) == 1
            if failure is not None and same and isinstance(failure, _ARGUMENTS):
                raise failure
            if self.size == 1:
                raise CheckpointError(f"{what} failed: {failed[0]}", failed) from failure
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in list(failed.items())[:4])
            raise CheckpointError(f"{what} failed on {len(failed)} of {self.size} ranks: {texts}", failed) from failure
        return [each[1:] for each in everyone]

    def first(self, action: Callable[[], bytes], what: str) -> bytes:
        """Run an action on the leader and return its result on all ranks.

        Args:
            action: not run on the others.
            what: the action's name, for the error.

        Raises:
            CheckpointError: it failed; on all ranks.
        """
        return self.agree(action if self.rank == self.leader else bytes, what)[self.leader]

    def collect(self, payload: bytes) -> list[bytes]:
        """Return all ranks' payloads on rank 0; an empty list on the others."""
        if self.size == 1:
            return [payload]
        lengths = [int.from_bytes(each, "little") for each in self.gather(len(payload).to_bytes(8, "little"))]
        received = lengths if self.rank == 0 else [0] * self.size
        sent = [len(payload)] + [0] * (self.size - 1)
        data = self.all_to_all(np.frombuffer(payload, np.uint8).copy(), received, sent)
        ends = np.cumsum(received)
        return [data[end - n : end].tobytes() for end, n in zip(ends, received)] if self.rank == 0 else []

    def all_to_all(self, data: np.ndarray, received: Sequence[int], sent: Sequence[int]) -> np.ndarray:
        """Send consecutive ranges of bytes to the ranks, and return what they send.

        Args:
            data: of dtype uint8.
            received: bytes from each rank.
            sent: bytes to each rank.
        """
        own = port()
        output = own.bytes_tensor(np.empty(sum(received), np.uint8))
        tensor = own.bytes_tensor(data)
        get_platform().collectives.all_to_all(output, tensor, list(received), list(sent), group=self._group)
        return own.bytes_array(output)

    def gather(self, record: bytes) -> list[bytes]:
        """Return all ranks' records of one length."""
        if self.size == 1:
            return [record]
        own = port()
        output = own.bytes_tensor(np.empty(self.size * len(record), np.uint8))
        tensor = own.bytes_tensor(np.frombuffer(record, np.uint8).copy())
        get_platform().collectives.all_gather(output, tensor, group=self._group)
        data = own.bytes_array(output).tobytes()
        return [data[at : at + len(record)] for at in range(0, len(data), len(record))]

    def _share(self, payload: bytes) -> list[bytes]:
        """Return all ranks' payloads; of equal ones the first rank sends its own."""
        if self.size == 1:
            return [payload]
        digest = hashlib.blake2b(payload, digest_size=_DIGEST).digest()
        records = self.gather(digest + len(payload).to_bytes(8, "little") + payload[:_SHORT].ljust(_SHORT, b"\0"))
        if len(set(records)) == 1:
            return [payload] * self.size
        known: dict[bytes, bytes] = {}
        for rank, record in enumerate(records):
            if record not in known:
                length, short = int.from_bytes(record[_DIGEST:-_SHORT], "little"), record[-_SHORT:]
                known[record] = (
                    short[:length]
                    if length <= _SHORT
                    else self._broadcast(payload if rank == self.rank else bytes(length), rank)
                )
        return [known[record] for record in records]

    def _broadcast(self, payload: bytes, rank: int) -> bytes:
        own = port()
        tensor = own.bytes_tensor(np.frombuffer(payload, np.uint8).copy())
        get_platform().collectives.broadcast(tensor, rank, group=self._group)
        return own.bytes_array(tensor).tobytes()


def describe(error: Exception) -> str:
    """Return an error's text; with the name of its errno and its file, where it has some."""
    if isinstance(error, OSError) and error.errno is not None:
        name = errno.errorcode.get(error.errno, str(error.errno))
        return f"{name}: {error.strerror}: {error.filename}" if error.filename else f"{name}: {error.strerror}"
    return str(error) if isinstance(error, (*_ARGUMENTS, CheckpointError)) else f"{type(error).__name__}: {error}"
