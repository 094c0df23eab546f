"""The launcher of a run that recovers: it holds the copies, the spares and the epochs; see Note [Epochs]."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from hp_checkpoint.extend import hold
from hp_plan import Diagnostic, ParallelPlan, PlanError, RecoverySection
from hp_platform import get_platform
from hp_platform.extend import SettingError, hold_meeting, inside_launcher, platform_name, read_flight
from hyper_parallel.launching.launch import Interrupted, Job, RankFailure
from hyper_parallel.launching.member import start
from hyper_parallel.reports.display import make_reporter
from hyper_parallel.reports.events import showing
from hyper_parallel.supervision.hanging import Watch, last_move, watching
from hyper_parallel.supervision.recovery import Epoch, Fault, Recoveries, Told, fault_of
from hyper_parallel.supervision.run_end import say_first_interrupt

_POLL = 0.1
_GRACE = 3.0  # seconds in which processes end that are told to, or say what became of them
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def replaced(plan: ParallelPlan) -> str:
    """Return which processes a fault replaces, "lost" or "all".

    Raises:
        SettingError: the plan wants others to stay, and the backend can't.
    """
    kind = get_platform().devices.kind
    if kind == "cpu":
        return plan.recovery.replace or "lost"
    if plan.recovery.replace == "lost":
        raise SettingError(
            f"recovery.replace = 'lost' is for gloo: on {kind} a process can't end the collectives of others; leave"
            " it out, and a fault replaces all processes"
        )
    return "all"


def described(plan: ParallelPlan, spares: int) -> str:
    """Say what a run will do about a fault."""
    limits = f"at most {plan.recovery.limit} times an hour"
    many = f"{spares} spare process{'es' if spares > 1 else ''}"
    if replaced(plan) == "lost":
        return f"recovery: a process that ends, hangs or raises is replaced by one of {many}, the others stay; {limits}"
    return f"recovery: if a process ends, hangs or raises, all are replaced and go on from copies in memory; {limits}"


def check_recovery(recover: bool, spares: int | None, debug_rank: int | None) -> None:
    """Check that processes can be replaced here.

    Args:
        recover: the command is to.
        spares: processes that are to wait, if the command says so.
        debug_rank: the rank that a person debugs.

    Raises:
        SettingError: they can't.
    """
    if not recover:
        if spares is not None:
            raise SettingError(f"--spares {spares}: spare processes take a place with --recover alone; add it")
        return
    if inside_launcher():
        raise SettingError(
            "--recover replaces processes, which is not possible where torchrun, msrun or srun has started them: start"
            " the command without these; or leave --recover out, and let the launcher start all ranks again with"
            " --resume auto, as torchrun --max-restarts 3 does"
        )
    if platform_name() != "torch":
        raise SettingError("--recover is for PyTorch; on MindSpore, start the run again with --resume auto")
    if debug_rank is not None:
        raise SettingError("--recover and --debug-rank: a rank that a person debugs is not replaced; leave one out")


def check_replacing(plan: ParallelPlan, recover: bool) -> None:
    """Check that processes whose numbers are wrong can be replaced, where `[sdc]` of a plan is to.

    Args:
        plan: the plan.
        recover: the command is to replace processes.

    Raises:
        PlanError: they can't.
    """
    if plan.sdc.on_fault != "replace":
        return
    key, fix = "sdc.on_fault", "make it 'restore', which ends the run at a fault that lasts, or 'report'"
    if not recover:
        message = "got 'replace', but no spare process is there, nor copies that it could go on from"
        fix = f"hyper-parallel train --recover --spares 1, which starts the ranks of one machine; or {fix}"
        raise PlanError([Diagnostic(key, message, fix)])
    if (kind := get_platform().devices.kind) != "cpu":
        message = f"got 'replace', but a spare process would compute on the same {kind} device"
        raise PlanError([Diagnostic(key, message, fix)])


def slots_of(plan: ParallelPlan) -> int:
    """Return how many copies a holder keeps: one more where the last step that was checked has to stay."""
    return 3 if plan.sdc.on_fault == "replace" and plan.sdc.replay_every > plan.recovery.every else 2


def recovery_notes(plan: ParallelPlan) -> list[str]:
    """Say where a plan's `[recovery]` has no effect, and what a plan needs `--recover` for."""
    if plan.sdc.on_fault == "replace":
        return ["sdc.on_fault = 'replace' needs spare processes: hyper-parallel train --recover --spares 1"]
    if plan.recovery == RecoverySection():
        return []
    return [
        "[recovery] is for hyper-parallel train --recover on one machine: under torchrun, msrun and srun, and without"
        " --recover, no process is replaced"
    ]


def launch_recovering(job: Job, *, ranks: int) -> dict[int, Any]:
    """Train on new ranks of this machine, and go on with others where a process is lost.

    Args:
        job: of every rank; it says how many spares there are.
        ranks: their number.

    Returns:
        What each rank returned.

    Raises:
        RankFailure: a fault that the run does not recover from.
        Interrupted: this process got SIGINT, SIGTERM, SIGHUP or SIGQUIT.
    """
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as name, contextlib.ExitStack() as stack:
        if job.folder is not None and not job.json_lines and sys.stdout.isatty():
            job = dataclasses.replace(job, events=Path(name) / "events")
            stack.enter_context(showing(Path(name) / "events", make_reporter(json_lines=False)))
        launcher = stack.enter_context(_Launcher(job, ranks, Path(name)))
        return launcher.run()


