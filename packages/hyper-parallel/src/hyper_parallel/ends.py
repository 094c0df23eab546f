"""Errors that all ranks raise alike: the launcher says once what they are, and no rank that was first."""

from __future__ import annotations

import time
from pathlib import Path

from hyper_parallel.launch import EXPLAINED, Job, Place

__all__ = ["ended_alike", "tell_end"]

_PATIENCE = 2.0
_POLL = 0.02


def tell_end(job: Job, place: Place, error: Exception) -> None:
    """Tell the launcher what a rank ends with, where that tells its user what to do, and let the others do so as well.

    Args:
        job: of the rank.
        place: of the rank; one of several machines has no launcher that could compare.
        error: what it raised.
    """
    if job.flights is None or type(error).__name__ not in EXPLAINED:
        return
    hidden = job.flights / f".rank-{place.rank}.end"
    hidden.write_text(str(error), encoding="utf-8")
    hidden.rename(job.flights / f"rank-{place.rank}.end")
    deadline = time.monotonic() + _PATIENCE  # the launcher ends those that have said nothing
    while len(_ends(job.flights)) < place.world_size and time.monotonic() < deadline:
        time.sleep(_POLL)


def ended_alike(folder: Path, ranks: int) -> str | None:
    """Return the error that all ranks have raised, None where they did not raise one.

    Args:
        folder: of the job's flights.
        ranks: their number.
    """
    ends = _ends(folder)
    texts = {path.read_text(encoding="utf-8") for path in ends}
    return texts.pop() if len(ends) == ranks and len(texts) == 1 else None


def _ends(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.end"))
