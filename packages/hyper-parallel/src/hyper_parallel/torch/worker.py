"""What a rank runs, whoever started it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hp_plan import VerifyResult, verify
from hp_platform import destroy_process_group, get_platform, init_process_group
from hyper_parallel.display import make_reporter
from hyper_parallel.launch import Job, divide_threads
from hyper_parallel.metrics import Summary
from hyper_parallel.torch.trainer import train

# How the loss of a peer shows: it ended, and its end is what has to be reported.
_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Socket Timeout",
)
_PATIENCE = 20.0


def train_rank(job: Job) -> Summary | None:
    """Trains; rank 0 shows the run and returns its summary."""
    with _rank():
        assert job.folder is not None
        leader = get_platform().groups.rank() == 0
        reporter = make_reporter(json_lines=job.json_lines) if leader else None
        return train(job.plan, job.folder, reporter=reporter)


def verify_rank(job: Job) -> VerifyResult:
    """Verifies the plan."""
    with _rank():
        return verify(job.plan)


@contextmanager
def _rank() -> Iterator[None]:
    """A process group around the work; the first rank that fails is the one that is reported."""
    # Ctrl-C reaches every process of a terminal; the launcher reports it for all.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    torch.set_num_threads(divide_threads(local_world))
    devices = get_platform().devices
    devices.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        init_process_group()
        yield
        # Ranks end together: rank 0 has more to do at the end, and may fail in it. A process that ends while gloo's
        # threads still let go of its last collective's tensors is aborted.
        get_platform().collectives.barrier()
        destroy_process_group()
    except RuntimeError as error:
        if any(sign in str(error) for sign in _PEER_LOST):
            # The launcher hears of the peer that is gone, ends this rank, and reports that peer.
            time.sleep(_PATIENCE)
        raise
