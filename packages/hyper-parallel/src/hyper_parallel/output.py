"""Where a run writes: its folder, made and tried before any rank starts."""

from __future__ import annotations

import os
import time
from pathlib import Path


class OutputError(ValueError):
    """A folder that a run can't write to."""


def prepare_folder(out: str | os.PathLike[str] | None, *, name: str) -> Path:
    """Makes a run's folder and tries to write there.

    Args:
        out: the folder; None is `runs/<name>-<time>`.
        name: of the plan.

    Raises:
        OutputError: it can't be made or written to.
    """
    folder = Path(out) if out is not None else Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
        for place in (folder, folder / "checkpoint"):
            trial = place / f".trial-{os.getpid()}"
            trial.write_bytes(b"")
            trial.unlink()
    except OSError as error:
        raise OutputError(
            f"the checkpoint can't be written to {folder}: {error.strerror} ({error.filename}); choose another folder "
            "with --out"
        ) from error
    return folder
