"""One rank: it joins the default process group and runs what the pool sends, until the pool hangs up."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from hp_platform.testing.reference import Reference, resolve

SEED = 0


class Start(NamedTuple):
    """What a rank needs to begin.

    Attributes:
        rank: its rank.
        world_size: number of ranks.
        environment: the environment variables of the process that asked.
        path: its `sys.path`.
        stacks: the file that the stacks go to on SIGUSR1.
    """

    rank: int
    world_size: int
    environment: dict[str, str]
    path: list[str]
    stacks: str


class Task(NamedTuple):
    """One run of a function.

    Attributes:
        function: what to run.
        arguments: pickled (args, kwargs).
        filters: warning filters as pytest spells them, None to leave them alone.
    """

    function: Reference
    arguments: bytes
    filters: tuple[tuple[str, ...], tuple[str, ...]] | None


class Outcome(NamedTuple):
    """How a run ended on one rank.

    Attributes:
        kind: "returned", "raised" or "skipped".
        value: the pickled result, the traceback, or the reason.
        issued: how many collectives the rank has issued in each of its groups.
    """

    kind: str
    value: Any
    issued: dict[Any, int]


def main(connection: Connection, start: Start) -> None:
    """Live as a rank; the target of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to handle
    _die_with_parent()
    stacks = open(start.stacks, "w")  # noqa: SIM115 (faulthandler keeps it)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.path[:] = start.path
    try:
        _join(connection, start)
    except BaseException:
        connection.send(Outcome("raised", traceback.format_exc(), {}))
        os._exit(1)
    connection.send(Outcome("returned", None, {}))
    while True:
        try:
            task = connection.recv()
        except EOFError:
            os._exit(0)  # no clean-up: peers may be gone, and there is nothing to save
        connection.send(_run(task))


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _join(connection: Connection, start: Start) -> None:
    import torch
    import torch.distributed as dist

    from hp_platform.platform import get_platform

    torch.set_num_threads(1)  # ranks share the cores
    platform = get_platform()
    devices = platform.devices
    if devices.kind == "cpu":
        backend, present = None, start.world_size
    else:
        present = torch.accelerator.device_count()
        devices.set_device(start.rank % present)
        # nccl and hccl refuse two ranks on one device
        backend = "gloo" if start.world_size > present else None
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    if start.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, start.world_size, is_master=True, wait_for_workers=False)
        connection.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", connection.recv(), start.world_size, is_master=False, wait_for_workers=False)
    platform.groups.init_process_group(backend, store=store, rank=start.rank, world_size=start.world_size)
    platform.collectives.barrier()


def _run(task: Task) -> Outcome:
    import torch

    torch.manual_seed(SEED)
    try:
        with _filtered(task.filters):
            function = resolve(task.function)
            args, kwargs = pickle.loads(task.arguments)
            value = pickle.dumps(function(*args, **kwargs))
    except BaseException as error:
        if type(error).__name__ == "Skipped":  # pytest.skip() in the body
            return Outcome("skipped", str(error), {})
        return Outcome("raised", _traceback(error), _issued())
    return Outcome("returned", value, {})


@contextlib.contextmanager
def _filtered(filters: tuple[tuple[str, ...], tuple[str, ...]] | None) -> Iterator[None]:
    if filters is None:
        yield
        return
    from _pytest.config import apply_warning_filters

    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=DeprecationWarning)
        warnings.filterwarnings("always", category=PendingDeprecationWarning)
        apply_warning_filters(*filters)
        yield


def _traceback(error: BaseException) -> str:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _issued() -> dict[Any, int]:
    from hp_platform.torch.groups import known_groups

    counts = {}
    for ranks, group in known_groups().items():
        with contextlib.suppress(RuntimeError):
            counts[ranks] = group._get_sequence_number_for_group()
    return counts
