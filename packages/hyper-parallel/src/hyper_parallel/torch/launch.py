"""Ranks by torchrun's launcher, forked from one process that has the libraries loaded.

Note [Ranks are forked from a server]
Importing torch and transformers takes seconds of processor time a process. The ranks are forked from multiprocessing's
fork server, which imports them once and does nothing else (a process that has run threads or touched a device must not
be forked). It is started before the plan is checked, so that its imports run meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from hp_plan import ParallelPlan
from hp_platform.extend import divide_threads
from hyper_parallel.launching.launch import Interrupted, Job, RankFailure, explanation
from hyper_parallel.launching.recovering import launch_recovering
from hyper_parallel.reports.display import make_reporter
from hyper_parallel.reports.events import showing
from hyper_parallel.supervision.hanging import last_move, watching
from hyper_parallel.supervision.run_end import ended_alike, say_first_interrupt, show_notes

Result = TypeVar("Result")

_OURS = ("hyper_parallel.worker", "hyper_parallel.launching.member", "hyper_parallel.torch.trainer")
_TRANSFORMERS = (
    "transformers.models.auto.modeling_auto",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.modeling_utils",
)


def start_server(plan: ParallelPlan, ranks: int) -> None:
    """Start the process that ranks will be forked from; it imports the libraries meanwhile.

    Args:
        plan: tells which libraries.
        ranks: their number, which decides the threads of each.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(divide_threads(ranks)))
    libraries = _TRANSFORMERS if plan.model.of_transformers else ()
    # Optimizers import torch._dynamo at their first step.
    multiprocessing.set_forkserver_preload([*_OURS, "torch._dynamo", *libraries])
    multiprocessing.forkserver.ensure_running()


def launch(work: Callable[[Job], Result], job: Job, *, ranks: int) -> dict[int, Result]:
    """Run `work(job)` on new ranks of this machine, by torchrun's launcher, and wait for all of them.

    A rank that fails, or a signal to this process, ends all ranks; with spares in the job, a training run goes on
    without the rank (`launching.recovering`). On a terminal this process shows a training run, and
    the ranks' lines above its table.

    Args:
        work: a function at the top of a module.
        job: handed to it.
        ranks: their number.

    Returns:
        What each rank returned.

    Raises:
        RankFailure: a rank raised or was killed.
        Interrupted: this process got SIGINT, SIGTERM, SIGHUP or SIGQUIT.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_torchrun()
    start_server(job.plan, ranks)
    if job.spares:
        return launch_recovering(job, ranks=ranks)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # A free port, as `torchrun --standalone` takes.
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(),
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # of SIGINT: `_interrupts`
    )
    plan = job.plan
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as name:
        job, shown = dataclasses.replace(job, flights=Path(name)), contextlib.nullcontext()
        if _live(job):
            job = dataclasses.replace(job, events=Path(name) / "events")
            shown = showing(Path(name) / "events", make_reporter(json_lines=False))
        with watching(Path(name), ranks, job.hang_after, plan.mesh.axes) as watch:
            try:
                with _interrupts() as interrupts, shown:
                    return elastic_launch(config, work)(job)
            except ChildFailedError as error:
                show_notes(job, ranks)
                text = ended_alike(Path(name), ranks)
                if text is not None:
                    raise RankFailure(0, text, alike=True) from None
                hung = watch.failure if watch is not None else None
                raise RankFailure(*(hung or _first_failure(error, Path(name), plan.mesh.axes))) from None
            except SignalException as error:
                raise Interrupted(signal.SIGINT if interrupts else error.sigval) from None


def _live(job: Job) -> bool:
    """Return True if a run is shown by a table that is drawn again; a rank that is debugged has the terminal itself."""
    return job.folder is not None and job.debug_rank is None and not job.json_lines and sys.stdout.isatty()


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Let Ctrl-C ask the ranks to save and end, as SIGTERM does, and a second one end them at once."""
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if len(heard) == 1:
            say_first_interrupt()
            os.kill(os.getpid(), signal.SIGTERM)
            return
        for child in multiprocessing.active_children():
            child.kill()

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)


def _silence_torchrun() -> None:
    """Silence torchrun: RankFailure says more than its messages. Each of its loggers has its own level."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _first_failure(error: Any, flights: Path, axes: Mapping[str, int]) -> tuple[int, str]:
    rank, failure = error.get_first_failure()
    message = failure.message
    if isinstance(message, dict):
        text = message.get("message", "")
        kind, _, own = text.partition(": ")
        trace = message.get("extraInfo", {}).get("py_callstack") or text
        message = explanation(kind, own, f"{trace.rstrip()}{last_move(flights, rank, axes)}")
    elif failure.exitcode > 0:
        message = f"exit code {failure.exitcode} (process {failure.pid}){last_move(flights, rank, axes)}"
    if failure.exitcode < 0:
        message = f"killed by {signal.Signals(-failure.exitcode).name} (process {failure.pid})"
        if -failure.exitcode == signal.SIGKILL:
            message += "; the system does that when memory runs out: take a smaller model or batch, or more ranks"
        message += last_move(flights, rank, axes)
    return rank, str(message).rstrip()