class _Member:
    """A process, as the launcher sees it.

    Attributes:
        told: what it told last; None while it takes part.
        began: what it told when it went on with steps.
        warm: it has waited to take part.
        silent: it tells nothing any more.
    """

    def __init__(self, job: Job) -> None:
        self.process: BaseProcess
        self.control: Connection
        self.process, self.control = start(job)
        self.told: Told | None = None
        self.began: Told | None = None
        self.warm = self.silent = False

    def begin(self, epoch: Epoch) -> None:
        self.told = self.began = None
        with contextlib.suppress(OSError):  # its end is heard of
            self.control.send(epoch)

    def close(self) -> None:
        """End the process, and let go of it."""
        if self.control.closed:
            return
        self.told, self.silent = Told("ended"), True
        self.process.kill()
        self.process.join()
        self.process.close()
        self.control.close()


class _Launcher:
    """One run; on leaving, no process of it is left."""

    def __init__(self, job: Job, ranks: int, folder: Path) -> None:
        self._job, self._ranks, self._folder, self._plan = job, ranks, folder, job.plan
        self._replaced = replaced(job.plan)
        self._recoveries = Recoveries(job.plan.recovery)
        slots = slots_of(job.plan)
        self._held = [hold(job.plan.recovery.holders, slots=slots) for _ in range(ranks)]
        self._newest: int | None = None  # until all have dropped what is after it
        self._proved = False
        self._members: list[_Member] = []
        self._spares: list[_Member] = []
        self._number, self._meeting, self._flights = -1, None, folder
        self._epoch, self._watch = contextlib.ExitStack(), None
        self._noticed: float | None = None
        self._signals: list[int] = []
        self._stopping = 0.0

    def __enter__(self) -> _Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._epoch.close()
        for each in (*self._members, *self._spares):
            each.close()
        for arena in (arena for holders in self._held for holder in holders for arena in holder):
            arena.close()

    def run(self) -> dict[int, Any]:
        with self._hearing_signals():
            self._members = [_Member(self._job) for _ in range(self._ranks)]
            self._spares = [_Member(self._job) for _ in range(self._job.spares)]
            self._begin(self._job.resume, self._job.until)
            while not self._follow():
                fault = self._fault()
                reason, alike = self._recoveries.refusal(fault), self._alike()
                if reason is not None and not fault.explained:
                    self._save(fault)
                reason = reason or self._replace(fault)
                if reason is not None:
                    text = fault.text if fault.explained else f"{fault.text}\nThe run does not recover: {reason}"
                    raise RankFailure(fault.ranks[0] if fault.ranks else 0, text, alike=alike)
                self._say(f"{_named(fault)}; epoch {self._number + 1} begins")
                self._begin("auto" if self._job.resume == "no" else self._job.resume, self._job.until)
            if self._signals:
                raise Interrupted(self._signals[0])
            return {rank: each.told.result for rank, each in enumerate(self._members) if each.told is not None}

    def _begin(self, resume: Any, until: int | None) -> None:
        """Begin the next epoch."""
        self._number += 1
        self._flights = self._folder / f"epoch-{self._number}"
        self._flights.mkdir()
        self._meeting, port = hold_meeting(self._ranks)
        watched = watching(self._flights, self._ranks, self._job.hang_after, self._plan.mesh.axes)
        self._watch: Watch | None = self._epoch.enter_context(watched)
        for rank, member in enumerate(self._members):
            slots = tuple(tuple(f"/proc/{os.getpid()}/fd/{each.descriptor}" for each in h) for h in self._held[rank])
            told = (self._number, rank, self._ranks, port, self._flights, slots, resume, until)
            member.begin(Epoch(*told, self._newest, self._proved))

    def _follow(self) -> bool:
        """Wait until every rank has told how the epoch ended for it, or is no more; tell whether it is done."""
        troubled = 0.0
        while any(each.told is None for each in self._members):
            self._hear()
            self._stop()
            if any(each.told is not None and each.told.kind != "done" for each in self._members):
                troubled = troubled or time.monotonic()
                self._noticed = self._noticed or troubled
                late = time.monotonic() - troubled > _GRACE
                if late or not all(each.began for each in self._members):
                    self._meeting = None  # who waits for others to come, maybe to make a group, hears that they don't
                for each in self._members if self._replaced == "all" and late else ():
                    if each.told is None:  # it is not the one to blame
                        each.process.kill()
                        each.told = Told("lost", self._number, "ended with the others")
        self._epoch.close()
        self._meeting = None
        return all(each.told is not None and each.told.kind == "done" for each in self._members)

    def _hear(self) -> None:
        """Take in what processes tell, and note those that have ended."""
        everyone = [*self._members, *self._spares]
        sources: dict[Any, _Member] = {each.control: each for each in everyone if not each.silent}
        sources |= {each.process.sentinel: each for each in everyone if not each.silent}
        for ready in wait(list(sources), _POLL):
            member = sources[ready]
            if ready is member.control:
                self._listen(member)
        for member in everyone:
            if not _ended(member) and (member.silent or not member.process.is_alive()):
                while not member.silent and member.control.poll() and self._listen(member):  # what it told last
                    pass
                if member.told is None or member in self._spares:
                    member.process.join()
                    member.told = Told("ended", self._number)

    def _listen(self, member: _Member) -> bool:
        try:
            told: Told = member.control.recv()
        except (EOFError, OSError):
            member.silent = True
            return False
        if told.kind == "spare":
            member.warm = True
        elif told.epoch != self._number:
            pass  # of an epoch that is over
        elif told.kind == "note":
            self._say(told.text)
        elif told.kind == "began":
            member.began = told
            self._all_began()
        else:
            member.told = told
        return True

    def _all_began(self) -> None:
        if not all(each.began for each in self._members):
            return
        began, self._newest = self._members[0].began, None
        if self._noticed is not None and began is not None:
            seconds = time.monotonic() - self._noticed
            step = f" of step {began.step}" if began.step else ""
            self._say(f"recovered in {seconds:.2f} s, going on from {began.text}{step}")
            self._noticed = None
        self._spares = [each for each in self._spares if not _ended(each)]
        while len(self._spares) < self._job.spares:
            self._spares.append(_Member(self._job))

    def _fault(self) -> Fault:
        told = [each.told for each in self._members if each.told is not None]
        flights = [read_flight(self._flights, rank) for rank in range(self._ranks)]
        steps: list[int | None] = []
        for member, flight in zip(self._members, flights, strict=True):
            done = member.began.step if member.began is not None else None
            if flight is not None and flight.step:
                self._proved = self._proved or done is not None and flight.step > done
                done = max(done or 0, flight.step)
            steps.append(None if done is None else done + 1)
        fault = fault_of(told, steps, self._end_of)
        known = [each for each in (self._newest, fault.newest) if each is not None]
        self._newest = min(known, default=None)
        return fault

    def _end_of(self, rank: int) -> str:
        """Tell how a rank whose process has ended came to it."""
        if self._watch is not None and self._watch.failure is not None and self._watch.failure[0] == rank:
            return self._watch.failure[1]
        process = self._members[rank].process
        code = process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how} (process {process.pid}){last_move(self._flights, rank, self._plan.mesh.axes)}"

    def _replace(self, fault: Fault) -> str | None:
        """Put spares into the places of processes that are lost; return why that can't be done, None where it is."""
        ranks = range(self._ranks) if self._replaced == "all" else fault.ranks
        for rank in ranks:
            self._members[rank].close()
        for each in [each for each in self._spares if _ended(each)]:
            self._spares.remove(each)
            each.close()
        self._spares += [_Member(self._job) for _ in range(len(ranks) - len(self._spares))]
        deadline = time.monotonic() + self._plan.recovery.wait_for_spare
        while len(ready := [each for each in self._spares if each.warm and not _ended(each)]) < len(ranks):
            self._hear()
            self._stop()
            if time.monotonic() > deadline:
                limit = f"{self._plan.recovery.wait_for_spare:g} s (recovery.wait_for_spare)"
                return f"{len(ready)} of {len(ranks)} spare processes were ready after {limit}"
        for rank, member in zip(ranks, ready):
            self._spares.remove(member)
            self._members[rank] = member
        return None

    def _alike(self) -> bool:
        """Tell whether all ranks have failed with one error."""
        told = [each.told for each in self._members if each.told is not None and each.told.kind == "failed"]
        return len(told) == self._ranks and len({each.text for each in told}) == 1

    def _save(self, fault: Fault) -> None:
        """Save the newest step that all have a copy of, in an epoch of no steps; what fails in it is not told."""
        if self._replace(fault) is None:
            self._begin("auto", 0)
            self._follow()

    @contextlib.contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        def hear(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        before: Mapping[int, Any] = {number: signal.signal(number, hear) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        """Let the ranks save and end after a signal, and end them at a second one, or when they take too long.

        Raises:
            Interrupted: they have ended.
        """
        if not self._signals:
            return
        first, running = self._signals[0], [each for each in self._members if each.told is None]
        asked = first in (signal.SIGTERM, signal.SIGINT)
        if not self._stopping:
            self._stopping = time.monotonic()
            if first == signal.SIGINT:
                say_first_interrupt()
            for each in running if asked else ():
                each.process.terminate()  # SIGTERM
        over = time.monotonic() - self._stopping > self._plan.run.stop_within + _GRACE
        if not running or not asked or over or len(self._signals) > 1:
            raise Interrupted(first)

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(f"note: {text}\n")
        sys.stderr.flush()


def _named(fault: Fault) -> str:
    if not fault.ranks:
        return f"ranks have lost each other: {fault.text}"
    return f"rank{'s' if len(fault.ranks) > 1 else ''} {', '.join(map(str, fault.ranks))} failed: {fault.text}"


def _ended(member: _Member) -> bool:
    return member.told is not None and member.told.kind == "ended"
