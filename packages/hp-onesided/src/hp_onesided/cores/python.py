"""The core in Python: copies by the C library, sums by the framework, both outside of the interpreter's lock."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from ctypes import memmove

from hp_onesided.cores.core import Team
from hp_onesided.cores.segment import HEADERS, POSTED
from hp_onesided.cores.waiting import Failure, WaitError, ended, wait_until, wake
from hp_onesided.planning.headers import REDUCED_AS, Call, disagreement, words_of
from hp_onesided.planning.steps import Program, rounds_for
from hp_onesided.port import port

_HALF = 2**31
_Prepared = tuple[Program, Call, tuple[int, ...]]


class PythonCore:
    """Runs programs over the memory of a group.

    Args:
        team: the ranks.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._own = team.segments[team.rank]
        self._counters = [ctypes.c_uint32.from_address(each.address + POSTED) for each in team.segments]
        self._count = 0
        self._turn = threading.Condition()
        self._busy = self._closing = self._aborted = False
        self._queue: deque[tuple[_Prepared, int, int]] = deque()
        self._issued = self._finished = 0
        self._failed: tuple[int, WaitError] | None = None
        self._thread: threading.Thread | None = None

    def prepare(self, program: Program, call: Call) -> _Prepared:
        """Keep the program with the words of its call."""
        return program, call, call.words(self._team.shape.size)

    def run(self, prepared: _Prepared, output: int, source: int) -> None:
        """Run a program here, or in the thread if that has something to do."""
        with self._turn:
            behind = bool(self._queue) or self._busy
            self._busy = self._busy or not behind
        if behind:
            self.wait(self.issue(prepared, output, source))
            return
        try:
            self._do(prepared, output, source)
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def issue(self, prepared: _Prepared, output: int, source: int) -> int:
        """Queue a program."""
        with self._turn:
            self._queue.append((prepared, output, source))
            self._issued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hp_onesided", daemon=True)
                self._thread.start()
            self._turn.notify_all()
            return self._issued

    def wait(self, number: int) -> None:
        """Wait for a queued program."""
        with self._turn:
            self._turn.wait_for(lambda: self._finished >= number)
            if self._failed is not None and number >= self._failed[0]:
                raise WaitError(*self._failed[1].args)

    def failed(self) -> bool:
        """Tell whether a collective couldn't be done."""
        return self._failed is not None

    def finished(self) -> int:
        """Return the number of programs that left the queue."""
        return self._finished

    def calls(self) -> list[tuple[int, ...]]:
        """Read the headers of the round that this rank is in."""
        shape = self._team.shape
        offset = HEADERS + (self._count & 1) * shape.header
        return [segment.words(offset, words_of(shape.size)) for segment in self._team.segments]

    def abort(self) -> None:
        """End what runs."""
        self._aborted = True
        self._own.leave()

    def stop(self) -> None:
        """End the thread."""
        with self._turn:
            self._closing = True
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._own.leave()

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: not self._busy and bool(self._queue or self._closing))
                if not self._queue:
                    return
                self._busy = True
            try:
                self._do(*self._queue[0])
            except BaseException:  # `_do` has noted it, for whoever waits for this one or a later one
                pass
            finally:
                with self._turn:
                    self._queue.popleft()
                    self._finished += 1
                    self._busy = False
                    self._turn.notify_all()

    def _do(self, prepared: _Prepared, output: int, source: int) -> None:
        if self._failed is not None:
            raise WaitError(*self._failed[1].args)
        try:
            self._steps(prepared, output, source)
        except BaseException as error:
            known = error if isinstance(error, WaitError) else WaitError(Failure.ABORTED, self._team.rank)
            self._failed = self._finished + 1, known
            self._own.leave()
            raise

    def _steps(self, prepared: _Prepared, output: int, source: int) -> None:
        program, call, words = prepared
        team, rank = self._team, self._team.rank
        address = self._own.address + HEADERS + (self._count + 1 & 1) * team.shape.header
        (ctypes.c_uint64 * len(words)).from_address(address)[:] = words
        number, rounds = 0, program.rounds
        while number == 0 or number < rounds:
            for step in program.steps:
                kind = step.kind
                if kind == "post":
                    self._post()
                elif kind == "wait":
                    self._wait_for(step.peer)
                elif kind == "check":
                    if number == 0:
                        rounds = self._check(program)
                else:
                    at, own, nbytes = step.span(number)
                    if not nbytes:
                        continue
                    if kind == "copy_in":
                        memmove(self._slot(rank, 1) + step.slot, source + at, nbytes)
                    elif kind == "copy_out":
                        memmove(output + at, self._slot(step.peer) + step.slot, nbytes)
                    elif kind == "copy":
                        if output + at != source + own:
                            memmove(output + at, source + own, nbytes)
                    else:
                        parts = [self._slot(peer) + step.slot for peer in range(team.shape.size)]
                        parts[rank] = source + own
                        target = output + at if kind == "reduce" else self._slot(rank, 1) + step.slot
                        port().reduce(target, parts, nbytes, REDUCED_AS.get(call.dtype, call.dtype), call.op)
            number += 1

    def _slot(self, rank: int, ahead: int = 0) -> int:
        shape = self._team.shape
        return self._team.segments[rank].address + shape.slots + (self._count + ahead & 1) * shape.slot

    def _post(self) -> None:
        self._count = (self._count + 1) % (2 * _HALF)
        self._counters[self._team.rank].value = self._count
        wake(self._own.address + POSTED)

    def _reached(self, peer: int) -> bool:
        return (self._counters[peer].value - self._count) % (2 * _HALF) < _HALF

    def _wait_for(self, peer: int) -> None:
        if not self._reached(peer):
            address = self._team.segments[peer].address + POSTED
            if not wait_until(address, lambda: self._reached(peer), self._team.limit, lambda: self._look(peer)):
                raise WaitError(Failure.LATE, peer)

    def _look(self, awaited: int) -> None:
        """Raise if the wait for a peer is in vain."""
        if self._aborted:
            raise WaitError(Failure.ABORTED, self._team.rank)
        dead = ended(self._team.processes)
        left = self._team.segments[awaited].has_left()
        if self._reached(awaited):  # it came meanwhile, and then ended or left
            return
        if dead is not None:
            raise WaitError(Failure.DIED, dead)
        if left:
            raise WaitError(Failure.LEFT, awaited)

    def _check(self, program: Program) -> int:
        """Refuse what the ranks don't call alike; count the rounds."""
        headers = self.calls()
        if disagreement(headers) is not None:
            raise WaitError(Failure.REFUSED, self._team.rank)
        if program.rounds:
            return program.rounds
        return rounds_for([Call.read(words).sent for words in headers], program.chunk)
