"""Processes that end with the one that started them, however that one ends.

Note [No orphans]
    A launcher that is killed by SIGKILL can't end its ranks, and a rank that waits in a collective runs no Python that
    could notice. On Linux the kernel does it: a process may ask for a signal for when its parent ends. It is sent when
    the parent's *thread* ends, so it is for ranks whose launcher is ours and starts them from its main thread. A rank
    that was forked from multiprocessing's server has the server for a parent, which ends with the launcher. Beside it,
    and for all others, a thread watches.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait

_PR_SET_PDEATHSIG = 1
_POLL = 0.5


def end_with_parent() -> None:
    """End this process by SIGKILL when its parent's thread that started it ends: see Note [No orphans]."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    watch_parent()


def watch_parent() -> None:
    """End this process once the one that started it has ended, if it still runs Python."""
    parent, number = multiprocessing.parent_process(), os.getppid()

    def ended() -> None:
        while os.getppid() == number:
            time.sleep(_POLL)

    def server_ended() -> None:
        assert parent is not None
        wait([parent.sentinel])

    def watch(until: Callable[[], None]) -> None:
        until()
        os._exit(1)

    threading.Thread(
        target=watch, args=(ended if parent is None else server_ended,), name="watch-parent", daemon=True
    ).start()
