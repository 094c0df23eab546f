"""A terminal for one rank while the others wait.

Note [Waiting for a terminal]
    Nobody knows how long a person looks. The ranks that wait exchange an empty message about once a second with a
    thread of the rank that is debugged, so no time limit of a backend passes, and each exchange is a move that a watch
    over hangs sees. A rank that steps on in the debugger notes that it goes on while it waits for a command.
"""

from __future__ import annotations

import bdb
import contextlib
import os
import pdb
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from hp_platform.communication.agreement import share_bytes
from hp_platform.failures.flight import beating
from hp_platform.groups import is_initialized, own_rank
from hp_platform.groups import size as world_size
from hp_platform.port import port

TERMINAL = "HYPER_PARALLEL_TERMINAL"
"""The variable that names the terminal of ranks whose launcher has taken away theirs."""
_ROUND = 1.0  # seconds
_GOES_ON, _OVER = b"waits", b"over"


def breakpoint(rank: int | None = None) -> None:
    """Stop here, and debug one rank in the terminal by pdb while all others wait, for as long as it takes.

    All ranks call it together. The others go on when the debugger does (`continue`, or the first step). An expression
    that communicates, such as `full_tensor()` of a DTensor, waits for the others in vain: let all ranks compute it
    before. Without a process group it is Python's own `breakpoint()`.

    Args:
        rank: which. Default 0.

    Raises:
        ValueError: there is no such rank; on all ranks.
        bdb.BdbQuit: on the rank that is debugged, by its command `quit`.
    """
    frame = sys._getframe(1)
    if not is_initialized():
        open_debugger(frame)
        return
    chosen, count = rank or 0, world_size()
    if not 0 <= chosen < count:
        raise ValueError(f"breakpoint: rank must be one of the {count} ranks, from 0 to {count - 1}, got {rank}")
    group = port().groups.world()
    if own_rank() != chosen:
        while share_bytes(b"", group)[chosen] != _OVER:
            pass
        return
    debugger = _Debugger(f"rank {chosen} of {count}; the others wait")
    with _others_wait(group):
        debugger.look(frame)
    debugger.go_on()


def open_debugger(frame: FrameType | None = None, *, says: str = "") -> None:
    """Debug this process from a frame on, by default the caller's, in its terminal; the others don't wait.

    Args:
        frame: where to look first.
        says: printed before the first prompt.
    """
    debugger = _Debugger(says)
    debugger.look(frame or sys._getframe(1))
    debugger.go_on()


def inspect_error(error: BaseException, *, says: str = "") -> None:
    """Look at where this process has failed, in its terminal.

    Args:
        error: what it raised.
        says: printed before the first prompt.
    """
    debugger = _Debugger("".join(traceback.format_exception(error)) + says)
    debugger.look(None, error.__traceback__)


@contextlib.contextmanager
def _others_wait(group: Any) -> Iterator[None]:
    """Answer the ranks that wait until the block is over: see Note [Waiting for a terminal]."""
    over = threading.Event()

    def answer() -> None:
        while not over.wait(_ROUND):
            share_bytes(_GOES_ON, group)

    thread = threading.Thread(target=answer, name="hp_platform breakpoint", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        share_bytes(_OVER, group)


class _Debugger(pdb.Pdb):
    """pdb in the rank's terminal."""

    def __init__(self, says: str) -> None:
        reads, writes = _terminal() or (None, None)
        super().__init__(
            stdin=reads, stdout=writes, nosigint=True, skip=["hp_platform.*", "hyper_parallel.supervision.debugging"]
        )
        self._says = says

    def look(self, frame: FrameType | None, trace: TracebackType | None = None) -> None:
        """Ask for commands in a frame, or in the last one of a traceback; stepping begins with `go_on`."""
        if self._says:
            self.message(self._says)
        self.reset()
        self.botframe = frame
        self.interaction(frame, trace)

    def go_on(self) -> None:
        """Do what the last command said.

        Raises:
            bdb.BdbQuit: it was `quit`.
        """
        if self.quitting:
            raise bdb.BdbQuit
        if self.stoplineno == -1 and not self.get_all_breaks():  # continue
            sys.settrace(None)
            return
        caller = sys._getframe(1)
        while caller is not None:
            caller.f_trace, caller = self.trace_dispatch, caller.f_back
        sys.settrace(self.trace_dispatch)

    def interaction(self, frame: Any, *rest: Any) -> None:
        """Ask for commands."""
        with beating():
            super().interaction(frame, *rest)


def _terminal() -> tuple[Any, Any] | None:
    """Open the terminal of a rank whose standard input is none, to read and to write; None if there is none to open."""
    if sys.stdin is not None and sys.stdin.isatty():
        return None
    named = os.environ.get(TERMINAL)
    for stream in () if named else (1, 2):
        with contextlib.suppress(OSError):
            named = named or os.ttyname(stream)
    if not named:
        return None
    number = os.open(named, os.O_RDWR | os.O_NOCTTY)
    return os.fdopen(number), os.fdopen(os.dup(number), "w", buffering=1)
