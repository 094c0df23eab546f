"""Silent data corruption in a run: when copies and computations are compared, and what follows.

Note [What follows a corruption]
    A replay comes before the update, so a step whose computations differ is computed anew, with the same samples and
    the same random numbers, until two computations agree. The rotated computation comes first and the step's own last,
    so the gradients that stay are the step's. Copies are compared after the update: most overwrite the few. What can't
    be mended, or comes three times at one step, ends the run on all ranks, and nothing is saved after it. Ranks that
    compare copies hear of it at once, all others with the numbers of the step.

    With `on_fault = "replace"` a rank that is wrong twice ends its process in place of the run, and a spare one goes on
    in its place with the others: from a copy of the last step whose computations agreed, or of one before it, as nobody
    knows what the rank has computed since.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hp_checkpoint.extend import Ranks
from hp_plan import Corruption, CorruptionError, ParallelPlan, Verdict
from hp_plan.extend import COMPUTATIONS, WEIGHT, Computed, Finding, Rotation, Unequal, first_difference, vote
from hyper_parallel.data import Rows
from hyper_parallel.port import Trainer
from hyper_parallel.reports.output import CORRUPTIONS

MOST_RESTORES = 3
"""At one step."""


class FaultyRankError(CorruptionError):
    """Ranks that compute or keep wrong numbers, whose processes are to be replaced; raised on all ranks alike.

    Attributes:
        ranks: which.
        newest: the newest step whose state is known to be right; None: that of each step is.
    """

    def __init__(
        self, message: str, corruptions: tuple[Corruption, ...], ranks: tuple[int, ...], newest: int | None
    ) -> None:
        super().__init__(message, corruptions)
        self.ranks, self.newest = ranks, newest

    def __reduce__(self) -> tuple[Any, ...]:
        return FaultyRankError, (str(self), self.corruptions, self.ranks, self.newest)


class Sentinel:
    """What `[sdc]` of a plan compares, on this rank.

    Args:
        plan: the run's.
        trainer: of its model.
        ranks: of the run.
        folder: of the run, where rank 0 writes what is found.
        rows_of: returns the samples of the step under way that belong to a part of the batch.
        clean: the last step whose computations agreed; 0 before the first. Default 0.
        proved: this work gives the same bits again: the run's first step has been done, by other processes. Default
            False.

    Attributes:
        clean: the last step whose computations agreed.
        spoiled: the state of the last step is wrong on this rank or on one that it compares with, and not mended.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        trainer: Trainer,
        ranks: Ranks,
        folder: Path,
        *,
        rows_of: Callable[[int], Rows],
        clean: int = 0,
        proved: bool = False,
    ) -> None:
        self._section, self._trainer, self._ranks, self._rows_of = plan.sdc, trainer, ranks, rows_of
        self._path, self._rotation = folder / CORRUPTIONS, Rotation(plan)
        names = ranks.agree(socket.gethostname().encode, "naming hosts")
        self._hosts = [name.decode() for name in names]
        self._own: list[tuple[Corruption, bool]] = []  # of copies; True ends the run
        self._told: set[tuple[int, str]] = set()
        self._replayed = self._compared = proved
        self._times: dict[int, set[tuple[int, int]]] = {}  # the steps and attempts in which a rank was wrong
        self.clean, self.spoiled = clean, False
        self.found: list[Corruption] = []

    def gradients(self, step: int, rows: Rows, begin: Callable[[], None]) -> tuple[Any, Any]:
        """Compute the gradients of a step as `Trainer.gradients` does, and more than once where it is to be replayed.

        Args:
            step: from 1.
            rows: this rank's samples.
            begin: seeds random numbers, before each computation.

        Raises:
            CorruptionError: on all ranks: a computation can't be repeated, or was wrong more often than it is restored.
        """
        every = self._section.replay_every
        if not every or (self._replayed and (step - 1) % every):
            begin()
            return self._trainer.gradients(rows)
        replay = self._trainer.replay
        assert replay is not None
        buffers = replay.copy_buffers()
        for attempt in range(MOST_RESTORES + 1):
            own, result = self._both(step, rows, begin, buffers)
            if own is None:
                self._replayed, self.clean = True, step
                return result
            if not self._replayed:
                self._refuse(step, own)
            last, (_, norm) = self._computed(COMPUTATIONS - 1, begin, buffers)
            if not math.isfinite(float(result[1])) and not math.isfinite(float(norm)):
                break  # NaNs have many bits, and a report of their own
            action = "computed again" if self._section.on_fault != "report" else "reported"
            findings = vote(self._rotation, self._share([*own, last]))
            told = [self._corruption(step, each, action) for each in findings]
            twice = self._count(told, attempt)
            lasts = attempt == MOST_RESTORES or any(each.verdict is not Verdict.TRANSIENT for each in told)
            fatal = self._section.on_fault != "report" and (lasts or twice)
            if fatal:
                action = "its process is replaced" if self._faulty(told) else "the run ends"
                told = [dataclasses.replace(each, action=action) for each in told]
            self._tell(told)
            if fatal:
                self._end(step, told, attempt, newest=self.clean)
            if self._section.on_fault == "report":
                break
        begin()
        replay.put_buffers(buffers)
        return self._trainer.gradients(rows)

    def _both(
        self, step: int, rows: Rows, begin: Callable[[], None], buffers: Any
    ) -> tuple[list[Computed] | None, Any]:
        """Compute the next copy's samples, then this rank's; return what was read of both where anything differs."""
        other, _ = self._computed(1, begin, buffers)
        own, result = self._computed(0, begin, buffers, rows)
        ends = any(ends for _, ends in self._own)
        numbers = json.dumps([own.digest, other.digest, bool(own.wires or other.wires), ends]).encode()
        everyone = [json.loads(each) for each in self._ranks.agree(lambda: numbers, "comparing computations")]
        if any(each[3] for each in everyone):  # copies of the step before differ, so that all computations do
            self.settle(step - 1, found=True)
        alike = all(
            everyone[each][1] == everyone[self._rotation.counterpart(each, 1)][0] and not everyone[each][2]
            for each in range(self._ranks.size)
        )
        return (None if alike else [own, other]), result

    def _computed(
        self, number: int, begin: Callable[[], None], buffers: Any, rows: Rows | None = None
    ) -> tuple[Computed, tuple[Any, Any]]:
        """Compute the samples of a copy, or this rank's own: Note [Rotation] in `hp_plan.checks.sdc.rotation`."""
        replay, part = self._trainer.replay, self._rotation.place(self._ranks.rank, number)
        assert replay is not None
        begin()
        replay.put_buffers(buffers)
        with replay.reading(part if rows is None else None):
            result = self._trainer.gradients(self._rows_of(part) if rows is None else rows)
        return replay.take(result[0]), result

    def _share(self, own: list[Computed]) -> list[list[Computed]]:
        """Return what all ranks have read, by rank and computation."""
        text = json.dumps([each.encode().decode() for each in own]).encode()
        shared = self._ranks.agree(lambda: text, "comparing computations")
        return [[Computed.decode(each.encode()) for each in json.loads(texts)] for texts in shared]

    def _refuse(self, step: int, own: list[Computed]) -> None:
        """End a run whose first step can't be repeated."""
        everyone = self._share(own)
        others = {rank: everyone[self._rotation.counterpart(rank, 1)][0] for rank in range(self._ranks.size)}
        first = first_difference({rank: each[1] for rank, each in enumerate(everyone)}, others)
        wired = [(rank, each.wires[0]) for rank, two in enumerate(everyone) for each in two if each.wires]
        if first is not None:
            ranks, name, bits = first
            where: Any = "compute"
        else:
            (rank, (name, sender, sent, arrived)), *_ = wired
            ranks, name, bits, where = (rank,), f"{name} from rank {sender}", (arrived, sent), "wire"
        finding = Finding(ranks, where, name, Verdict.IRREPRODUCIBLE, bits)
        corruption = self._corruption(step, finding, "the run ends")
        self._tell([corruption])
        raise CorruptionError(
            f"[sdc] replay_every = {self._section.replay_every}: {name} is not reproducible on this device: the same"
            f" samples gave other bits on rank {ranks[0]} ({self._hosts[ranks[0]]}) than on rank"
            f" {self._rotation.counterpart(ranks[0], 1)} in step {step}, the first of this run. Set [run] deterministic"
            " = true, or leave replay_every out; where it is set, one of these two devices may be faulty",
            (corruption,),
        )

    def compare(self, step: int) -> int:
        """Compare copies of weights and states after an update, and mend them; return how many were wrong.

        Args:
            step: that was updated.
        """
        replicas = self._trainer.replicas
        if replicas is None:
            return 0
        restores = self._section.on_fault != "report"
        unequal = replicas.compare()
        for attempt in range(1, MOST_RESTORES + 1):
            if not unequal:
                break
            first, left = not self._compared, attempt < MOST_RESTORES
            ends = restores and (first or not left or not all(each.decided for each in unequal))
            self._note(step, unequal, first=first, ends=ends, action="taken from another rank" if restores else "")
            self.spoiled = ends
            if ends or not restores:
                break
            replicas.mend(unequal)
            unequal = replicas.compare()
        self._compared = True
        return len(self._own)

    def _note(self, step: int, unequal: list[Unequal], *, first: bool, ends: bool, action: str) -> None:
        """Keep what there is to tell of unequal copies, on the first rank that holds one."""
        for each in unequal:
            place = (each.column.identity, each.column.key)
            if self._ranks.rank != min(each.sums) or (not action and place in self._told):
                continue
            self._told.add(place)
            where: Any = "weight" if each.column.key == WEIGHT else "moment"
            name = each.column.name if where == "weight" else f"{each.column.name}/{each.column.key}"
            wrong = each.wrong
            others = [own for rank, own in each.sums.items() if rank not in wrong][:1]
            bits = (*(each.sums[rank] for rank in wrong), *others)
            verdict = Verdict.IRREPRODUCIBLE if first else each.verdict
            hosts = tuple(self._hosts[rank] for rank in wrong)
            self._own.append((Corruption(step, wrong, hosts, where, name, verdict, bits, action or "reported"), ends))

    def settle(self, step: int, found: bool) -> tuple[str, ...]:
        """Tell on all ranks what copies of a step differed; return what was found in the step, as text.

        Args:
            step: whose numbers are there.
            found: some rank has found something; alike on all.

        Raises:
            CorruptionError: on all ranks: copies can't be mended.
        """
        if found:
            mine, self._own = self._own, []
            text = json.dumps([(each.to_dict(), ends) for each, ends in mine]).encode()
            shared = self._ranks.agree(lambda: text, "sharing what copies differ")
            told = [(Corruption.from_dict(each), ends) for texts in shared for each, ends in json.loads(texts)]
            again = self._count([each for each, _ in told], 0)
            ending = [each for each, ends in told if ends]
            self._count(ending, 1)
            action = "its process is replaced" if self._faulty(ending) else "the run ends"
            self._tell([dataclasses.replace(each, action=action) if ends else each for each, ends in told])
            if ending or again:
                ending = ending or [each for each, _ in told]
                self._end(ending[0].step, ending, MOST_RESTORES)
        return self._texts(step)

    def settle_alone(self, step: int) -> tuple[str, ...]:
        """Tell what this rank knows of a step, whose other ranks may be gone."""
        mine, self._own = self._own, []
        self._tell([each for each, _ in mine])
        return self._texts(step)

    def _texts(self, step: int) -> tuple[str, ...]:
        texts = tuple(str(each) for each in self.found if each.step <= step)
        self.found = [each for each in self.found if each.step > step]
        return texts

    def _corruption(self, step: int, finding: Finding, action: str) -> Corruption:
        hosts = tuple(self._hosts[rank] for rank in finding.ranks)
        return Corruption(
            step, finding.ranks, hosts, finding.where, finding.name, finding.verdict, finding.bits, action
        )

    def _tell(self, corruptions: list[Corruption]) -> None:
        """Keep what was found for the step's line, and write it down."""
        self.found += corruptions
        if self._ranks.rank == 0:
            with open(self._path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(each.to_dict()) + "\n" for each in corruptions)

    def _count(self, corruptions: list[Corruption], attempt: int) -> bool:
        """Note which ranks were wrong in an attempt at a step; tell whether one is to be replaced."""
        if self._section.on_fault != "replace":
            return False
        for each in corruptions:
            if len(each.ranks) == 1:
                self._times.setdefault(each.ranks[0], set()).add((each.step, attempt))
        return bool(self._faulty(corruptions))

    def _faulty(self, corruptions: list[Corruption]) -> tuple[int, ...]:
        """Return the ranks that were wrong twice, if these are to be replaced and each corruption names one rank."""
        known = (Verdict.TRANSIENT, Verdict.PERSISTENT)
        named = all(each.verdict in known and len(each.ranks) == 1 for each in corruptions)
        if self._section.on_fault != "replace" or not named:
            return ()
        lasting = {each.ranks[0] for each in corruptions if each.verdict is Verdict.PERSISTENT}
        again = {each.ranks[0] for each in corruptions if len(self._times[each.ranks[0]]) > 1}
        return tuple(sorted(lasting | again))

    def _end(self, step: int, corruptions: list[Corruption], restored: int, *, newest: int | None = None) -> None:
        """End the run on all ranks, or the processes of ranks that are replaced."""
        texts = "; ".join(str(dataclasses.replace(each, action="")) for each in corruptions[:4])
        if faulty := self._faulty(corruptions):
            raise FaultyRankError(texts, tuple(corruptions), faulty, newest)
        if any(each.verdict is Verdict.IRREPRODUCIBLE for each in corruptions):
            fix = "copies differ after the first step: set [run] deterministic = true, or leave sdc.replicas out"
        elif any(each.verdict is Verdict.UNDECIDED for each in corruptions):
            fix = "nobody knows which is right: go on from a checkpoint, with three copies or more (mesh.dp_replicate)"
        elif any(each.verdict is Verdict.PERSISTENT for each in corruptions):
            fix = "take the host out, and go on from a checkpoint by --resume auto"
        else:
            fix = f"it came back {restored} times in this step: take the host out, and go on from a checkpoint"
        checked = f"; the last step whose computations agreed is {self.clean}" if self._section.replay_every else ""
        raise CorruptionError(f"{texts}; step {step} is not saved{checked}; {fix}", tuple(corruptions))
