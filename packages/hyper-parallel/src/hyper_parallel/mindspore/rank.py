"""The programs of a run's processes on MindSpore.

    python -m hyper_parallel.mindspore.rank msrun LAUNCHER MSRUN OPTIONS...    becomes msrun, and ends with the launcher
    python -m hyper_parallel.mindspore.rank FOLDER                             msrun starts it for ranks and scheduler

Note [Files of the ranks]
msrun tells that a process has ended, but neither which rank it was nor why. In the folder that they share with the
launcher, each rank writes `rank<i>.pid` at once, and at its end `rank<i>.result` (its result, pickled) or
`rank<i>.failure` (its error). Such a file appears complete, by renaming. Rank 0 prints to `output`, which the
launcher shows; the other ranks' output is in msrun's logs only, like MindSpore's own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from hp_platform.extend import end_with_parent, launcher_place
from hyper_parallel.launching.launch import explanation

JOB = "job"
OUTPUT = "output"


def become_msrun(launcher: int, command: list[str]) -> None:
    """Replace this process by msrun. See Note [No orphans] in `hp_platform.platforms.launchers`.

    Args:
        launcher: the process that started this one; it may have ended since.
        command: msrun's path and its options.
    """
    end_with_parent()
    if os.getppid() == launcher:
        os.execv(command[0], command)  # The signal that was asked of the kernel stays in force.


def run_rank(folder: Path) -> None:
    """Run the work of the folder's job.

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
    except BaseException as error:
        if place.rank >= 0:
            text = explanation(type(error).__name__, str(error), traceback.format_exc())
            _write(folder / f"rank{place.rank}.failure", text.encode())
        raise
    if place.rank >= 0:
        _write(folder / f"rank{place.rank}.result", pickle.dumps(result))


def _write(path: Path, content: Any) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.rename(path)


if __name__ == "__main__":
    if sys.argv[1] == "msrun":
        become_msrun(int(sys.argv[2]), sys.argv[3:])
    else:
        run_rank(Path(sys.argv[1]))
