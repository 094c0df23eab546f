"""Becomes msrun, and ends with the launcher: `python -m hyper_parallel.mindspore.msrun LAUNCHER MSRUN OPTIONS...`."""

from __future__ import annotations

import os
import sys

from hp_platform.extend import end_with_parent


def main(launcher: int, command: list[str]) -> None:
    """Runs msrun in this process's place. See Note [No orphans] in `hp_platform.host`.

    Args:
        launcher: the process that started this one, and may have ended since.
        command: msrun's path and its options.
    """
    end_with_parent()
    if os.getppid() == launcher:
        os.execv(command[0], command)  # What the kernel was asked for holds on.


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
