"""A function on ranks of this machine, from a notebook, a debugger or a test.

Note [Ranks of a notebook]
    What a cell defines is in no module that another process could import, so functions travel by value (cloudpickle),
    and ranks are processes of their own: they import nothing of the caller's `__main__`, which need not be guarded. A
    rank that has returned stays until all have: what it sent last may still be on its way.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TextIO

from hp_platform import get_platform
from hp_platform.extend import Place, init_on_this_machine, inside_launcher, watch_parent
from hyper_parallel.launching.launch import RankFailure
from hyper_parallel.port import rank_process

_GRACE = 3.0  # seconds for the other ranks to say what became of them, after one has failed
_PROGRAM = "from hyper_parallel.launching.ranks import main; main()"


def run_ranks(function: Callable[..., Any], ranks: int | None = None, *args: Any, **kwargs: Any) -> list[Any]:
    """Run a function on ranks of this machine, as torchrun and msrun would, and return what each rank returned.

    The function may be defined anywhere, in a notebook's cell as well. Each rank is a new process in which the default
    process group is initialised, with one thread for each core that it has for itself. What ranks print appears here,
    behind their number. Ctrl-C, and the end of this process, end all ranks.

    Example:
        >>> def total():
        ...     from hp_platform import get_platform
        ...     value = torch.ones(1)
        ...     get_platform().collectives.all_reduce(value)
        ...     return value.item()
        >>> run_ranks(total, ranks=4)
        [4.0, 4.0, 4.0, 4.0]

    Args:
        function: called on each rank.
        ranks: how many. Default: one for each accelerator; on CPU one for each core, four at most.
        *args: for the function; pickled, as its results are.
        **kwargs: for the function, pickled.

    Returns:
        The results, by rank.

    Raises:
        Exception: the first that a rank raised, with its rank and traceback as a note (`__notes__`).
        RankFailure: a rank was killed, or what it returned or raised can't be pickled.
        RuntimeError: this process is a rank of a launcher already.
        ValueError: fewer than one rank, or more than there are accelerators.
    """
    if inside_launcher():
        raise RuntimeError("run_ranks: this process is a launcher's rank already; call the function on each rank")
    count = _count(ranks)
    task = _dumps(function, (function, args, kwargs))
    outcomes: dict[int, _Outcome] = {}
    with _started(count, task) as started:
        _collect(started, outcomes)
    failed = [each for each in outcomes.values() if each.kind != "returned"]
    if failed:
        raise min(failed, key=lambda each: (each.kind == "lost a peer", each.time)).error()
    return [pickle.loads(outcomes[rank].value) for rank in range(count)]


@dataclass
class _Outcome:
    """How a rank ended.

    Attributes:
        rank: which.
        kind: "returned", "raised", "lost a peer" (as others have failed), or "died".
        value: the pickled result or exception.
        trace: the exception's traceback, or how the rank died.
        time: when this process heard of it.
    """

    rank: int
    kind: str
    value: bytes = b""
    trace: str = ""
    time: float = field(default_factory=time.monotonic)

    def error(self) -> Exception:
        """Return what the rank raised, or else a `RankFailure`."""
        with contextlib.suppress(Exception):  # whatever its class does when it is unpickled
            error = pickle.loads(self.value)
            error.add_note(f"It was raised on rank {self.rank}:\n{self.trace}")
            return error
        return RankFailure(self.rank, self.trace)


class _Rank:
    """A rank's process, as this one sees it."""

    def __init__(self, rank: int, count: int, task: bytes) -> None:
        self.rank = rank
        self._part: dict[int, bytes] = {}  # of a line
        self.connection, there = Pipe()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", _PROGRAM, str(there.fileno())],
            env={**os.environ, **{name: str(value) for name, value in place.items()}},
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is this process's, which ends the ranks
        )
        there.close()
        assert self.process.stdout is not None and self.process.stderr is not None
        self.streams: dict[int, TextIO] = {
            self.process.stdout.fileno(): sys.stdout,
            self.process.stderr.fileno(): sys.stderr,
        }
        self.connection.send((sys.path, task))

    def show(self, stream: int) -> bool:
        """Print what came from a stream, line by line; return False at its end."""
        text = os.read(stream, 1 << 16)
        *lines, self._part[stream] = (self._part.get(stream, b"") + text).split(b"\n")
        lines += [self._part.pop(stream)] if not text and self._part[stream] else []
        for line in lines:
            print(f"{self.rank}: {line.decode(errors='replace')}", file=self.streams[stream], flush=True)
        return bool(text)

    def death(self) -> _Outcome:
        """Say how the process ended."""
        code = self.process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return _Outcome(self.rank, "died", trace=f"{how} (process {self.process.pid})")

    def kill(self) -> None:
        """End the process and those that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def _started(count: int, task: bytes) -> Iterator[list[_Rank]]:
    """Start the ranks; in the end none is left."""
    started: list[_Rank] = []
    try:
        for rank in range(count):
            started.append(_Rank(rank, count, task))
        yield started
    except BaseException:
        for each in started:
            each.kill()
        raise
    finally:
        for each in started:
            each.connection.close()  # who has returned ends
        for each in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(_GRACE)
            each.kill()
            for stream in each.streams:
                while each.show(stream):
                    pass
            for pipe in (each.process.stdout, each.process.stderr):
                assert pipe is not None
                pipe.close()


def _collect(started: list[_Rank], outcomes: dict[int, _Outcome]) -> None:
    """Wait for the ranks' outcomes; ranks that have none soon after another has failed are killed."""

    def hear(rank: _Rank, message: Any) -> None:
        if isinstance(message, int):  # where rank 0 listens
            for each in started[1:]:
                with contextlib.suppress(OSError):  # it has died, which is heard of, too
                    each.connection.send(message)
            return
        outcomes[rank.rank] = rank.death() if message is None else _Outcome(rank.rank, *message)

    while len(outcomes) < len(started):
        left = [each for each in started if each.rank not in outcomes]
        failed = [each.time for each in outcomes.values() if each.kind != "returned"]
        limit = None if not failed else min(failed) + _GRACE - time.monotonic()
        if limit is not None and limit <= 0:
            for each in left:
                each.kill()
            return
        _listen(started, left, hear, limit)


