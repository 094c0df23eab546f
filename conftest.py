"""Makes a checkout testable without installing it: `python -m pytest packages/hp-dtensor --backend torch-cuda`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

# Where packages are installed, exactly those are tested, so that a dependency that one of them forgot to name shows.
if importlib.util.find_spec("hp_platform") is None:
    _sources = [str(path) for path in sorted(Path(__file__).parent.glob("packages/*/src"))]
    sys.path[:0] = _sources
    # Child processes (ranks, command lines under test) need the same.
    os.environ["PYTHONPATH"] = os.pathsep.join([*_sources, *filter(None, [os.environ.get("PYTHONPATH")])])

pytest_plugins = ["hp_testing.plugin"]
