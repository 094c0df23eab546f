"""What msrun starts for each rank, and for its scheduler: `python -m hyper_parallel.mindspore.rank FOLDER`.

Note [What ranks leave behind]
msrun tells that a process has ended, not which rank it was nor why. In the folder that they share with the launcher,
each rank writes `rank<i>.pid` at once, and at its end `rank<i>.result` (what its work returned, pickled) or
`rank<i>.failure` (its traceback). Such a file appears whole, by renaming. Rank 0 prints to `output`, for the launcher
to show; what the other ranks print is in msrun's logs alone, as what MindSpore itself writes is.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from hp_platform.extend import end_with_parent
from hyper_parallel.launch import launcher_place

JOB = "job"
OUTPUT = "output"


def main(folder: Path) -> None:
    """Runs the work of the folder's job.

    Args:
        folder: shared with the launcher.
    """
    end_with_parent()  # msrun, which ends with the launcher
    place = launcher_place()
    assert place is not None
    if place.rank >= 0:
        _write(folder / f"rank{place.rank}.pid", str(os.getpid()).encode())
    try:
        with contextlib.ExitStack() as stack:
            if place.rank == 0:
                output = stack.enter_context(open(folder / OUTPUT, "w", encoding="utf-8", buffering=1))
                stack.enter_context(contextlib.redirect_stdout(output))
            work, job = pickle.loads((folder / JOB).read_bytes())
            result = work(job)  # The scheduler stays in it, in init_process_group, until the ranks are done.
    except BaseException:
        if place.rank >= 0:
            _write(folder / f"rank{place.rank}.failure", traceback.format_exc().encode())
        raise
    if place.rank >= 0:
        _write(folder / f"rank{place.rank}.result", pickle.dumps(result))


def _write(path: Path, content: Any) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
