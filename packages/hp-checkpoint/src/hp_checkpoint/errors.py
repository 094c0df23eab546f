"""Errors of checkpoints, and the ranks that save or load together: what one of them fails at, all of them raise."""

from __future__ import annotations

import errno
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hp_checkpoint.port import port
from hp_platform import get_platform
from hp_platform.extend import agree, gather_bytes, share_bytes


class CheckpointError(RuntimeError):
    """A save or a load failed; raised on all ranks alike.

    Args:
        text: the message, with each rank that failed and its reason.
        ranks: their global ranks, ascending.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks: tuple[int, ...] = tuple(ranks)


class InvalidCheckpointError(ValueError):
    """Files that are no checkpoint, or that were changed since they were written."""


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 80, 80
        self.maxlist = self.maxtuple = self.maxdict = 8

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 256 else f"<an integer of {x.bit_length()} bits>"


_short = _Short()


def shown(value: Any) -> str:
    """Return the beginning of a value's text, for an error: what a file has may be long, or nested without end."""
    return _short.repr(value)


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
        group: of these ranks; None without a process group.
    """

    leader = 0

    def __init__(self, *, alone: bool = False) -> None:
        groups = None if alone else get_platform().groups
        self.group: Any = groups.default_group() if groups is not None and groups.is_initialized() else None
        self.rank: int = 0 if self.group is None or groups is None else groups.rank()
        self.size: int = 1 if self.group is None or groups is None else groups.size()
        self.last = self.size - 1

    def agree(self, action: Callable[[], bytes], what: str) -> list[bytes]:
        """Run an action on every rank and return all ranks' results; each different result is sent once.

        Args:
            action: its result is short.
            what: the action's name, for the error.

        Raises:
            CheckpointError: it failed on a rank; on all ranks.
        """

        def failed(texts: Mapping[int, str], own: Exception | None) -> Exception:
            same = len(texts) == self.size and len(set(texts.values())) == 1
            if own is not None and same and isinstance(own, _ARGUMENTS):
                return own
            if self.size == 1:
                return CheckpointError(f"{what} failed: {texts[0]}", dict(texts))
            some = "; ".join(f"rank {rank}: {text}" for rank, text in list(texts.items())[:4])
            return CheckpointError(f"{what} failed on {len(texts)} of {self.size} ranks: {some}", dict(texts))

        return agree(action, failed, self._share, describe)

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
        get_platform().collectives.all_to_all(output, tensor, list(received), list(sent), group=self.group)
        return own.bytes_array(output)

    def gather(self, record: bytes) -> list[bytes]:
        """Return all ranks' records of one length."""
        return gather_bytes(record, self.group)

    def _share(self, payload: bytes) -> list[bytes]:
        return share_bytes(payload, self.group)


def describe(error: Exception) -> str:
    """Return an error's text; with the name of its errno and its file, where it has some."""
    if isinstance(error, OSError) and error.errno is not None:
        name = errno.errorcode.get(error.errno, str(error.errno))
        return f"{name}: {error.strerror}: {error.filename}" if error.filename else f"{name}: {error.strerror}"
    return str(error) if isinstance(error, (*_ARGUMENTS, CheckpointError)) else f"{type(error).__name__}: {error}"
