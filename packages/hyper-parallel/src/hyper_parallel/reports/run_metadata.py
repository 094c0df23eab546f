"""`run.json`: what a run is, the devices it runs on with their peaks, and when it began and went on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import socket
import subprocess
import uuid
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from hp_checkpoint.extend import Ranks
from hp_plan import ParallelPlan
from hp_platform import get_platform
from hyper_parallel import PACKAGES
from hyper_parallel.data import Content
from hyper_parallel.reports.output import RECORD, OutputError, replace_text

_LIBRARIES = ("torch", "mindspore", "torch_npu", "transformers", "safetensors", "numpy")
_PATIENCE = 10.0


def begin(
    folder: Path, plan: ParallelPlan, contents: Sequence[Content], *, step: int, ranks: Ranks
) -> dict[str, Any] | None:
    """Add a start to a run's record; every rank calls it, and rank 0 writes.

    Args:
        folder: of the run.
        plan: as it runs from now on.
        contents: of its data.
        step: after which it goes on; 0 begins it.
        ranks: of the run.

    Returns:
        The record, on rank 0: `id`, which stays, and `starts`, each with its plan, versions, machines, git state, data.

    Raises:
        OutputError: the folder has a record that can't be read.
    """
    devices = get_platform().devices
    places = ranks.agree(
        lambda: json.dumps([socket.gethostname(), devices.kind, devices.name()]).encode(), "the record"
    )
    if ranks.rank:
        return None
    path = folder / RECORD
    record = _read(path) if step else {"id": uuid.uuid4().hex, "starts": []}
    hosts = Counter(map(tuple, map(json.loads, places)))
    record["starts"].append(
        {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": step,
            "ranks": ranks.size,
            "hosts": [
                {"name": name, "ranks": count, "device": {"kind": kind, "name": device}}
                for (name, kind, device), count in hosts.items()
            ],
            "versions": versions(),
            "folder": os.getcwd(),
            "git": git_state(Path.cwd()),
            "data": [dataclasses.asdict(content) for content in contents],
            "plan": plan.to_dict(),
        }
    )
    replace_text(path, json.dumps(record, indent=1))
    return record


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {"id": str(record["id"]), "starts": list(record["starts"])}
    except FileNotFoundError:
        return {"id": uuid.uuid4().hex, "starts": []}
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{path} can't be read: {error!r}; move it away to go on without it") from error


def versions() -> dict[str, str]:
    """Return the versions of Python, of our packages and of the libraries that they run on."""
    found = {"python": platform.python_version()}
    for name in sorted([*_LIBRARIES, "hyper-parallel", *(each.replace("_", "-") for each in PACKAGES)]):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of a working folder and the files that differ from it; None where it has none."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "changed": [line[3:] for line in (changed or "").splitlines()]}


def _git(folder: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):  # No git, or a file system that is slow.
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


# Operations a second in bfloat16 and float16 with dense matrices, by the makers' data sheets; the first that fits.
_PEAKS = (
    (r"B200", 2250e12),
    (r"H200", 989e12),
    (r"H100 NVL", 835e12),
    (r"H100 PCIe", 756e12),
    (r"H800 PCIe", 756e12),
    (r"H[18]00|GH200", 989e12),
    (r"H20", 148e12),
    (r"A[18]00", 312e12),
    (r"A40", 149.7e12),
    (r"A10G", 70e12),
    (r"A10", 125e12),
    (r"L40S", 362e12),
    (r"L40", 181e12),
    (r"L4", 121e12),
    (r"RTX 4090", 165.2e12),
    (r"MI300X", 1307e12),
    (r"MI325X", 1307e12),
)


def known_peak(device: str, dtype: str) -> float | None:
    """Return the operations a second that a device can do at most; None where that isn't known.

    >>> known_peak("NVIDIA H100 80GB HBM3", "bfloat16")
    989000000000000.0
    >>> known_peak("NVIDIA H100 80GB HBM3", "float64") is None
    True

    Args:
        device: its name, as its maker calls it.
        dtype: of the model's computation.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((peak for name, peak in _PEAKS if re.search(rf"\b(?:{name})\b", device)), None)
