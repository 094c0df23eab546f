"""How ranks end together: past their last barrier, or by an error that all of them raise and the launcher says once."""

from __future__ import annotations

import time
from pathlib import Path

from hp_platform.extend import Place
from hyper_parallel.launching.launch import EXPLAINED, Job

_PATIENCE = 2.0
_LAST = 120.0
_POLL = 0.02


def leave_together(job: Job, place: Place) -> None:
    """Stay until all ranks are past their last barrier.

    A rank that has come through it may still owe the others a message: mccl sends beside the program, and what it has
    not sent when the process ends is lost. Whoever waits for that message waits for ever.

    Args:
        job: of the rank.
        place: of the rank; one that msrun or torchrun started for somebody else has no folder to meet in.
    """
    if job.flights is None:
        return
    (job.flights / f"rank-{place.rank}.past").touch()
    deadline = time.monotonic() + _LAST  # one that ended meanwhile is the launcher's to report
    while len(list(job.flights.glob("rank-*.past"))) < place.world_size and time.monotonic() < deadline:
        time.sleep(_POLL)


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
