"""A training run: its steps, its checkpoints, and how it goes on after an end."""

from __future__ import annotations

import json
import os
import struct
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint import Checkpointer, CheckpointError, InvalidCheckpointError, Keep
from hp_checkpoint.extend import Ranks
from hp_plan import ParallelPlan
from hp_plan.extend import data_parallel_rows, vocabulary
from hp_platform import get_platform, manual_seed
from hp_platform.extend import note_step
from hyper_parallel.data import Content, DataError, Samples, contents, open_samples
from hyper_parallel.launch import Resume
from hyper_parallel.output import CHECKPOINTS, OutputError, Step
from hyper_parallel.port import Trainer, training
from hyper_parallel.stopping import Stop

_RECORD = struct.Struct("<dQ?")  # a rank's loss, its memory, and whether it is asked to stop


class Run:
    """A run of a plan on this rank. Every rank makes it and calls it together.

    Example:
        >>> with Run(plan, Path("runs/first"), resume="auto") as run:
        ...     for step in run.steps():
        ...         print(step.loss)

    Args:
        plan: the plan to train.
        folder: of the run's files; rank 0's counts.
        resume: "auto" goes on from the folder's newest checkpoint that can be read, or from the start where it has
            none; "no" starts. The batch size may be another one, the order of the samples may not.
        until: stop after this step; None trains to the plan's last.
        stop: tells whether to stop after the step; None never does.

    Attributes:
        plan: the plan.
        folder: the same on all ranks.
        ranks: of the run.
        trainer: the model under the plan, with its optimizer and schedule.
        samples: of the training data.
        contents: what the training data holds.
        checkpoints: of the run.
        step: how many are done.
        sample: the number of the next global sample.
        peak_memory: of each rank, in bytes.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        folder: Path,
        *,
        resume: Resume = "no",
        until: int | None = None,
        stop: Stop | None = None,
    ) -> None:
        self.plan, self._stop, self.ranks = plan, stop, Ranks()
        self.folder = Path(self.ranks.first(str(folder.absolute()).encode, "train").decode())
        self.contents: tuple[Content, ...] = self._agreed_contents()
        self.trainer: Trainer = training().Trainer(plan)
        self.samples: Samples = open_samples(plan.data, seed=plan.run.seed, vocabulary=vocabulary(plan.model))
        self.step = self.sample = 0
        self.peak_memory: tuple[int, ...] = ()
        self._end = plan.run.steps if until is None else min(until, plan.run.steps)
        self._asked = False
        self._rows = data_parallel_rows(plan)
        self.checkpoints = Checkpointer(self.folder / CHECKPOINTS, keep=Keep(last=plan.run.keep))
        # One rank looks: a writer of the run that was killed may complete a checkpoint meanwhile.
        steps = json.loads(self.ranks.first(lambda: json.dumps(self.checkpoints.steps()).encode(), "train"))
        if resume == "auto" and steps:
            try:
                self._load(steps)
            except BaseException:
                self.checkpoints.close()
                raise

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.checkpoints.__exit__(kind)

    def close(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            CheckpointError: it failed on some rank; on all ranks.
        """
        self.checkpoints.close()

    def steps(self) -> Iterator[Step]:
        """Train to the plan's last step, and save: at the end, when it is stopped, and as often as the plan says."""
        every, saved = self.plan.run.checkpoint_every, self.step
        while self.step < self._end and not self._asked:
            taken = self._take_step()
            note_step("step", self.step)
            yield taken
            if every and self.step % every == 0:
                self.save()
                saved = self.step
        if saved != self.step:
            self.save()
        note_step("end", self.step)

    @property
    def finished(self) -> bool:
        """True after the plan's last step."""
        return self.step >= self.plan.run.steps

    def save(self) -> Path:
        """Save a checkpoint of the steps that are done, beside the training; return the folder that it will have."""
        trainer = self.trainer
        note_step("save", self.step)
        data = {"sample": self.sample, **self._order()}
        self.checkpoints.save(self.step, trainer.model, trainer.optimizer, schedule=trainer.schedule, data=data)
        note_step("step", self.step)
        return self.checkpoints.path(self.step)

    def _take_step(self) -> Step:
        start = time.perf_counter()
        manual_seed(self.plan.run.seed * 1_000_003 + self.step)  # so that dropout goes on where it was, too
        batch = self.plan.data.batch_size
        rows = self.samples.rows(np.arange(self.sample + self._rows.start, self.sample + self._rows.stop))
        lr = self.trainer.lr
        loss, norm = self.trainer.step(rows)
        self.step, self.sample = self.step + 1, self.sample + batch
        asked = self._stop is not None and self._stop.asked
        own = _RECORD.pack(np.nan if loss is None else loss, get_platform().devices.peak_memory(), asked)
        everyone = [_RECORD.unpack(record) for record in self.ranks.gather(own)]
        # Tensor parallel ranks have equal losses, so the mean over all that have one is that over data parallel ones.
        losses = [each for each, _, _ in everyone if not np.isnan(each)] or [np.nan]
        self.peak_memory = tuple(memory for _, memory, _ in everyone)
        self._asked = any(asked for _, _, asked in everyone)
        seconds = time.perf_counter() - start
        return Step(
            step=self.step,
            loss=sum(losses) / len(losses),
            grad_norm=norm,
            lr=lr,
            tokens_per_second=batch * self.plan.data.sequence_length / seconds,
            peak_memory=max(self.peak_memory),
            seconds=seconds,
        )

    def _order(self) -> dict[str, Any]:
        """Return what decides which sample a number is."""
        data = self.plan.data
        return {
            "run.seed": self.plan.run.seed,
            "data.sequence_length": data.sequence_length,
            "data.packing": data.packing,
            "data.weights": list(data.weights),
            "digest of the data": [content.digest for content in self.contents],
        }

    def _agreed_contents(self) -> tuple[Content, ...]:
        """Describe the training data, which all ranks have alike.

        Raises:
            DataError: ranks read different data.
        """
        own: list[Content] = []

        def read() -> bytes:
            own.extend(contents(self.plan.data))
            return json.dumps([content.digest for content in own]).encode()

        everyone = self.ranks.agree(read, "reading the data")
        other = next((rank for rank, digests in enumerate(everyone) if digests != everyone[0]), None)
        if other is not None:
            names = ", ".join(self.plan.data.paths) or "the standard library's sources"
            message = f"rank {other} reads other data than rank 0 from {names}"
            raise DataError(message, "give all machines the same files")
        return tuple(own)

    def _load(self, steps: list[int]) -> None:
        """Load the newest checkpoint that can be read.

        Raises:
            DataError: the numbers of its samples are of another order.
        """
        trainer, problem = self.trainer, None
        for step in reversed(steps):
            try:
                loaded = self.checkpoints.load(trainer.model, trainer.optimizer, schedule=trainer.schedule, step=step)
            except (CheckpointError, InvalidCheckpointError, FileNotFoundError) as error:
                problem = error
                warnings.warn(f"the checkpoint of step {step} can't be read: {error}", RuntimeWarning, stacklevel=3)
                continue
            except ValueError as error:
                fix = "go on with the plan that the run has begun with, or choose another folder with --out"
                raise OutputError(f"{self.checkpoints.path(step)} doesn't fit the plan: {error}; {fix}") from error
            own, saved = self._order(), loaded.data
            changed = [name for name in own if saved.get(name) != own[name]]
            if changed:
                texts = "; ".join(f"{name} was {saved.get(name)} and is {own[name]}" for name in changed)
                message = f"{loaded.folder} can't go on with its data, whose samples are numbered anew: {texts}"
                fix = f"set it back, or start a run elsewhere with --weights {loaded.folder / 'model.safetensors'}"
                raise DataError(message, fix)
            self.step, self.sample = loaded.step, int(saved["sample"])
            return
        fix = "take it from a backup, or choose another folder with --out"
        raise OutputError(f"{self.folder} has no checkpoint that can be read: {problem}; {fix}") from problem


def keep_lines(path: Path, steps: int) -> list[Step]:
    """Keep the first steps' lines of a metrics file, whose later steps are taken again; return them."""
    if not path.exists():
        return []
    # A process that was killed while it wrote a line has left it without its end.
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    kept = [line for line in lines if json.loads(line)["step"] <= steps]
    part = path.with_name(f".{path.name}")
    part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(part, path)
    return [Step(**json.loads(line)) for line in kept]
