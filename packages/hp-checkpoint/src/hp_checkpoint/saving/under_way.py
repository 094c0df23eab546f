"""Saves of this process that are under way, by the folder that each makes: the next one waits, so the newest stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_POLL = 0.01
_saves: dict[str, list[Callable[[], bool]]] = {}


def begun(target: Path, ended: Callable[[], bool]) -> None:
    """Take note of a save.

    Args:
        target: the checkpoint's folder.
        ended: tells whether the save is complete or has failed.
    """
    for place in list(_saves):
        _saves[place] = [each for each in _saves[place] if not each()]
        if not _saves[place]:
            del _saves[place]
    _saves.setdefault(os.path.realpath(target), []).append(ended)


def wait_for_saves(target: Path) -> None:
    """Wait until this process has no save of a folder under way."""
    for ended in _saves.pop(os.path.realpath(target), ()):
        while not ended():
            time.sleep(_POLL)
