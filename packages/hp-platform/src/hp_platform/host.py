"""What the operating system says about this machine and this process."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path


def memory_bytes() -> int:
    """Get how much memory this machine has, or this process's control group where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max": there is no limit
            total = min(total, int(Path(limit).read_text()))
    return total


def peak_resident_bytes() -> int:
    """Get the largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_resident_bytes() -> None:
    """Start the peak over where the system can (Linux), else it stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
