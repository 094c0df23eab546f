"""A plan's steps in a process whose memory the kernel limits, in a control group beneath this process's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_TREES = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Group:
    """A control group of memory.

    Attributes:
        path: its folder.
        version: 1 or 2.
    """

    path: Path
    version: int

    def used(self) -> int:
        """Return the bytes that can't be taken back: without the cache of files."""
        usage = int((self.path / ("memory.usage_in_bytes" if self.version == 1 else "memory.current")).read_text())
        lines = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        prefix = "total_" if self.version == 1 else ""
        return usage - sum(int(lines[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))

    def limit(self, size: int) -> None:
        """Allow so many bytes, once, and none on disk."""
        names = ("limit_in_bytes", "memsw.limit_in_bytes") if self.version == 1 else ("max", "swap.max")
        for name, value in zip(names, (size, size if self.version == 1 else 0), strict=True):
            file = self.path / f"memory.{name}"
            if file.exists():  # a kernel without swap lacks the second
                file.write_text(str(value))

    def killed(self) -> int:
        """Return how many processes the kernel has ended for their memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        found = re.search(r"^oom_kill (\d+)$", (self.path / name).read_text(), re.MULTILINE)
        return 0 if found is None else int(found[1])


def open_group(name: str) -> Group:
    """Make a control group of memory beneath this process's, without processes; `path.rmdir()` ends it.

    Args:
        name: of the group.

    Raises:
        OSError: there can be none here; it says why.
    """
    own = Path("/proc/self/cgroup")
    for line in own.read_text().splitlines() if own.exists() else ():
        number, kinds, path = line.split(":", 2)
        first = "memory" in kinds.split(",")
        place = (_TREES / "memory" if first else _TREES) / path.lstrip("/") / name
        controllers = place.parent / "cgroup.subtree_control"
        if not first and not (number == "0" and controllers.exists() and "memory" in controllers.read_text().split()):
            continue
        place.mkdir()
        return Group(place, 1 if first else 2)
    raise OSError("the kernel has no control group of memory that is open to this process")


def train(tables: dict[str, Any], memory: int) -> dict[str, int] | None:
    """Take a plan's first steps with so much memory above what the process has without the plan.

    Args:
        tables: of the plan, of one rank.
        memory: bytes.

    Returns:
        Bytes: `had`, of the process before, and `more`, of its resident memory at most in the steps; None where the
        kernel ended it.

    Raises:
        OSError: as `open_group`.
    """
    group = open_group(f"hp_small_memory_{os.getpid()}")
    try:
        request = json.dumps([tables, str(group.path), group.version, memory])
        ended = subprocess.run([sys.executable, __file__], input=request, text=True, capture_output=True)
        if ended.returncode == -9 and group.killed():
            return None
    finally:
        group.path.rmdir()
    assert ended.returncode == 0, f"status {ended.returncode}: {ended.stderr[-2000:]}"
    return json.loads(ended.stdout.splitlines()[-1])


def _main() -> None:
    """Take the steps that the parent asks for."""
    tables, path, version, memory = json.loads(sys.stdin.read())
    group = Group(Path(path), version)
    (group.path / "cgroup.procs").write_text(str(os.getpid()))
    import gc

    import torch

    from hp_plan import ParallelPlan, build_optimizer, build_parallel_model
    from hp_plan.torch.extend import backward_loss, clip_gradients
    from hp_platform import get_platform

    torch.set_num_threads(1)

    def steps(plan: ParallelPlan) -> None:
        model = build_parallel_model(plan)
        optimizer = build_optimizer(plan, model.named_parameters())
        vocabulary = plan.model.overrides["vocab_size"]
        tokens = torch.randint(vocabulary, (plan.data.batch_size, plan.data.sequence_length))
        for _ in range(3):
            optimizer.zero_grad()
            backward_loss(plan, model, tokens)
            clip_gradients(model, plan.run.grad_clip)
            optimizer.step()

    devices, plan = get_platform().devices, ParallelPlan.from_dict(tables)
    steps(replace(plan, data=replace(plan.data, batch_size=1, sequence_length=8)))  # what first steps import
    gc.collect()
    had, resident = group.used(), devices.peak_memory()
    devices.reset_peak_memory()
    group.limit(had + memory)
    steps(plan)
    print(json.dumps({"had": had, "more": devices.peak_memory() - resident}))


if __name__ == "__main__":
    _main()
