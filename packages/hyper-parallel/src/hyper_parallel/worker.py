"""What a rank runs, whoever started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import hp_plan
import hp_platform
from hp_plan import VerifyResult
from hp_platform import get_platform
from hp_platform.extend import end_with_parent, watch_parent
from hyper_parallel.display import make_reporter
from hyper_parallel.events import EventWriter
from hyper_parallel.launch import Job, launcher_place
from hyper_parallel.output import Summary
from hyper_parallel.port import rank_process
from hyper_parallel.training import train

_PATIENCE = 20.0


def train_rank(job: Job) -> Summary | None:
    """Trains; rank 0 shows the run and returns its summary."""
    with _rank():
        assert job.folder is not None
        reporter = None
        if get_platform().groups.rank() == 0:
            reporter = EventWriter(job.events) if job.events else make_reporter(json_lines=job.json_lines)
        return train(job.plan, job.folder, reporter=reporter)


def verify_rank(job: Job) -> VerifyResult:
    """Verifies the plan."""
    with _rank():
        return hp_plan.verify(job.plan)


@contextmanager
def _rank() -> Iterator[None]:
    """A process group around the work; the first rank that fails is the one that is reported."""
    # Ctrl-C reaches every process of a terminal; the launcher reports it for all.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if multiprocessing.parent_process() is not None:
        end_with_parent()
    else:  # Whoever started this may have done so from a thread that ends.
        watch_parent()
    process, place = rank_process(), launcher_place()
    assert place is not None
    process.prepare(place)
    try:
        hp_platform.init_process_group()
        yield
        # Ranks end together: rank 0 has more to do at the end, and may fail in it. A process that ends while gloo's
        # threads still let go of its last collective's tensors is aborted.
        get_platform().collectives.barrier()
        hp_platform.destroy_process_group()
    except RuntimeError as error:
        if process.peer_lost(error):
            # The launcher hears of the peer that is gone, ends this rank, and reports that peer.
            time.sleep(_PATIENCE)
        raise
