"""A batch script that trains a plan on the nodes of a SLURM cluster.

Note [The signal before the limit]
    `--signal=TERM@SECONDS` sends SIGTERM to the ranks, and neither to the shell of the batch script nor to srun, which
    takes a SIGTERM of its own for the end, and kills the ranks at once. They save and end by themselves, with status 0.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hp_plan import Diagnostic, ParallelPlan

_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")
_OPTION = re.compile(r"[a-z][a-z-]*(=.+)?", re.DOTALL)
_OURS = ("nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "gpus-per-task", "signal", "time", "chdir")
_MARGIN = 30  # seconds from the end of the ranks' time to that of the job


@dataclass(frozen=True)
class Request:
    """What a job asks of the cluster.

    Attributes:
        nodes: their number.
        gpus_per_node: as many as ranks on a node; None: as many as the mesh needs; 0: the ranks are on CPUs.
        time: the limit as sbatch reads it, such as 8:00:00; None is the partition's.
        options: further ones of sbatch, as `partition=gpu`.
    """

    nodes: int
    gpus_per_node: int | None = None
    time: str | None = None
    options: tuple[str, ...] = ()

    def ranks_per_node(self, plan: ParallelPlan) -> int:
        """Return the number of ranks that a node starts."""
        return self.gpus_per_node or plan.mesh.world_size // self.nodes


def check_request(request: Request, plan: ParallelPlan) -> list[Diagnostic]:
    """Check that a job has as many ranks as the plan's mesh, and that sbatch can read it.

    Args:
        request: of the job.
        plan: that it trains.
    """
    found, ranks = [], plan.mesh.world_size
    if plan.run.platform == "mindspore":
        message = "got 'mindspore', but srun starts ranks of PyTorch only"
        found.append(Diagnostic("run.platform", message, "start MindSpore's ranks by msrun on each node"))
    if request.ranks_per_node(plan) * request.nodes != ranks:
        mesh = plan.mesh.described
        each = f" of {request.gpus_per_node} GPUs" if request.gpus_per_node else ""
        message = f"the mesh {mesh} has {ranks} ranks, which {request.nodes} nodes{each} can't start, one a GPU"
        fitting = ", ".join(f"{count} x {ranks // count}" for count in _divisors(ranks))
        fix = f"nodes x GPUs that fit: {fitting}; or change the sizes in [mesh]"
        found.append(Diagnostic("mesh", message, fix))
    if request.time is not None and _TIME.fullmatch(request.time) is None:
        message = f"got {request.time!r}, which sbatch does not read"
        found.append(Diagnostic("--time", message, "write minutes, hours:minutes:seconds or days-hours"))
    for option in request.options:
        name = option.partition("=")[0]
        if name in _OURS:
            found.append(Diagnostic("--sbatch", f"{name} is set by this command", "leave it out"))
        elif _OPTION.fullmatch(option) is None or "\n" in option:
            message = f"got {option!r}, which is no option of sbatch"
            found.append(Diagnostic("--sbatch", message, "write for example --sbatch partition=gpu"))
    return found


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def job_script(request: Request, plan: ParallelPlan, path: Path, folder: Path, assignments: Sequence[str] = ()) -> str:
    """Write the script that sbatch takes: each task of its srun is a rank. See Note [The signal before the limit].

    Args:
        request: of the job, checked.
        plan: that it trains.
        path: of the plan's file.
        folder: of the run; all nodes see it.
        assignments: `key=value`, in place of the plan's.
    """
    ranks, gpus = request.ranks_per_node(plan), request.gpus_per_node != 0
    options = [
        f"job-name={path.stem}",
        f"chdir={Path.cwd()}",
        f"nodes={request.nodes}",
        f"ntasks-per-node={ranks}",
        *([f"gpus-per-node={ranks}"] if gpus else []),
        *([f"time={request.time}"] if request.time is not None else []),
        f"signal=TERM@{math.ceil(plan.run.stop_within) + _MARGIN}",
        "requeue",
        "open-mode=append",
        *request.options,
    ]
    command = ["train", str(path), "--out", str(folder), "--resume", "auto"]
    command += [part for each in assignments for part in ("--set", each)]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {_option(each)}" for each in options),
        "",
        f"# Before the limit the ranks get SIGTERM, and have {plan.run.stop_within:g} s (run.stop_within) to save.",
        "# Submitted again, the run goes on from its newest checkpoint.",
        f"export HYPER_PARALLEL_DEVICE={'cuda' if gpus else 'cpu'}",
        "srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \\",
        f"    {shlex.join([sys.executable, '-m', 'hyper_parallel'])} \\",
        f"    {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def _option(text: str) -> str:
    """Write an option for sbatch, which takes quotes as a shell does.

    >>> _option("partition=gpu"), _option("requeue"), _option("comment=a b")
    ('--partition=gpu', '--requeue', "--comment='a b'")
    """
    name, equals, value = text.partition("=")
    return f"--{name}{equals}{shlex.quote(value) if equals else ''}"
