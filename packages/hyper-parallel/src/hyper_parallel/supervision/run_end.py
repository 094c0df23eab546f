"""The end of a run: signals, ranks that end together, warnings, and steps without memory or with no numbers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hp_checkpoint.extend import steps_in
from hp_offload.extend import BudgetError, parse_size, size
from hp_plan import Diagnostic, Origin, ParallelPlan
from hp_platform import get_platform
from hp_platform.extend import Place, read_flight
from hyper_parallel.launching.launch import EXPLAINED, Job
from hyper_parallel.reports.output import CHECKPOINTS, WARNINGS, weights_option

_PATIENCE = 2.0
_LAST = 120.0
_POLL = 0.02


def leave_together(job: Job, place: Place) -> None:
    """Stay until all ranks are past their last barrier.

    A rank that has come through it may still owe the others a message: mccl sends beside the program, and what it has
    not sent when the process ends is lost. Whoever waits for that message waits for ever.

    Args:
        job: of the rank.
        place: of the rank; one that msrun or torchrun started for somebody else has no folder to meet in.
    """
    if job.flights is None:
        return
    (job.flights / f"rank-{place.rank}.past").touch()
    deadline = time.monotonic() + _LAST  # one that ended meanwhile is the launcher's to report
    while len(list(job.flights.glob("rank-*.past"))) < place.world_size and time.monotonic() < deadline:
        time.sleep(_POLL)


def tell_end(job: Job, place: Place, error: Exception) -> None:
    """Tell the launcher what a rank ends with, where that tells its user what to do, and let the others do so as well.

    Args:
        job: of the rank.
        place: of the rank; one of several machines has no launcher that could compare.
        error: what it raised.
    """
    if job.flights is None or type(error).__name__ not in EXPLAINED:
        return
    hidden = job.flights / f".rank-{place.rank}.end"
    hidden.write_text(str(error), encoding="utf-8")
    hidden.rename(job.flights / f"rank-{place.rank}.end")
    deadline = time.monotonic() + _PATIENCE  # the launcher ends those that have said nothing
    while len(_ends(job.flights)) < place.world_size and time.monotonic() < deadline:
        time.sleep(_POLL)


def ended_alike(folder: Path, ranks: int) -> str | None:
    """Return the error that all ranks have raised, None where they did not raise one.

    Args:
        folder: of the job's flights.
        ranks: their number.
    """
    ends = _ends(folder)
    texts = {path.read_text(encoding="utf-8") for path in ends}
    return texts.pop() if len(ends) == ranks and len(texts) == 1 else None


def _ends(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.end"))


_NOTES = "notes"


def note(job: Job, text: str) -> None:
    """Say something on a rank: to its launcher, which has the terminal, or where there is none to stderr.

    Args:
        job: of the rank.
        text: what.
    """
    if job.flights is None:
        _write(text)
        return
    with open(job.flights / _NOTES, "a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def show_notes(job: Job, ranks: int) -> None:
    """Show what the ranks of a run that failed have said; where they said nothing, what is lost, and why.

    Args:
        job: of the ranks.
        ranks: their number.
    """
    assert job.flights is not None
    notes = job.flights / _NOTES
    if notes.exists():
        for text in notes.read_text(encoding="utf-8").splitlines():
            _write(text)
        return
    if job.folder is None:
        return
    flights = [read_flight(job.flights, rank) for rank in range(ranks)]
    done = max((flight.step for flight in flights if flight is not None), default=0)
    newest = max(steps_in(job.folder / CHECKPOINTS), default=0)
    if done > newest:
        what = f"the newest checkpoint is step {newest}" if newest else "there is no checkpoint"
        why = "no rank was left that could save it: one that waits in a collective hears of a lost rank on gloo alone"
        _write(f"step {done} was finished and not saved; {what}; {why}")


def _write(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")
    sys.stderr.flush()


class KeptWarnings:
    """The warnings of a rank, which stay in the run's folder as lines of JSON.

    Args:
        rank: which.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._path, self._early = rank, None, list[str]()

    def add(self, text: str) -> None:
        """Keep a warning; one that comes before the folder is known waits for it."""
        self._early.append(text)
        if self._path is not None:
            self.write_to(self._path.parent)

    def write_to(self, folder: Path) -> None:
        """Write to the folder of the run what there is, and what comes."""
        self._path = folder / WARNINGS
        lines = [json.dumps({"rank": self._rank, "text": text}) + "\n" for text in self._early]
        self._early.clear()
        if lines:
            with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:  # shown all the same
                file.write("".join(lines))


@contextlib.contextmanager
def keeping_warnings(rank: int) -> Iterator[KeptWarnings]:
    """Keep the warnings of Python code inside, which are shown as they were.

    Args:
        rank: this one.
    """
    kept, shown = KeptWarnings(rank), warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        kept.add(f"{category.__name__}: {message}")
        shown(message, category, filename, lineno, *more)

    warnings.showwarning = show
    try:
        yield kept
    finally:
        warnings.showwarning = shown


_RETURNED = 0.5  # seconds, by when a rank's result is in the launcher's pipe


