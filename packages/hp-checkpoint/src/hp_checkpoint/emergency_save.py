"""Last words: the newest finished step of a run that fails, saved by the ranks that are left, who agree by files.

Note [Last words]
    The optimizer's step is the commit point: until it begins, a rank has the state of the step before, whatever fails
    in forward, backward or a collective; a rank that fails inside has neither. So those that are left compare the steps
    that they have finished, and save the newest one of which they hold every piece: of replicated and of HSDP's
    parameters another rank has what the lost one had; an error, unlike a lost process, loses nothing. What nobody has
    is named, and nothing is written. Nor is it for a model with buffers that are saved: a forward may have changed
    them, as a batch norm does, so that they are no longer those of the finished step. A step is saved in the files, by
    the commit and in the format of any other save.

    Which tensors there are is agreed on before something fails: what only a lost rank had, as the stage of a pipeline,
    nobody else could miss.

Note [Agreement by files]
    Each rank that is left writes ``joined-<rank>`` into a folder of the run, breaks its connections, so that those who
    wait for it stop and come as well, and waits until every rank has joined or is known to be lost. Whoever sees that
    first writes the list of members, by a link that only one can make. From then on they exchange numbered files. The
    folder's name has a nonce of the run, so that nobody meets files of an earlier one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint.api import versions
from hp_checkpoint.checkpointer import Checkpointer, training_state
from hp_checkpoint.disk.manifest import prune
from hp_checkpoint.disk.storage import new_nonce
from hp_checkpoint.disk.tools import faults
from hp_checkpoint.errors import CheckpointError, Ranks
from hp_checkpoint.layout.state import Address, State
from hp_checkpoint.port import port
from hp_checkpoint.saving.saving import save_state
from hp_platform import get_backend, get_platform

_POLL = 0.02


def join(folder: Path, rank: int, record: dict[str, Any]) -> None:
    """Say that a rank is left, before others can notice that it stopped.

    Args:
        folder: of the run; made here.
        rank: the global rank.
        record: for `meet` of all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"joined-{rank}", json.dumps(record).encode())


def meet(folder: Path, rank: int, size: int, lost: Iterable[int], deadline: float) -> dict[int, dict[str, Any]]:
    """Wait for the ranks that are left, and return the record of each; the same on all of them.

    Args:
        folder: that of `join`.
        rank: the global rank, which has joined.
        size: the number of ranks.
        lost: those that this one knows to be lost; what others know is in their records under "lost".
        deadline: on the monotonic clock; then whoever is there begins.

    Raises:
        CheckpointError: the others have begun without this rank.
    """
    listed = folder / "members"
    while not listed.exists():
        there = _joined(folder, size)
        gone = {each for record in there.values() for each in record["lost"]} | set(lost)
        if len(there.keys() | gone) == size or time.monotonic() > deadline:
            own = folder / f"members-{rank}"
            own.write_text(json.dumps(sorted(there)))
            with suppress(FileExistsError):
                os.link(own, listed)
        else:
            time.sleep(_POLL)
    members = json.loads(listed.read_text())
    if rank not in members:
        raise CheckpointError(f"the ranks {members} have begun without rank {rank}, which came too late")
    there = _joined(folder, size)
    return {member: there[member] for member in members}


def _joined(folder: Path, size: int) -> dict[int, dict[str, Any]]:
    there = {}
    for rank in range(size):
        with suppress(FileNotFoundError):
            there[rank] = json.loads((folder / f"joined-{rank}").read_bytes())
    return there


