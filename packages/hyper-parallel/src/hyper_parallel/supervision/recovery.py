"""Recovery of a run whose process was lost: what its processes are told, what they answer, and when it is given up.

Note [Epochs]
    A run that recovers is a row of epochs. An epoch has its processes, a place where they meet, a folder for their
    flight recorders, and a number, which is in every message to the launcher and in every copy. When a process of an
    epoch ends, hangs or raises, the epoch is over: the others drop their step, their groups and their model, and tell
    so. The launcher waits until each has told it or has ended, puts spare processes into the places that are empty,
    and begins the next epoch. In it each rank makes its groups, its model and its optimizer anew, and they go on from
    the newest step of which every rank has a whole copy; without one, from the newest checkpoint. The update of a step
    counts once its copy is there on every rank: a rank that has come further goes back to the step that all have.

    Where one process can't end the collectives of the others, as over nccl and hccl, none of them stays: they are
    ended, and the copies, which are in the launcher's memory, are taken up by new ones.

    The launcher holds the copies, so that they outlive any number of processes. What ends the launcher ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hp_plan import RecoverySection
from hyper_parallel.launching.launch import EXPLAINED, Resume

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Epoch:
    """What a process is told when it begins to take part.

    Attributes:
        number: from 0 on.
        rank: of the process.
        ranks: how many there are.
        port: where they meet, on this machine.
        flights: the folder of their flight recorders.
        holders: of the copies of this rank's state: for each the paths of two slots.
        resume: what to go on from without a copy.
        until: the last step; None is the plan's. 0 saves the newest copy and ends.
        newest: go on from no step after it, whose state may be wrong; None: from any.
        proved: an earlier epoch has done a step, with what a run checks in its first.
    """

    number: int
    rank: int
    ranks: int
    port: int
    flights: Path
    holders: tuple[tuple[str, ...], ...]
    resume: Resume
    until: int | None
    newest: int | None = None
    proved: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """What a process tells.

    Attributes:
        kind: "spare": it waits to take part; "began": it has made its model and goes on with steps; "note": it has
            something to say; "done": it has come to the end; "lost": another one has failed it; "failed": it has
            failed itself; "ended": there is no process any more, which only the launcher can tell.
        epoch: the number of its epoch; -1 outside of all.
        text: of a failure, what the user is told; of "began", what it goes on from.
        error: of a failure, the name of the error's class.
        step: how many are done.
        newest: of "lost" and "failed", the newest step whose state is right; None where each is.
        result: of "done".
    """

    kind: Literal["spare", "began", "note", "done", "lost", "failed", "ended"]
    epoch: int = -1
    text: str = ""
    error: str = ""
    step: int = 0
    newest: int | None = None
    result: Any = None


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an epoch is over.

    Attributes:
        ranks: whose processes are to be replaced; none where ranks lost each other and all live.
        step: that was under way, from 1; None where no step had begun.
        text: of the first of them, what the user is told.
        explained: all there is to do is in the text: it is no fault of a process.
        newest: the newest step whose state is right; None where each is.
    """

    ranks: tuple[int, ...]
    step: int | None
    text: str
    explained: bool
    newest: int | None = None


def fault_of(told: Sequence[Told], steps: Sequence[int | None], texts: Callable[[int], str]) -> Fault:
    """Return why an epoch is over.

    Args:
        told: what each rank told last.
        steps: that each was in, None before its first.
        texts: tells how a rank whose process has ended came to it.
    """
    ranks = tuple(rank for rank, each in enumerate(told) if each.kind in ("failed", "ended"))
    begun = [step for step in steps if step is not None]
    step, newest = max(begun, default=None), min((e.newest for e in told if e.newest is not None), default=None)
    if not ranks:
        first = next(each for each in told if each.kind == "lost")
        return Fault((), step, first.text, explained=False, newest=newest)
    errors = {each.error for each in told if each.kind == "failed"}
    failed = next((rank for rank in ranks if told[rank].kind == "ended"), ranks[0])
    text = told[failed].text if told[failed].kind == "failed" else texts(failed)
    explained = told[failed].kind == "failed" and errors <= set(EXPLAINED)
    return Fault(ranks, step, text, explained=explained, newest=newest)


@dataclass
class Recoveries:
    """How often a run has recovered, and whether it does so once more.

    Args:
        plan: the limits.

    Attributes:
        faults: when each came, on the monotonic clock, and in which step.
    """

    plan: RecoverySection
    faults: list[tuple[float, int | None]] = field(default_factory=list)

    def refusal(self, fault: Fault) -> str | None:
        """Take note of a fault; return why the run does not recover from it, None where it does."""
        now = time.monotonic()
        self.faults.append((now, fault.step))
        if fault.explained:
            return "another process would end the same way"
        same = sum(step == fault.step for _, step in self.faults) if fault.step is not None else 0
        if same >= self.plan.same_step:
            return f"it is fault {same} in step {fault.step} (recovery.same_step): the program's, not a process's"
        recent = sum(now - at < HOUR for at, _ in self.faults)
        if recent > self.plan.limit:
            return f"the run has recovered {recent - 1} times within an hour (recovery.limit)"
        return None
