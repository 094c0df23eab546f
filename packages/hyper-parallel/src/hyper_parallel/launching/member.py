"""The process of a run that recovers: it takes part in epochs, or waits as a spare; see Note [Epochs]."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import hp_platform
from hp_checkpoint.extend import Copies
from hp_plan.extend import build
from hp_platform import get_platform
from hp_platform.extend import (
    end_with_parent,
    launcher_place,
    leave_flight,
    meet_on_this_machine,
    note_step,
    record_flight,
)
from hyper_parallel.launching.launch import Job, explanation
from hyper_parallel.port import copying, rank_process
from hyper_parallel.reports.display import make_reporter
from hyper_parallel.reports.events import EventWriter, hand_over_output
from hyper_parallel.run import Run
from hyper_parallel.supervision.recovery import Epoch, Told
from hyper_parallel.supervision.run_end import Stop
from hyper_parallel.training.sentinel import FaultyRankError
from hyper_parallel.worker import failed_by_another, format_warning, train


def live(job: Job, control: Connection) -> None:
    """Take part in the epochs that the launcher names, until it names none.

    Args:
        job: of every rank.
        control: to the launcher.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's
    end_with_parent()
    if job.events is not None:
        hand_over_output(job.events.parent)
    warnings.formatwarning = format_warning
    stop = Stop(job.plan.run.stop_within)
    if not control.poll():  # a spare
        _warm(job)
    control.send(Told("spare"))
    with contextlib.suppress(EOFError):
        while (epoch := control.recv()) is not None:
            told = _take_part(job, epoch, stop, control)
            if told.error == FaultyRankError.__name__:  # what it computes is wrong
                control.send(told)
                break
            _clear()
            control.send(told)
    os._exit(0)  # threads of a backend may hold what has been sent


def _warm(job: Job) -> None:
    """Do what the first model of a process takes longer for; whatever is wrong with it is found in an epoch."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build().build_empty(job.plan)


def _take_part(job: Job, epoch: Epoch, stop: Stop, control: Connection) -> Told:
    """Train as a rank of an epoch; return how that ended."""
    place = {"RANK": epoch.rank, "LOCAL_RANK": epoch.rank, "WORLD_SIZE": epoch.ranks, "LOCAL_WORLD_SIZE": epoch.ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    process, own = rank_process(), launcher_place()
    assert own is not None and job.folder is not None
    process.prepare(own)
    record_flight(epoch.flights, epoch.rank)
    copies = Copies(epoch.holders, rank=epoch.rank, epoch=epoch.number)

    def begun(run: Run) -> None:
        for text in copies.refused:
            control.send(Told("note", epoch.number, text))
        control.send(Told("began", epoch.number, run.origin, step=run.step))

    try:
        meet_on_this_machine(epoch.rank, epoch.ranks, epoch.port)
        reporter = None
        if epoch.rank == 0:
            reporter = EventWriter(job.events) if job.events else make_reporter(json_lines=job.json_lines)
        stop.listen()
        tell = functools.partial(_say, control, epoch.number)
        options: dict[str, Any] = {"resume": epoch.resume, "until": epoch.until, "stop": stop, "tell": tell}
        options |= {"newest": epoch.newest, "proved": epoch.proved}
        result = train(job.plan, job.folder, reporter=reporter, copies=copies, begun=begun, **options)
        note_step("end", 0 if result is None else result.steps)
        get_platform().collectives.barrier()
        return Told("done", epoch.number, result=result)
    except FaultyRankError as error:  # alike on all ranks
        if epoch.rank not in error.ranks:
            return Told("lost", epoch.number, str(error), newest=error.newest)
        text = f"{error}; its process ends itself"
        return Told("failed", epoch.number, text, FaultyRankError.__name__, newest=error.newest)
    except Exception as error:
        if any(process.peer_lost(each) for each in _chain(error)) or failed_by_another(error):
            return Told("lost", epoch.number, str(error))
        get_platform().groups.give_up(f"{type(error).__name__}: {error}")
        name, trace = type(error).__name__, "".join(traceback.format_exception(error)).rstrip()
        return Told("failed", epoch.number, explanation(name, str(error), trace), name)
    finally:
        copies.close()


def _chain(error: BaseException | None) -> Iterator[Exception]:
    """List an error and those that it came from."""
    while isinstance(error, Exception):
        yield error
        error = error.__cause__ or error.__context__


def _say(control: Connection, epoch: int, text: str) -> None:
    control.send(Told("note", epoch, text))


def _clear() -> None:
    """Let go of the epoch: its groups, its recorder, and what errors of its frames held."""
    sys.stdout.flush()
    sys.stderr.flush()
    leave_flight()
    copying().forget()
    gc.collect()
    with contextlib.suppress(RuntimeError):  # of connections that are broken
        if get_platform().groups.is_initialized():
            hp_platform.destroy_process_group()
    gc.collect()


def start(job: Job) -> tuple[BaseProcess, Connection]:
    """Start a process that takes part in epochs; return it with a connection to it.

    Args:
        job: of every rank.
    """
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=live, args=(job, there))
    process.start()
    there.close()
    return process, here
