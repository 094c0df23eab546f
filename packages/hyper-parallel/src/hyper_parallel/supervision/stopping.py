"""SIGTERM, by which clusters take machines away, and Ctrl-C: a run ends after its step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

_RETURNED = 0.5  # seconds, by when a rank's result is in the launcher's pipe


class Stop:
    """Whether a signal asked this process to stop.

    Args:
        within: seconds that it has for it; then, or at a second signal, it ends at once.

    Attributes:
        asked: by a signal.
    """

    def __init__(self, within: float) -> None:
        self._within, self.asked = within, False

    def listen(self) -> None:
        """Take SIGTERM as a request to stop, and SIGINT where no launcher of ours takes it."""
        signal.signal(signal.SIGTERM, self._hear)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)
        self.asked = True
        _after(self._within, 128 + number)

    def end(self) -> None:
        """End a rank that was forked and whose work is done, if it was asked to stop.

        It would wait until torchrun's launcher has read its result, and one that got the signal too never does.
        """
        if self.asked:
            sys.stdout.flush()
            sys.stderr.flush()
            _after(_RETURNED, 0)


def _after(seconds: float, status: int) -> None:
    """End the process, whatever it does then."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def say_first_interrupt() -> None:
    """Say what the first Ctrl-C does."""
    sys.stderr.write("note: the run ends after the steps that have begun, and is saved; Ctrl-C again ends it at once\n")
    sys.stderr.flush()
