"""Makes a checkout testable without installing it: `python -m pytest packages/hp-dtensor --backend torch-cuda`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_sources = [str(path) for path in sorted(Path(__file__).parent.glob("packages/*/src"))]
sys.path[:0] = [path for path in _sources if path not in sys.path]
# Child processes (ranks, command lines under test) need the same.
os.environ["PYTHONPATH"] = os.pathsep.join([*_sources, *filter(None, [os.environ.get("PYTHONPATH")])])

pytest_plugins = ["hp_platform.testing.plugin"]
