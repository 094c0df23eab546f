"""`train --debug-rank`: a terminal for one rank of a run, at `breakpoint()` and where it fails."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from hp_platform.extend import TERMINAL, Place, inspect_error, open_debugger


def hand_over_terminal() -> None:
    """Name this process's terminal to ranks, which have no standard input, and keep it free of a live display."""
    if sys.stdin.isatty():
        os.environ[TERMINAL] = os.ttyname(sys.stdin.fileno())
    os.environ["TERM"] = "dumb"


@contextlib.contextmanager
def debugged(place: Place, rank: int) -> Iterator[None]:
    """Let Python's `breakpoint()` stop in one rank alone, and show where that rank fails.

    Args:
        place: this rank's.
        rank: the one that is debugged.
    """
    before, own = sys.breakpointhook, place.rank == rank
    says = f"rank {rank} of {place.world_size}; the others go on, and wait where they need it"

    def stop(*_: Any, **__: Any) -> None:
        if own:
            open_debugger(sys._getframe(1), says=says)

    sys.breakpointhook = stop
    try:
        yield
    except Exception as error:
        if own:
            inspect_error(error, says=f"rank {rank} of {place.world_size} has failed; `quit` ends the run")
        raise
    finally:
        sys.breakpointhook = before
