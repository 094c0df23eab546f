"""Pools of ranks, one for each world size, and the functions and pytest tests that run on them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hp_platform.failures import listening
from hp_platform.platforms import launchers
from hp_platform.platforms.ports import platform_name
from hp_testing.pools import target, worker
from hp_testing.pools.processes import processor_seconds
from hp_testing.pools.worker import BODY, Outcome, Reference, Start, Task, main, refer

START_LIMIT = 120.0
GRACE = 1.0
PATIENCE = 5  # times the limit, for ranks that still compute: the machine may be busy
LOOK = 2.0  # seconds in which that is seen
# Besides the framework, the server that ranks are forked from imports what this process has imported of these packages
# when the first pool starts, so that ranks start in milliseconds.
PRELOAD_LIKE_HERE = ("hp_", "hyper_parallel", "transformers", "pytest")

# As pytest spells them, (config, command line); set by the plugin.
warning_filters: tuple[tuple[str, ...], tuple[str, ...]] | None = None

_pools: dict[int, Pool] = {}
_BESIDE = (launchers.__file__, listening.__file__)  # of threads that sleep in each rank


class RankError(RuntimeError):
    """A function did not return on some rank; the message tells of each such rank."""


class RanksSkipped(Exception):
    """The function asked to be skipped, by `pytest.skip`."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
    """Run a function on every rank of a pool and collect what it returns.

    The default process group of that size is initialised, the random generators are seeded alike, and a rank computes
    with one thread. The pool stays for the next call, with the groups that were made in it.

    Args:
        world_size: number of ranks.
        fn: a function at a module's top level; it is sent by name.
        *args: for the function, pickled.
        timeout: seconds until ranks that haven't returned are killed; while they compute, five times as many.
        **kwargs: for the function, pickled.

    Returns:
        Each rank's return value, in the order of ranks.

    Raises:
        RankError: a rank raised, died, or didn't return in time.
        TypeError: the function is not at a module's top level.
    """
    return run(world_size, refer(fn), args, kwargs, timeout=timeout)


