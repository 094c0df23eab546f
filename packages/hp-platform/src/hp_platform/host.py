"""What the operating system says about this process."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path


def peak_resident_bytes() -> int:
    """Get the largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_resident_bytes() -> None:
    """Start the peak over where the system can (Linux), else it stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
