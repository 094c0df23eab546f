"""One rank: it joins the default process group and runs what the pool sends, until the pool hangs up."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from hp_platform import groups, random
from hp_platform.platforms.host import end_with_parent
from hp_platform.platforms.platform import get_platform
from hp_testing.pools.reference import Reference, resolve

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
        issued: how many collectives the rank has issued so far in each of its groups, by the group's ranks.
        broken: it has broken its connections to the others, as a run does that saves its last step when it fails.
    """

    kind: str
    value: Any
    issued: dict[tuple[int, ...], int]
    broken: bool = False


def main(connection: Connection, start: Start) -> None:
    """Live as a rank; the target of the process."""
    os.setsid()  # Ctrl-C is the pool's to handle, and what a rank starts ends with it
    end_with_parent()
    stacks = open(start.stacks, "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.path[:] = start.path
    try:
        framework = importlib.import_module(f"hp_testing.{get_platform().name}.ranks")
        framework.join(start.rank, start.world_size, connection.send, connection.recv)
    except BaseException:
        connection.send(Outcome("raised", traceback.format_exc(), {}))
        os._exit(1)
    gc.freeze()  # collections leave out the million objects that the libraries' imports have made
    connection.send(Outcome("returned", None, {}))
    while True:
        try:
            task = connection.recv()
        except EOFError:
            os._exit(0)  # no clean-up: the peers may be gone, and there is nothing to save
        connection.send(_run(task, framework))


def _run(task: Task, framework: Any) -> Outcome:
    framework.seed(SEED)
    random._seed = None  # what an earlier run has given to `manual_seed`
    try:
        with _filtered(task.filters):
            function = resolve(task.function)
            args, kwargs = pickle.loads(task.arguments)
            with _undone(kwargs) as own:
                kind, value = "returned", pickle.dumps(function(*args, **own))
            get_platform().devices.synchronize()  # what fails late fails in this run
    except BaseException as error:
        if type(error).__name__ == "Skipped":  # pytest.skip() in the body
            kind, value = "skipped", str(error)
        else:
            kind, value = "raised", _traceback(error)
    sys.stdout.flush()  # into what pytest captured for this test
    sys.stderr.flush()
    return Outcome(kind, value, framework.issued(), groups.is_broken())


@contextlib.contextmanager
def _undone(kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the function patches of its own in this process, and undo them at its end, as pytest does in its own."""
    patches = {name: type(value)() for name, value in kwargs.items() if type(value).__name__ == "MonkeyPatch"}
    try:
        yield {**kwargs, **patches}
    finally:
        for patch in patches.values():
            patch.undo()


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