def _listen(
    started: list[_Rank], ranks: list[_Rank], hear: Callable[[_Rank, Any], None], limit: float | None = None
) -> None:
    """Wait until one of some ranks says something, or ends (None), and show what any prints meanwhile."""
    heard = False
    end = None if limit is None else time.monotonic() + limit
    while not heard and (end is None or time.monotonic() < end):
        sources: dict[Any, _Rank] = {each.connection: each for each in ranks}
        sources |= {stream: each for each in started for stream in each.streams}
        for ready in wait(list(sources), None if end is None else max(0.0, end - time.monotonic())):
            rank = sources[ready]
            if isinstance(ready, int):
                if not rank.show(ready):
                    del rank.streams[ready]
                continue
            heard = True
            try:
                message = rank.connection.recv()
            except (EOFError, ConnectionResetError):
                message = None
            hear(rank, message)


def _count(ranks: int | None) -> int:
    """Return how many ranks to start.

    Raises:
        ValueError: fewer than one, or more than there are accelerators.
    """
    devices = get_platform().devices
    on_cpu = devices.kind == "cpu"
    count = ranks if ranks is not None else min(4, os.cpu_count() or 1) if on_cpu else devices.count
    if count < 1:
        raise ValueError(f"run_ranks: ranks must be at least 1, got {count}")
    if not on_cpu and count > devices.count:
        raise ValueError(
            f"run_ranks: {count} ranks, but this machine has only {devices.count} {devices.kind} devices; take fewer,"
            " or set HYPER_PARALLEL_DEVICE=cpu"
        )
    return count


def _dumps(function: Callable[..., Any], task: Any) -> bytes:
    """Pickle a function with its arguments: by value where another process can't import it."""
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not _importable(module)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(task)
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _importable(module: Any) -> bool:
    """Return True if a process with this one's path finds the module: pytest imports tests by their files alone."""
    path, spec = None, None
    names = module.__name__.split(".")
    for place in range(len(names)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(names[: place + 1]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == getattr(module, "__file__", None)


# ---- in the process of a rank ----
def main() -> None:
    """Live as a rank of `run_ranks`: call what comes over the connection, and stay until it is closed."""
    connection = Connection(int(sys.argv[1]))
    watch_parent()
    sys.path[:], task = connection.recv()
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    process = rank_process()
    try:
        process.prepare(Place(rank, count, rank, count))
        init_on_this_machine(rank, count, connection.send, connection.recv)
        function, args, kwargs = pickle.loads(task)
        kind, value, trace = "returned", function(*args, **kwargs), ""
        _check_whole(value)
        get_platform().devices.synchronize()  # what fails late fails here
    except Exception as error:
        kind = "lost a peer" if process.peer_lost(error) else "raised"
        value, trace = error, "".join(traceback.format_exception(error)).rstrip()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(_outcome(kind, value, trace))
    with contextlib.suppress(EOFError, ConnectionResetError):
        connection.recv()  # until all have returned
    os._exit(0)  # threads of a backend may hold what has been sent


def _check_whole(value: Any) -> None:
    """Check that what is returned has a meaning without the other ranks.

    Raises:
        TypeError: it holds a DTensor.
    """
    from hp_dtensor import DTensor

    if isinstance(value, DTensor):
        raise TypeError(
            f"a DTensor of shape {tuple(value.shape)} is returned, whose parts are of ranks that end now: return"
            " full_tensor(), which all of them call, or to_local()"
        )
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for each in inner:
        _check_whole(each)


def _outcome(kind: str, value: Any, trace: str) -> tuple[str, bytes, str]:
    import cloudpickle

    try:
        return kind, cloudpickle.dumps(value), trace
    except Exception as error:
        if kind != "returned":
            return kind, b"", trace
        why = f"its result, a {type(value).__name__}, can't be sent to the process that asked: {error}"
        return "raised", b"", f"{why}. Return plain tensors and values"