class Survivors(Ranks):
    """Some ranks of a world, under their numbers in it: what others would say is empty.

    Args:
        folder: where they met.
        rank: the global rank.
        size: the number of ranks in the world.
        members: those that take part.
        deadline: on the monotonic clock.
    """

    def __init__(self, folder: Path, rank: int, size: int, members: Sequence[int], deadline: float) -> None:
        self.rank, self.size, self.leader = rank, size, min(members)
        self.last = max(members)
        self._folder, self._members, self.deadline = folder, members, deadline
        self._number = 0

    def collect(self, payload: bytes) -> list[bytes]:
        """Return all members' payloads on the leader; an empty list on the others."""
        everyone = self.gather(payload)
        return everyone if self.rank == self.leader else []

    def gather(self, record: bytes) -> list[bytes]:
        """Return all members' records, and nothing for those that are no members.

        Raises:
            CheckpointError: a member did not answer in time.
        """
        self._number += 1
        _write(self._folder / f"{self._number}-{self.rank}", record)
        everyone = [b""] * self.size
        for member in self._members:
            everyone[member] = self._read(self._folder / f"{self._number}-{member}", member)
        return everyone

    def all_to_all(self, data: np.ndarray, received: Sequence[int], sent: Sequence[int]) -> np.ndarray:
        """Refuse: a save has no use for it."""
        raise NotImplementedError("survivors save, and load nothing")

    def leave(self) -> None:
        """Take leave of the others; the leader removes the folder when all have."""
        _write(self._folder / f"left-{self.rank}", b"")
        if self.rank == self.leader:
            with suppress(CheckpointError):
                for member in self._members:
                    self._read(self._folder / f"left-{member}", member)
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)
            with suppress(OSError):  # a rank that came too late
                self._folder.rmdir()

    def _share(self, payload: bytes) -> list[bytes]:
        return self.gather(payload)

    def _read(self, path: Path, member: int) -> bytes:
        while True:
            with suppress(FileNotFoundError):
                return path.read_bytes()
            if time.monotonic() > self.deadline:
                raise CheckpointError(f"rank {member} did not answer in time", [member])
            time.sleep(_POLL)


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}")
    part.write_bytes(content)
    os.rename(part, path)


