"""A watch over ranks that somebody else started, as by torchrun: what they hang in is told by one of them.

Note [Ranks that watch each other]
    Each rank notes its collectives in a file of a folder that the ranks of its machine share
    (`hp_platform.failures.flight`), and has a thread that looks at all of these files. Where none has changed for too
    long, the first thread to see it tells who waits in what, and for whom. A rank that waits in a collective lets go of
    the interpreter, so its thread runs, also while the rank that it waits for keeps the interpreter to itself, or is
    stopped. What a rank on another machine does is not seen from here; that nobody here is to blame is.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from hp_platform.communication.agreement import agree, share_bytes
from hp_platform.failures import flight
from hp_platform.failures.flight import Flight, read_flight, record_flight
from hp_platform.failures.hangs import (
    Hang,
    ask_for_stacks,
    describe_hang,
    find_hang,
    has_ended,
    process_state,
    send_signal,
)
from hp_platform.failures.listening import own_network
from hp_platform.groups import default_group, is_initialized, own_rank, when_groups_end

_PREFIX = "hp-flights-"


def watch_hangs(seconds: float, *, then: Literal["report", "end"] = "report") -> HangWatch:
    """Watch for collectives that never end, in a training loop of one's own; all ranks call it together.

    Once no rank of this machine has begun or ended a collective for so long while some rank waits in one, a report is
    written to `sys.stderr`, by one rank of the machine: the ranks that the others wait for, the collective, its group,
    and the stack of each such rank. Ranks that issued different collectives of a group are named, and ranks that wait
    for each other in different groups. If the ranks go on, the next hang is reported as well.

    A step, a compilation or a save may take long on one rank alone: choose more seconds than it takes. Collectives of
    HyperParallel are seen; those that a program calls as `torch.distributed.all_reduce` are not, and a rank in one of
    them stands in the report with its stack. SIGUSR1 asks a process for its stack meanwhile.

    Example:
        >>> with watch_hangs(300):
        ...     for batch in batches:
        ...         step(batch)

    Args:
        seconds: how long.
        then: "end" kills the processes of the ranks that the others wait for, after the report: over gloo the others
            raise LostRankError, and torchrun ends the job. "report" goes on waiting.

    Returns:
        The watch, which is over after `close`, at the end of a `with` block, when the default group is destroyed, or
        when the process ends.

    Raises:
        RuntimeError: there is no process group; the ranks are watched already, by `hyper-parallel train` or by another
            `watch_hangs`; or the program has a handler of SIGUSR1. On all ranks.
        ValueError: `seconds` is not above 0, `then` is neither, or the ranks call it with different ones; on all ranks.
    """
    group = default_group()

    def check() -> bytes | Exception:
        if not seconds > 0:
            return ValueError(f"watch_hangs: seconds must be above 0, got {seconds}.")
        if then not in ("report", "end"):
            return ValueError(f"watch_hangs: then must be 'report' or 'end', got {then!r}.")
        if flight.recorder is not None:
            return RuntimeError(
                "watch_hangs: the collectives of this process are watched already, by hyper-parallel train or by a"
                " watch_hangs that is not closed: one watch is enough."
            )
        if signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            return RuntimeError(
                "watch_hangs: the program has a handler of SIGUSR1, by which ranks are asked for their stacks: give it"
                " another signal, as SIGUSR2."
            )
        return f"{seconds} {then} {own_network()}".encode()

    def failed(texts: Mapping[int, str], own: Exception | None) -> Exception:
        rank, text = min(texts.items())
        return own or RuntimeError(f"watch_hangs failed on rank {rank}: {text}")

    share = partial(share_bytes, group=group)
    told = [each.decode().split(" ", 2) for each in agree(check, failed, share)]
    rank = own_rank()
    for other, (*options, _) in enumerate(told):
        if options != told[0][:2]:
            raise ValueError(
                f"watch_hangs: rank 0 watches for {told[0][0]} s, then={told[0][1]!r}; rank {other} for {options[0]} s,"
                f" then={options[1]!r}. Call it alike on all ranks."
            )
    networks = [network for *_, network in told]
    here = [other for other, network in enumerate(networks) if network == networks[rank]]

    def make() -> bytes:
        return tempfile.mkdtemp(prefix=_PREFIX).encode() if rank == here[0] else b""

    folders = agree(make, failed, share)
    folder = Path(folders[here[0]].decode())

    def see() -> bytes | Exception:
        unseen = f"{folder}, made by rank {here[0]} of this machine, is not seen here."
        return b"" if folder.is_dir() else OSError(unseen)

    agree(see, failed, share)
    return HangWatch(folder, rank, here, len(told), seconds, then)


class HangWatch:
    """A watch of this rank over all ranks of its machine; a context manager.

    Args:
        folder: of their flight recorders.
        rank: this one's global rank.
        here: the global ranks of this machine.
        ranks: the number of all.
        seconds: without a move.
        then: as `watch_hangs` takes it.
    """

    def __init__(
        self, folder: Path, rank: int, here: list[int], ranks: int, seconds: float, then: Literal["report", "end"]
    ) -> None:
        self._folder, self._rank, self._here, self._ranks = folder, rank, here, ranks
        self._limit, self._then = seconds, then
        self._poll = min(1.0, seconds / 10)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        record_flight(folder, rank)  # not kept here: it knows groups, and the thread must not
        if ranks > 1:
            self._thread = threading.Thread(target=self._run, name="hp_platform hangs", daemon=True)
            self._thread.start()
        _watches.append(self)

    def __enter__(self) -> HangWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the watch of this rank; those of the others go on, and know that it has."""
        if self not in _watches:
            return
        _watches.remove(self)
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        flight.leave_flight()
        with contextlib.suppress(OSError):
            (self._folder / f"rank-{self._rank}.over").touch()
            if len(list(self._folder.glob("rank-*.over"))) == len(self._here):
                shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        seen: list[bytes] = []
        idle, told = 0.0, False
        before = time.monotonic()
        while not self._over.wait(self._poll):
            now = time.monotonic()
            # This process may have been stopped: time that it hasn't seen doesn't count.
            passed, before = min(now - before, 2 * self._poll), now
            content = [self._content(rank) for rank in self._here]
            if content != seen:
                seen, idle, told = content, 0.0, False
                continue
            idle += passed
            if idle >= self._limit and not told:
                told = True
                self._tell(hashlib.sha256(b"".join(content)).hexdigest(), idle)

    def _content(self, rank: int) -> bytes:
        with contextlib.suppress(OSError):
            return (self._folder / f"rank-{rank}.flight").read_bytes()
        return b""

    def _tell(self, state: str, idle: float) -> None:
        """Report a hang, unless another rank of this machine does; end it where that is asked for."""
        flights = dict(self._flights())
        states = {rank: process_state(each.pid) for rank, each in flights.items()}
        living = [rank for rank, state in states.items() if not has_ended(state)]
        if len(flights) < len(self._here) or all(flights[rank].phase == "end" for rank in living):
            return
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            told = self._folder / f"told-{state}"
            told.touch(exist_ok=False)
            hang = find_hang(flights)
            asked = [rank for rank in living if states[rank] != "T" and flights[rank].phase != "end"]
            stacks = ask_for_stacks(self._folder, flights, asked)
            report = self._report(hang, flights, describe_hang(hang, flights, states, stacks), idle)
            sys.stderr.write(report)
            sys.stderr.flush()
            told.write_text(report, encoding="utf-8")
            if self._then == "end" and hang.kind != "unknown":
                own_last = sorted(hang.culprits, key=lambda rank: rank == self._rank)  # it may be one of them
                send_signal(flights, own_last, signal.SIGKILL)

    def _flights(self) -> Iterator[tuple[int, Flight]]:
        for rank in self._here:
            read = read_flight(self._folder, rank)
            if read is not None:
                yield rank, read

    def _report(self, hang: Hang, flights: Mapping[int, Flight], told: str, idle: float) -> str:
        text = f"hp_platform: for {idle:.0f} s no rank went on (watch_hangs): {told}\n"
        if hang.kind == "unknown":
            text += (
                "No rank of this machine is to blame for those that wait.\n"
                if hang.waits
                else "They compute, or wait in calls of the framework itself, which are not seen.\n"
            )
        left = [rank for rank in hang.culprits if flights[rank].phase == "end"]
        if left:
            text += f"The watch is over on ranks {left}: what they do now is not seen.\n"
        if len(self._here) < self._ranks:
            text += f"{self._ranks - len(self._here)} ranks are on other machines: see what is reported there.\n"
        if self._then == "end" and hang.kind != "unknown":
            text += f"The processes of ranks {list(hang.culprits)} are killed now.\n"
        return text


_watches: list[HangWatch] = []


@when_groups_end
def _end_with_groups() -> None:
    if _watches and not is_initialized():
        _watches[0].close()


@atexit.register
def _end() -> None:  # before the interpreter is finalized: Note [Threads at the end]
    if _watches:
        _watches[0].close()


os.register_at_fork(after_in_child=_watches.clear)