def run(
    world_size: int,
    function: Reference,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    timeout: float,
) -> list[Any]:
    """Run a referred function on the pool of a world size; see `run_ranks`."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}.")
    lacking = target.missing()
    if lacking:
        raise RanksSkipped(lacking) if "PYTEST_CURRENT_TEST" in os.environ else RuntimeError(lacking)
    task = Task(function, pickle.dumps((args, kwargs)), warning_filters)
    pool = _pools.get(world_size)
    if pool is None:
        if not _pools:
            atexit.register(close_pools)  # where no pytest session ends
        pool = _pools[world_size] = Pool(world_size)
    try:
        outcomes = pool.run(task, timeout)
    finally:
        if pool.closed:
            del _pools[world_size]
    reasons = [outcome.value for outcome in outcomes if outcome.kind == "skipped"]
    if reasons:
        raise RanksSkipped(reasons[0])
    return [pickle.loads(outcome.value) for outcome in outcomes]


def close_pool(world_size: int) -> None:
    """End the ranks of the pool of a world size, if there is one."""
    if world_size in _pools:
        _pools.pop(world_size).close()


def close_pools() -> None:
    """End the ranks of every pool."""
    while _pools:
        _pools.popitem()[1].close()


class Pool:
    """The ranks of one world size, each a process forked from a server that has the framework imported."""

    def __init__(self, world_size: int) -> None:
        self.closed = False
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("forkserver")
        imported = [name for name in sys.modules if name.startswith(PRELOAD_LIKE_HERE) and "__main__" not in name]
        framework = f"hp_testing.{platform_name()}.ranks"
        context.set_forkserver_preload([framework, "hp_testing.pools.worker", *imported])
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        environment, path = dict(os.environ), list(sys.path)
        environment.pop("PYTEST_CURRENT_TEST", None)
        for rank in range(world_size):
            here, there = context.Pipe()
            start = Start(rank, world_size, environment, path, str(self._stacks(rank)))
            process = context.Process(target=main, args=(there, start), name=f"rank{rank}")
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        self._meet()

    def _meet(self) -> None:
        """Tell every rank where rank 0 listens, and wait until all have joined."""
        ranks = range(len(self._processes))
        port, problems = self._collect([0], START_LIMIT)
        if isinstance(port.get(0), int):
            for connection in self._connections[1:]:
                connection.send(port[0])
            joined, problems = self._collect(ranks, START_LIMIT)
        else:
            joined = port
        problems |= {rank: outcome.value for rank, outcome in joined.items() if outcome.kind == "raised"}
        if problems:
            self.close()
            raise RankError(_report(f"{len(ranks)} ranks could not start", problems))

    def run(self, task: Task, timeout: float) -> list[Outcome]:
        """Run a task on every rank.

        Raises:
            RankError: a rank raised, died, or didn't return in time. The pool is closed if its ranks can't go on.
        """
        ranks = range(len(self._processes))
        try:
            for rank in ranks:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died; collecting says so
                    self._connections[rank].send(task)
            outcomes, problems = self._collect(ranks, timeout)
        except BaseException:
            self.close()
            raise
        raised = {rank: outcome.value for rank, outcome in outcomes.items() if outcome.kind == "raised"}
        ended = list(outcomes.values())
        broken = bool(problems) or any(outcome.broken for outcome in ended)
        if broken or any(outcome.kind != "returned" for outcome in ended) and _out_of_step(outcomes):
            self.close()
        if problems or raised:
            what = f"{task.function.name} failed on {len(problems) + len(raised)} of {len(ranks)} ranks"
            raise RankError(_report(what, raised | problems))
        return [outcomes[rank] for rank in ranks]

    def _collect(self, ranks: Sequence[int], timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Receive one message from each rank; for those that give none, say what became of them."""
        received: dict[int, Any] = {}
        problems: dict[int, str] = {}
        begin = time.monotonic()
        deadline = begin + timeout
        waiting = {self._connections[rank]: rank for rank in ranks}
        hurried, used = False, None
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                before, used = used, processor_seconds({self._processes[rank].pid for rank in ranks})
                idle = before is not None and used - before < LOOK / 50
                if hurried or idle or time.monotonic() - begin > PATIENCE * timeout:
                    break
                deadline = time.monotonic() + LOOK
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    received[rank] = connection.recv()  # type: ignore[union-attr]
                    failed = isinstance(received[rank], Outcome) and received[rank].kind == "raised"
                except (EOFError, ConnectionResetError):
                    problems[rank] = self._death(rank)
                    failed = True
                if failed:  # its peers may wait for it in vain
                    hurried, deadline = True, min(deadline, time.monotonic() + GRACE)
        if waiting:
            failed = bool(problems) or any(isinstance(o, Outcome) and o.kind == "raised" for o in received.values())
            why = "a peer failed" if failed else f"the time limit of {timeout:g} s"
            stacks = self._ask_stacks(list(waiting.values()))
            for rank in waiting.values():
                after = f"had not returned after {time.monotonic() - begin:.1f} s ({why}) and was killed"
                problems[rank] = f"{after}; its stack:\n{stacks[rank]}"
        return received, problems

    def _death(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(5.0)
        code = process.exitcode
        if code is not None and code < 0:
            stack = self._stacks(rank).read_text()
            return f"died of signal {signal.Signals(-code).name}" + (f"; its stack:\n{stack}" if stack else "")
        return f"died with exit code {code}"

    def _stacks(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank{rank}.stacks")

    def _ask_stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        texts = dict.fromkeys(ranks, "")
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, texts = texts, {rank: self._stacks(rank).read_text() for rank in ranks}
            if all(texts.values()) and texts == before:
                break
        return {rank: _own_frames(text) or "(it gave none)" for rank, text in texts.items()}

    def close(self) -> None:
        """End the ranks."""
        if self.closed:
            return
        self.closed = True
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # if it had not come to lead a group yet
        for process in self._processes:
            process.join()
            process.close()
        self._folder.cleanup()


def _own_frames(stacks: str) -> str:
    """Leave out of the stacks the threads that sleep beside each function, and the frames outside of the function."""
    kept = []
    for thread in stacks.strip().split("\n\n"):
        lines = thread.splitlines()
        own = [index for index, line in enumerate(lines) if f'"{worker.__file__}"' in line]
        if not any(f'"{file}"' in line for line in lines for file in _BESIDE):
            kept.append("\n".join(lines[: own[0]] if own else lines))
    return "\n\n".join(kept)


def _out_of_step(outcomes: dict[int, Outcome]) -> bool:
    """Say whether ranks of a group have issued different numbers of collectives, so that the next would mismatch."""
    groups = {group for outcome in outcomes.values() for group in outcome.issued}
    return any(len({outcomes[rank].issued.get(group) for rank in group}) > 1 for group in groups)


def _report(what: str, problems: dict[int, str]) -> str:
    """Tell each problem once, with the ranks that have it."""
    same: dict[str, list[int]] = {}
    for rank in sorted(problems):
        same.setdefault(problems[rank], []).append(rank)
    # What was raised explains what hung.
    parts = sorted(same.items(), key=lambda part: part[0].startswith("had not returned"))
    lines = [what]
    for text, ranks in parts:
        lines.append(f"--- rank {', '.join(map(str, ranks))} ---\n{text.rstrip()}")
    return "\n".join(lines)


def on_ranks(
    *world_sizes: int, thorough: tuple[int, ...] = (), timeout: float = 60.0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a pytest test on every rank of a pool, once for each world size.

        @on_ranks(1, 2, 4)
        @pytest.mark.parametrize("op", ["sum", "max"])
        def test_all_reduce(op): ...      # test_all_reduce[sum-ranks1] and so on

    The body finds the default process group initialised. What it takes from pytest (parametrized values, fixtures such
    as `tmp_path`) is pickled; it may also take `ranks`, the world size.

    Args:
        *world_sizes: the numbers of ranks.
        thorough: more of them, for runs of all tests (`--tier all`) alone.
        timeout: seconds until ranks that haven't returned are killed; while they compute, five times as many.

    Raises:
        TypeError: the test is a method, or no world size was given.
    """
    if not world_sizes or not all(isinstance(size, int) for size in world_sizes):
        raise TypeError(f"on_ranks takes the numbers of ranks, as in @on_ranks(1, 2, 4), got {world_sizes}.")

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        import pytest

        reference = refer(body)
        signature = inspect.signature(body)
        wants_ranks = "ranks" in signature.parameters

        @functools.wraps(body)
        def test(*, ranks: int, **values: Any) -> None:
            __tracebackhide__ = True
            if wants_ranks:
                values["ranks"] = ranks
            try:
                run(ranks, reference, (), values, timeout=timeout)
            except RankError as error:
                failure = str(error)  # the ranks' tracebacks are what matters, not this process's
            else:
                return
            pytest.fail(failure, pytrace=False)

        own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name != "ranks"]
        added = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*own, added])  # type: ignore[attr-defined]
        setattr(test, BODY, body)
        sizes = [pytest.param(size, id=f"ranks{size}") for size in world_sizes]
        sizes += [pytest.param(size, id=f"ranks{size}", marks=pytest.mark.thorough) for size in thorough]
        return pytest.mark.parametrize("ranks", sizes)(test)

    return decorate