class LastWords:
    """Saves the newest finished step of a run that fails; see Note [Last words].

    All ranks make it together, after a first step: then the optimizer has its states.

    Example:
        >>> words = LastWords(checkpoints, model, optimizer, within=25.0)
        >>> try:
        ...     train()
        ... except Exception as error:
        ...     print(words.save(step, lost=getattr(error, "ranks", ()), schedule=schedule, data=data))
        ...     raise

    Args:
        checkpoints: of the run.
        model: that is trained.
        optimizer: of its parameters.
        within: seconds that a save may take.
    """

    def __init__(self, checkpoints: Checkpointer, model: Any, optimizer: Any, *, within: float) -> None:
        ranks = Ranks()
        self._rank, self._size, self._within = ranks.rank, ranks.size, within
        self._checkpoints, self._optimizer, self._texts = checkpoints, optimizer, checkpoints.texts(model)
        # The model's own tensors, sharded: in the middle of a step other tensors may stand in their places.
        self._model: Mapping[str, Any] = port().model_state(model)
        buffers = {id(value) for value in model.buffers()}
        self._folder = checkpoints.folder / f".last-words-{ranks.first(lambda: new_nonce().encode(), 'train').decode()}"
        own = [name for name, value in self._model.items() if id(value) in buffers]
        self._expected: set[Address] = set()
        self._buffers: set[str] = set()
        everyone = ranks.agree(lambda: json.dumps([sorted(self._state(None, None).tensors), own]).encode(), "train")
        for tensors, names in map(json.loads, dict.fromkeys(everyone)):
            self._expected |= {(part, name) for part, name in tensors}
            self._buffers |= set(names)

    def save(
        self, step: int | None, *, saved: int, lost: Iterable[int] = (), schedule: Any = None, data: Any = None
    ) -> str:
        """Save the newest finished step that the ranks which are left have complete; each of them calls it once.

        The process groups can't be used afterwards.

        Args:
            step: that this rank has finished; None in the middle of an update, when its state is of no step.
            saved: the step of the newest checkpoint that was asked for; 0 without one.
            lost: ranks that are known to be lost.
            schedule: as for `Checkpointer.save`.
            data: as for `Checkpointer.save`.

        Returns:
            What was saved, or the reason why nothing was; on ranks other than the first that is left "". Where ranks
            can't meet, as over nccl and MindSpore's backends, each says that it saved nothing.
        """
        groups = get_platform().groups
        if self._size > 1 and not groups.can_disconnect():
            newest = max(self._checkpoints.steps(), default=0)
            backend = get_backend()
            return (
                f"rank {self._rank} saved nothing: the others may wait for it in a collective of {backend}, which one"
                f" rank can't break, and would not come; {_newest(newest)}"
            )
        deadline = time.monotonic() + self._within
        gone = sorted(set(lost) - {self._rank})
        join(self._folder, self._rank, {"step": step, "lost": gone})
        if self._size > 1:
            groups.disconnect()
        there = meet(self._folder, self._rank, self._size, gone, deadline)
        ranks = Survivors(self._folder, self._rank, self._size, list(there), deadline)
        try:
            text = self._save(ranks, {rank: record["step"] for rank, record in there.items()}, saved, schedule, data)
        finally:
            ranks.leave()
        return text if self._rank == ranks.leader else ""

    def _save(self, ranks: Survivors, steps: Mapping[int, int | None], saved: int, schedule: Any, data: Any) -> str:
        saved = int(ranks.first(lambda: self._newest(saved, ranks.deadline), "last words"))
        newest = _newest(saved)
        absent = sorted(set(range(self._size)) - steps.keys())
        if self._buffers:
            what = f"a forward of the next step may have changed the model's buffers, as {min(self._buffers)!r}"
            return f"nothing was saved: {what}; {newest}"
        reasons = []
        for step in sorted({step for step in steps.values() if step is not None}, reverse=True):
            if step <= saved:
                break
            reason = self._try(ranks, step, steps[self._rank] == step, schedule, data)
            if reason is None:
                target = self._checkpoints.path(step)
                return f"the ranks that are left saved step {step}, whole and verified: {target}"
            held = [rank for rank, own in steps.items() if own != step]
            others = f"; the ranks {held} are not at this step" if held else ""
            reasons.append(f"step {step} can't be saved without {_named(absent)}: {reason}{others}")
        if not reasons:
            return (
                f"no step was finished after the newest checkpoint, step {saved}" if saved else "no step was finished"
            )
        return f"{'; '.join(reasons)}; {newest}"

    def _try(self, ranks: Survivors, step: int, holds: bool, schedule: Any, data: Any) -> str | None:
        """Save a step; return the reason why that is not possible, the same on all ranks."""
        try:
            states: list[State] = []
            everyone = ranks.agree(lambda: self._describe(states, holds, schedule, data), "last words")
            known = {(part, name) for text in set(everyone) if text for part, name in json.loads(text)}
            missing = sorted(self._expected - known)
            if missing:
                names = ", ".join(repr(name) for _, name in missing[:4])
                return f"{len(missing)} of {len(self._expected)} tensors were there alone, as {names}"
            target = self._checkpoints.path(step)
            texts, library = self._texts, versions()
            layout = self._checkpoints.layout
            save_state(states[0], target, ranks, step=step, texts=texts, versions=library, layout=layout)
            ranks.first(lambda: self._verified(target, step), "last words")
        except (CheckpointError, ValueError, TypeError, OSError) as error:
            return str(error)
        return None

    def _newest(self, asked: int, deadline: float) -> bytes:
        """Return the newest checkpoint's step; that of a save under way, of step ``asked``, where it is completed."""
        until = (time.monotonic() + deadline) / 2
        while asked and asked not in self._checkpoints.steps() and time.monotonic() < until:
            time.sleep(0.05)
        return str(max(self._checkpoints.steps(), default=0)).encode()

    def _describe(self, states: list[State], holds: bool, schedule: Any, data: Any) -> bytes:
        state = self._state(schedule, data) if holds else State()
        state.tree = state.tree or {}
        states.append(state)
        return json.dumps(sorted(state.tensors)).encode()

    def _state(self, schedule: Any, data: Any) -> State:
        return training_state(
            self._model, self._optimizer, schedule=schedule, data=data, extra=None, adapter=self._checkpoints.adapter
        )

    def _verified(self, target: Path, step: int) -> bytes:
        wrong = faults(target)
        if wrong:
            raise CheckpointError(f"{target} is not what was written: {wrong[0]}")
        prune(self._checkpoints.folder, self._checkpoints.keep, step)
        return b""


def _newest(step: int) -> str:
    return f"the newest checkpoint is step {step}" if step else "there is no checkpoint"


def _named(ranks: list[int]) -> str:
    if not ranks:
        return "a rank that is in the middle of an update"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