class Stop:
    """Whether a signal asked this process to stop.

    Args:
        within: seconds that it has for it; then, or at a second signal, it ends at once.

    Attributes:
        asked: by a signal.
    """

    def __init__(self, within: float) -> None:
        self._within, self.asked = within, False

    def listen(self) -> None:
        """Take SIGTERM as a request to stop, and SIGINT where no launcher of ours takes it."""
        signal.signal(signal.SIGTERM, self._hear)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)
        self.asked = True
        _after(self._within, 128 + number)

    def end(self) -> None:
        """End a rank that was forked and whose work is done, if it was asked to stop.

        It would wait until torchrun's launcher has read its result, and one that got the signal too never does.
        """
        if self.asked:
            sys.stdout.flush()
            sys.stderr.flush()
            _after(_RETURNED, 0)


def _after(seconds: float, status: int) -> None:
    """End the process, whatever it does then."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def say_first_interrupt() -> None:
    """Say what the first Ctrl-C does."""
    sys.stderr.write("note: the run ends after the steps that have begun, and is saved; Ctrl-C again ends it at once\n")
    sys.stderr.flush()


class MemoryShortage(RuntimeError):
    """A step ran out of memory; the text is the report."""


def over_budget(plan: ParallelPlan, error: BudgetError) -> Diagnostic:
    """Say what the plan's budget would have to be.

    Args:
        plan: with a budget.
        error: of the first step, which needs more than the budget leaves.
    """
    states = parse_size(str(plan.memory.budget)) - error.budget
    message = (
        f"got {plan.memory.budget}, of which weights, gradients and optimizer states take {size(states)} on each rank;"
        f" what backward needs is {size(error.least)} at least"
    )
    enough = f"{-(-(states + error.least) // (1 << 20))} MiB"
    return Diagnostic("memory.budget", message, f'write budget = "{enough}", or make mesh.dp_shard or mesh.tp larger')


@dataclass(frozen=True)
class Storage:
    """Memory that is in use.

    Attributes:
        size: in bytes.
        what: the name of the parameter, gradient or state, the operation that saved it for its backward, or "tensor".
        shape: of a tensor in it.
        dtype: of that tensor.
        device: of that tensor.
    """

    size: int
    what: str
    shape: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True)
class Spot:
    """Where memory ran out.

    Attributes:
        phase: of the step, such as "forward".
        module: the innermost that ran; empty where none did.
    """

    phase: str
    module: str


def report_shortage(
    error: BaseException, plan: ParallelPlan, *, rank: int, step: int, place: Spot, storages: Sequence[Storage]
) -> str:
    """Return the text of a report.

    Args:
        error: the framework's.
        plan: the run's.
        rank: of this process.
        step: under way.
        place: in the step.
        storages: the largest ones.
    """
    inside = f", in {place.module}" if place.module else ""
    lines = [f"rank {rank} ran out of memory in step {step}, {place.phase}{inside}: {_first_line(error)}"]
    if storages:
        lines.append(f"The {len(storages)} largest storages in use:")
        for each in storages:
            shape = "x".join(map(str, each.shape)) or "scalar"
            lines.append(f"  {each.size / 2**20:10,.1f} MiB  {each.what}: {each.dtype} {shape} on {each.device}")
    lines.append(f"Less memory: {advice(plan)}")
    return "\n".join(lines)


def advice(plan: ParallelPlan) -> str:
    """Say which values of a plan take less memory."""
    if plan.memory.budget is None:
        first = (
            'write budget = "20GiB" in [memory], less than what a rank has: what backward needs is then swapped or'
            " computed again (hp_offload.fit_memory)"
        )
    else:
        first = f"make memory.budget less than {plan.memory.budget}: buffers of communication come on top of it"
    return f"{first}; make data.batch_size ({plan.data.batch_size}) smaller; make mesh.dp_shard or mesh.tp larger"


def write_shortage(folder: Path, rank: int, text: str) -> None:
    """Write a report beside the run's other files, where that can be done."""
    try:
        (folder / f"out-of-memory-rank-{rank}.txt").write_text(text + "\n", encoding="utf-8")
    except OSError:
        pass


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class DivergedError(RuntimeError):
    """A step whose loss or gradients are infinite or not a number: its weights are worth nothing, and are not saved."""


def check_finite(step: int, loss: float, norm: float, *, saved: str | None, origin: Origin | None = None) -> None:
    """Raise where a step has spoiled the weights.

    Args:
        step: which.
        loss: of all ranks.
        norm: of all gradients, before clipping.
        saved: the newest checkpoint, which is of a step before; None without one.
        origin: where the first such number was born, if that is known.

    Raises:
        DivergedError: the loss or the norm is not finite.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    spoiled = not math.isfinite(loss)
    what = f"the loss of step {step} is {loss}" if spoiled else f"the gradients of step {step} have norm {norm}"
    kept = "there is no checkpoint yet" if saved is None else f"the newest checkpoint is {saved}"
    fix = "start again with a smaller optimizer.lr, with run.grad_clip or with schedule.warmup_steps"
    if saved is not None:
        fix += f", from its weights by {weights_option(Path(saved))}"
    if origin is not None:
        raise DivergedError(f"{what}, so the step is not taken: {origin}; {kept}; {fix}")
    if get_platform().name == "torch":
        fix += "; with [monitor] every = 1 the error names the module that begins it"
    raise DivergedError(f"{what}, so the weights after it are worth nothing and are not saved; {kept}; {fix}")
