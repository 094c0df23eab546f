"""SIGTERM, by which clusters take machines away: a run ends after its step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_STATUS = 128 + signal.SIGTERM


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
        """Take SIGTERM as a request to stop."""
        signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(_STATUS)
        self.asked = True
        end = threading.Timer(self._within, os._exit, (_STATUS,))
        end.daemon = True
        end.start()
