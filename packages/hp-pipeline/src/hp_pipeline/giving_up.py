"""A run that cannot end, because a stage failed on one of the ranks that communicate inside of it.

Note [A stage that failed on one of its ranks]
    A stage may have collectives of its own: among tensor parallel ranks, or the shards of a module. A rank whose stage
    raised takes part in none of them any more, so the others of the stage wait for it, and all stages for them. The
    rank can't see that; but it gets nowhere itself, in a receive or at the end of the run. So once it has failed a
    thread of it watches whether its steps go on, and if they don't it gives up for all: every rank's collective ends
    with its error, where the backend can (`hp_platform.groups.give_up`). Stages without collectives of their own come
    to the end of the run, and the next run works.
"""

from __future__ import annotations

import threading
import time

from hp_platform import get_platform

__all__ = ["GivingUp"]

_POLL = 0.1


class GivingUp:
    """A thread that gives a run up when this rank has failed and its steps don't go on; a context manager.

    Args:
        patience: seconds without a step.
    """

    def __init__(self, patience: float) -> None:
        self._patience, self._over = patience, threading.Event()
        self._moved = 0.0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GivingUp:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def failed(self, text: str) -> None:
        """Begin to watch: this rank's stage raised.

        Args:
            text: what the others are told.
        """
        if self._thread is None:
            self._moved = time.monotonic()
            self._thread = threading.Thread(target=self._watch, args=(text,), name="hp_pipeline patience", daemon=True)
            self._thread.start()

    def move(self) -> None:
        """Note that this rank goes on."""
        self._moved = time.monotonic()

    def _watch(self, text: str) -> None:
        while not self._over.wait(_POLL):
            if time.monotonic() - self._moved > self._patience:
                get_platform().groups.give_up(text)
                return
