"""The compiled core behind the interface of both."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

from hp_onesided.cores import library
from hp_onesided.cores.core import Team
from hp_onesided.cores.segment import HEADERS
from hp_onesided.cores.waiting import Failure, WaitError, looks
from hp_onesided.planning.headers import DTYPES, OPS, REDUCED_AS, Call, words_of
from hp_onesided.planning.steps import STEPS, Program


class _Prepared(NamedTuple):
    """A program for the core, and the memory it points to."""

    program: library.Program
    steps: object
    words: object


class NativeCore:
    """Runs programs over the memory of a group.

    Args:
        core: the library.
        team: the ranks.
    """

    def __init__(self, core: ctypes.CDLL, team: Team) -> None:
        self._core, self._team, self._process = core, team, os.getpid()
        self._run, self._issue, self._wait, self._finished = core.hp_run, core.hp_issue, core.hp_wait, core.hp_finished
        shape = team.shape
        bases = (ctypes.c_uint64 * shape.size)(*(each.address for each in team.segments))
        processes = (ctypes.c_int * shape.size)(*(team.processes.get(peer, -1) for peer in range(shape.size)))
        places = shape.header, shape.slots, shape.slot
        self._group = core.hp_open(team.rank, shape.size, bases, processes, *places, team.limit, *looks(shape.size))

    def prepare(self, program: Program, call: Call) -> _Prepared:
        """Write a program as the core reads it."""
        steps = (library.Step * len(program.steps))(
            *(
                (STEPS.index(step.kind), step.peer, step.slot, step.at, step.own, step.piece, step.stride, step.end)
                for step in program.steps
            )
        )
        written = call.words(self._team.shape.size)
        words = (ctypes.c_uint64 * len(written))(*written)
        dtype, op = DTYPES.index(REDUCED_AS.get(call.dtype, call.dtype)), OPS.index(call.op)
        numbers = len(steps), len(words), program.rounds, dtype, op
        return _Prepared(library.Program(steps, words, program.chunk, *numbers), steps, words)

    def run(self, prepared: _Prepared, output: int, source: int) -> None:
        """Run a program here, or in the thread if that has something to do."""
        failure = self._run(self._group, prepared.program, output, source)
        if failure:
            raise self._error(failure)

    def issue(self, prepared: _Prepared, output: int, source: int) -> int:
        """Queue a program."""
        return self._issue(self._group, prepared.program, output, source)

    def wait(self, number: int) -> None:
        """Wait for a queued program."""
        failure = self._wait(self._group, number)
        if failure:
            raise self._error(failure)

    def failed(self) -> bool:
        """Tell whether a collective couldn't be done."""
        return bool(self._core.hp_failure(self._group))

    def finished(self) -> int:
        """Return the number of programs that left the queue."""
        return self._finished(self._group)

    def calls(self) -> list[tuple[int, ...]]:
        """Read the headers of the round that this rank is in."""
        shape = self._team.shape
        offset = HEADERS + (self._core.hp_count(self._group) & 1) * shape.header
        return [segment.words(offset, words_of(shape.size)) for segment in self._team.segments]

    def abort(self) -> None:
        """End what runs."""
        self._core.hp_abort(self._group)

    def stop(self) -> None:
        """End the thread."""
        self._core.hp_stop(self._group)

    def __del__(self) -> None:
        if self._process == os.getpid():  # not in a forked child, which has no such thread
            self._core.hp_free(self._group)

    def _error(self, failure: int) -> WaitError:
        return WaitError(Failure(failure), self._core.hp_culprit(self._group))
