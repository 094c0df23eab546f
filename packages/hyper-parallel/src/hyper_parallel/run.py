"""A training run: its steps, those that are profiled, its checkpoints, and how it goes on after an end."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint import Checkpointer, CheckpointError, InvalidCheckpointError, Keep
from hp_checkpoint.extend import Copies, LastWords, Ranks, steps_in
from hp_offload.extend import BudgetError
from hp_plan import CorruptionError, Diagnostic, ParallelPlan, PlanError
from hp_plan.extend import ReadingsFile, data_parallel_rows, decode, earliest, encode, vocabulary
from hp_platform import LostRankError, get_platform, manual_seed
from hp_platform.extend import note_step
from hyper_parallel.data import (
    Content,
    DataError,
    Opened,
    Rows,
    Samples,
    contents,
    describe_cuts,
    open_data,
    open_samples,
)
from hyper_parallel.data.samples import Batches
from hyper_parallel.data.tokenization.tokenized import agreed_files, with_tokens
from hyper_parallel.launching.launch import Resume
from hyper_parallel.port import (
    Pending,
    Trainer,
    gathering,
    shortages,
    training,
)
from hyper_parallel.reports.output import CHECKPOINTS, OutputError, Step, attempt
from hyper_parallel.reports.run_metadata import known_peak
from hyper_parallel.supervision.run_end import (
    DivergedError,
    MemoryShortage,
    Stop,
    check_finite,
    over_budget,
    report_shortage,
    write_shortage,
)
from hyper_parallel.training.evaluating import Prompts, Validation
from hyper_parallel.training.keeping import Launched, kept, take
from hyper_parallel.training.profiles import Profile
from hyper_parallel.training.resuming import changes, check_held, hyperparameters, next_sample, order, set_aside
from hyper_parallel.training.sentinel import Sentinel

_FOUND_ALIKE = (DivergedError, CorruptionError)
_CORRUPT = 8
"""The column of a step's numbers that says whether a rank has found copies that differ."""

_GO_ON = "go on with the plan that the run has begun with, or choose another folder with --out"


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
            none; "no" starts. The batch size may be another one, the order of the samples may not; with "new-data" it
            may, and the run goes on at the first sample.
        until: stop after this step; None trains to the plan's last.
        stop: tells whether to stop after the step; None never does.
        tell: called with what became of the last finished step when the run fails, on one rank that is left.
        copies: of this rank's state, kept as `[recovery]` says; where all ranks have one of a step the run goes on from
            the newest, whatever `resume` says. A run that fails saves nothing then: its copies are there.
        newest: go on from no step after it: copies of later ones are dropped, and checkpoints set aside in folders
            `doubted-step-N`. Default None: from any.
        proved: the run's first step has been done by other processes, with what `[sdc]` checks in it. Default False.

    Attributes:
        plan: the plan, its data in tokens.
        folder: the same on all ranks.
        ranks: of the run.
        trainer: the model under the plan, with its optimizer and schedule.
        samples: of the training data.
        contents: what the training data holds.
        cut: says how many examples `data.truncation` has shortened, and how many it has left out; empty if none.
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
        tell: Callable[[str], object] | None = None,
        copies: Copies | None = None,
        newest: int | None = None,
        proved: bool = False,
    ) -> None:
        self._stop, self.ranks = stop, Ranks()
        self.folder = Path(self.ranks.first(str(folder.absolute()).encode, "train").decode())
        given = plan
        self.plan = plan = with_tokens(plan, self.folder, self.ranks)
        self.contents, data = self._agreed_contents()
        self._copies, self._recovers = copies, copies is not None
        if plan.sdc.on_fault == "replace" and copies is None:
            message = "got 'replace', but this run keeps no copies that a spare process could go on from"
            raise PlanError(
                [Diagnostic("sdc.on_fault", message, "hyper-parallel train --recover; or make it 'restore'")]
            )
        if newest is not None and copies is not None:
            copies.forget(newest)
            self.ranks.first(lambda: set_aside(self.folder / CHECKPOINTS, newest), "train")
        held = [] if copies is None else copies.steps(self.ranks)
        copied = max(set.intersection(*held), default=None) if held else None
        # One rank looks: a writer of the run that was killed may complete a checkpoint meanwhile.
        steps = json.loads(self.ranks.first(lambda: json.dumps(steps_in(self.folder / CHECKPOINTS)).encode(), "train"))
        if copied is not None and steps and steps[-1] > copied:
            copied = None  # copies are kept less often, or could not be kept any more
        self.trainer: Trainer = training().Trainer(plan, weights=copied is None)
        self._rows = data_parallel_rows(plan)
        known = vocabulary(plan.model)
        self.samples: Samples = open_samples(plan.data, seed=plan.run.seed, vocabulary=known, data=data)
        self.cut = describe_cuts(plan.data, data)
        length = plan.data.sequence_length
        self._batches = Batches(self.samples, self._rows, plan.data.batch_size, sequence_length=length)
        self._validation = Validation(plan, self._rows, vocabulary=known) if plan.validation.paths else None
        self._prompts = Prompts(given, self.trainer) if plan.validation.prompts else None
        self.missed: list[str] = []
        self._profile = Profile(plan, self.trainer, self.folder, rank=self.ranks.rank)
        self._numbers = gathering().Numbers
        self._peak, self._counted = self._all_peaks(), None
        self.step = self.sample = self._clean = 0
        self.peak_memory: tuple[int, ...] = ()
        self._end = plan.run.steps if until is None else min(until, plan.run.steps)
        self._asked = self._updating = False
        self._losses: dict[int, float] = {}  # of the newest step that was validated
        self._words: LastWords | None = None
        self._tell = tell
        beside = agreed_files(given, self.ranks)
        keep, layout = Keep(last=plan.run.keep, best=plan.run.keep_best or None), plan.run.checkpoint_layout
        self.checkpoints = Checkpointer(
            self.folder / CHECKPOINTS, keep=keep, layout=layout, beside=beside, adapter=self.trainer.adapter
        )
        self._again: Launched | None = None
        if copied is None and not steps and any(held):
            check_held(held, plan.recovery.every)
        if copied is not None or resume != "no" and steps:
            try:
                if copies is not None and copied is not None:
                    self._restore(copies, copied)
                else:
                    self._load(steps, new_data=resume == "new-data")
            except BaseException as error:  # the others may wait for this rank: it waits for nothing
                self._batches.close()
                self.checkpoints.__exit__(type(error))
                raise
        self._saved = self.step if copied is None else max((each for each in steps if each <= copied), default=0)
        on = plan.sdc.replicas or plan.sdc.replay_every
        ranks, folder = self.ranks, self.folder
        proved = proved or copied is not None
        options: dict[str, Any] = {"rows_of": self._rows_of, "clean": self._clean, "proved": proved}
        self._sentinel = Sentinel(plan, self.trainer, ranks, folder, **options) if on else None
        self._readings: ReadingsFile | None = None
        if self.trainer.capture is not None:
            layout = self.trainer.capture.layout()
            self._readings = ReadingsFile(self.folder, self.ranks.rank, layout, step=self.step)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, _FOUND_ALIKE) and not self._recovers:
                self._say_last_words(error)
            self._batches.close()
            if self._readings is not None:
                self._readings.close()
            if kind is None:
                self._end_profile()
        finally:
            # All ranks find alike what these errors say, so they wait for the save that they began together.
            self.checkpoints.__exit__(None if isinstance(error, _FOUND_ALIKE) else kind)

    def close(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            CheckpointError: it failed on some rank; on all ranks.
        """
        self._batches.close()
        self.checkpoints.close()

    def _end_profile(self) -> None:
        with attempt("the profile", self.missed):
            self._profile.close()

    def steps(self) -> Iterator[Step]:
        """Train to the plan's last step, and save: at the end, when it is stopped, and as often as the plan says.

        A step is yielded when the next one has been launched, so that no device waits for the host: `step` is ahead by
        one then. Before a checkpoint or a validation, and at the end, all steps have been yielded.
        """
        every, last, again = self.plan.run.checkpoint_every, None, self._again
        while again is not None or (self.step < self._end and not self._asked):
            if again is not None:
                launched, again = again, None
            else:
                launched = yield from self._next(last)
            last, validates = launched, self._validates()
            saves = bool(every) and self.step % every == 0 and self._saved != self.step
            if saves or validates:
                yield self._finished(last, validate=validates)
                note_step("step", self.step)
                last = None
            if saves:
                self.save()
        self._end_profile()
        if last is not None:
            yield self._finished(last)
        if self._saved != self.step:
            self.save()
        note_step("end", self.step)

    def _next(self, last: Launched | None) -> Generator[Step, None, Launched]:
        """Launch a step, and yield the one before it."""
        try:
            launched = self._launch(last)
        except Exception:
            if last is not None and not self._recovers and last.numbers.ready():  # a whole step, which nobody repeats
                if self._settled_alone(last):
                    yield self._finished(last)
            raise
        note_step("step", self.step)
        if self._words is None and not self._recovers:  # now the optimizer has its states
            within, trainer = self.plan.run.stop_within, self.trainer
            self._words = LastWords(self.checkpoints, trainer.model, trainer.optimizer, within=within)
        if last is not None:
            yield self._finished(last)
        return launched

    @property
    def origin(self) -> str:
        """What the run goes on from: "a copy", "a checkpoint" or "the start"."""
        return "a copy" if self._again is not None else "a checkpoint" if self.step else "the start"

    @property
    def written(self) -> int:
        """How many steps of those that are done have been yielded when a run goes on."""
        return self.step - (self._again is not None)

    @property
    def finished(self) -> bool:
        """True after the plan's last step."""
        return self.step >= self.plan.run.steps

    def save(self) -> Path:
        """Save a checkpoint of the steps that are done, beside the training; return the folder that it will have."""
        trainer, data = self.trainer, self._position(self.trainer.experts())
        metric = self._losses.get(self.step, math.nan if self.plan.run.keep_best else None)
        options: dict[str, Any] = {"schedule": trainer.schedule, "data": data, "metric": metric}
        note_step("save", self.step)
        self.checkpoints.save(self.step, trainer.model, trainer.optimizer, **options)
        self._saved = self.step
        note_step("step", self.step)
        return self.checkpoints.path(self.step)

    def _all_peaks(self) -> float | None:
        """Return the operations a second of all devices together; None where it isn't known."""
        plan, devices = self.plan, get_platform().devices
        own = plan.metrics.peak_flops or known_peak(devices.name(), plan.fsdp.param_dtype or plan.run.dtype)
        return None if own is None else own * self.ranks.size

    def _validates(self) -> bool:
        at = self.step % self.plan.validation.every == 0 or self.finished
        return at and (self._validation is not None or self._prompts is not None)

    def _launch(self, last: Launched | None) -> Launched:
        """Launch a step, and end the last one; nothing that the device computes is waited for."""
        begun = time.perf_counter()
        if last is not None and last.ended is None:
            last.ended = begun
        try:
            with self._profile.around(self.step + 1):
                return self._computed(begun, last)
        except BudgetError as error:
            raise PlanError([over_budget(self.plan, error)]) from error
        except Exception as error:
            if not shortages().ran_out(error):
                raise
            raise MemoryShortage(self._shortage(error)) from error

    def _shortage(self, error: BaseException) -> str:
        """Report and write down that memory ran out."""
        own, trainer = shortages(), self.trainer
        place, rank = own.place(error, trainer.model), self.ranks.rank
        storages = own.storages(error, trainer.model, trainer.optimizer)
        text = report_shortage(error, self.plan, rank=rank, step=self.step + 1, place=place, storages=storages)
        write_shortage(self.folder, rank, text)
        return text

    def _computed(self, begun: float, before: Launched | None) -> Launched:
        batch, lr = self._batches.take(self.sample), self.trainer.lr
        capture = self.trainer.capture
        if self._sentinel is not None:
            loss, norm = self._sentinel.gradients(self.step + 1, batch.rows, self._begin)
        else:
            self._begin()
            loss, norm = self.trainer.gradients(batch.rows)
        if capture is not None and not math.isfinite(float(norm)):  # alike on all ranks
            self._write(capture.take(loss), self.step + 1)
            self._look_for_origin(batch.rows, loss, float(norm))
        self._updating = True
        self.trainer.update()
        corrupt = 0 if self._sentinel is None else self._sentinel.compare(self.step + 1)
        self.step, self.sample = self.step + 1, self.sample + self.plan.data.batch_size
        self._updating = False
        asked = self._stop is not None and self._stop.asked
        memory = get_platform().devices.peak_memory()
        last = loss is not None  # this rank has the model's last stage
        operations = self._operations(batch.rows)
        tokens = batch.rows.sizes.sum()
        own = [loss if last else np.nan, norm, memory, batch.wait, operations, tokens, asked, last, corrupt]
        own += () if self.trainer.measured is None else self.trainer.measured
        readings = None if capture is None else capture.take(loss)
        launched = Launched(self.step, lr, self._numbers(own), begun, readings=readings)
        if self._copies is not None and self.step % self.plan.recovery.every == 0:
            self._keep(self._copies, launched, before)
        return launched

    def _keep(self, copies: Copies, launched: Launched, before: Launched | None) -> None:
        """Keep a copy of the step: what the next one rests on, and the numbers of this one, which is yielded later."""
        self._write(launched.readings, self.step)
        launched.readings = None
        if before is not None:
            self._settled(before)  # so that its line has its own
        self._settled(launched)  # before the copy: a state that can't be mended is not kept
        state = kept(self.trainer, launched, self._position(self.trainer.experts()))
        try:
            copies.keep(self.step, state, checked=0 if self._sentinel is None else self._sentinel.clean)
        except OSError as error:  # the run needs none to go on
            self._copies = None
            text = f"no copies are kept from step {self.step} on: {error}; a fault costs the steps since the newest"
            warnings.warn(f"{text} checkpoint", RuntimeWarning, stacklevel=2)

    def _settled(self, launched: Launched) -> tuple[str, ...]:
        """Return the corruption that was found in a step, which ranks share and mend once; see `Sentinel.settle`."""
        if launched.faults is None:
            found = self._sentinel is not None and bool(launched.numbers.read()[:, _CORRUPT].any())
            launched.faults = () if self._sentinel is None else self._sentinel.settle(launched.step, found)
        return launched.faults

    def _settled_alone(self, launched: Launched) -> bool:
        """Settle a step without the other ranks, which may be gone; tell whether its state is right."""
        if launched.faults is None and self._sentinel is not None:
            if self._sentinel.spoiled:
                return False
            launched.faults = self._sentinel.settle_alone(launched.step)
        return True

    def _restore(self, copies: Copies, step: int) -> None:
        """Go on from a copy, as if its step had just been launched."""
        self._again, data = take(self.trainer, step, copies.restore(step))
        self.step, self.sample, self._clean = step, data["sample"], data.get("checked", 0)
        self.trainer.go_on(step, data["experts"])

    def _begin(self) -> None:
        """Begin to compute a step's gradients, maybe once more: dropout goes on where it was, too."""
        self._seed()
        if self.trainer.capture is not None:
            self.trainer.capture.begin(self.step + 1)

    def _seed(self) -> None:
        manual_seed((self.plan.run.seed * 1_000_003 + self.step) % 2**63)

    def _rows_of(self, part: int) -> Rows:
        """Return the samples of a part of the batch of the step under way."""
        count = self._rows.stop - self._rows.start
        return self.samples.rows(np.arange(count) + self.sample + part * count)

    def _write(self, readings: Pending | None, step: int) -> None:
        if readings is not None and self._readings is not None:
            self._readings.write(readings.records(step, self._readings.number))

    def _look_for_origin(self, rows: Rows, loss: Any, norm: float) -> None:
        """Run the step again, whose update was not taken, to say where its first NaN or infinity was born."""
        self._seed()
        origins = self.ranks.agree(lambda: encode(self.trainer.origin(rows)), "looking for a NaN")
        own = str(0.0 if loss is None else float(loss)).encode()
        losses = map(float, self.ranks.agree(lambda: own, "sharing the loss"))
        saved = str(self.checkpoints.path(self._saved)) if self._saved else None
        check_finite(self.step + 1, sum(losses), norm, saved=saved, origin=earliest([*map(decode, origins)]))

    def _operations(self, rows: Rows) -> float:
        """Count the operations of a rank's samples; those of whole samples are counted once."""
        operations = self.trainer.operations
        if self._peak is None or operations is None:
            return np.nan
        if self.plan.data.packing or self._counted is None:
            self._counted = operations.training(rows.positions)
        return self._counted

    def _finished(self, launched: Launched, *, validate: bool = False) -> Step:
        """Wait for the numbers of a step."""
        numbers = launched.numbers.read()
        self._write(launched.readings, launched.step)
        losses, norms, memory, waits, operations, tokens, asked, last, _, *measured = numbers.T
        seconds = (launched.ended or time.perf_counter()) - launched.begun
        # Tensor parallel ranks have equal losses, so the mean over all that have one is that over data parallel ones.
        faults = self._settled(launched)
        losses = losses[last > 0].tolist()
        mean, norm = sum(losses) / len(losses), float(norms[0])
        saved = str(self.checkpoints.path(self._saved)) if self._saved else None
        check_finite(launched.step, mean, norm, saved=saved)
        self.peak_memory = tuple(map(int, memory))
        self._asked = bool(asked.any())
        parts = self.plan.data.batch_size // (self._rows.stop - self._rows.start)  # each on as many ranks
        counted = float(operations.mean()) * parts
        names = self.trainer.measures
        more: dict[str, Any] = {name: float(column.mean()) for name, column in zip(names, measured, strict=True)}
        if self._sentinel is not None:
            more |= {"corruptions": len(faults), "faults": faults}
        if self._readings is not None:
            more |= {"lowest_loss": min(losses), "highest_loss": max(losses)}
        loss, texts = None, ()
        if validate:
            note_step("validate", launched.step)
            if self._validation is not None:
                loss, *others = self._validation.values(self.trainer, self.ranks)
                more |= {f"validation_{name}": value for name, value in zip(names, others, strict=True)}
                self._losses = {launched.step: loss}
            texts = () if self._prompts is None else self._prompts.texts()
        return Step(
            step=launched.step,
            loss=mean,
            grad_norm=norm,
            lr=launched.lr,
            tokens_per_second=round(float(tokens.mean()) * parts) / seconds,
            peak_memory=max(self.peak_memory),
            seconds=seconds,
            data_wait=float(waits.max()),
            mfu=None if self._peak is None or np.isnan(counted) else counted / seconds / self._peak,
            validation_loss=loss,
            perplexity=None if loss is None or self.plan.objective.is_own else math.exp(min(loss, 700.0)),
            texts=texts,
            **more,
        )

    def _say_last_words(self, error: Exception) -> None:
        """Save the newest finished step with the ranks that are left; say on the first of them what came of it."""
        if self._words is None:
            return
        spoiled = self._sentinel is not None and self._sentinel.spoiled  # nothing is saved of what is known to be wrong
        try:
            text = self._words.save(
                None if self._updating or spoiled else self.step,
                saved=self._saved,
                lost=error.ranks if isinstance(error, LostRankError) else (),
                schedule=self.trainer.schedule,
                data=self._position(self.trainer.experts(loads=False)),  # others may be gone
            )
        except Exception as failure:  # what the run has failed with is told, not this
            text = f"no last words of rank {self.ranks.rank}: {failure}"
        if text and self._tell is not None:
            self._tell(text)

    def _position(self, experts: Mapping[str, Any] | None) -> dict[str, Any]:
        checked = {} if self._sentinel is None else {"checked": self._sentinel.clean}
        return {"sample": self.sample, "experts": experts, **checked, **order(self.plan, self.contents)}

    def _agreed_contents(self) -> tuple[tuple[Content, ...], Opened]:
        """Open and describe the training data, which all ranks have alike.

        Raises:
            DataError: ranks read different data.
        """
        own: list[Content] = []
        data: list[Opened] = []

        def read() -> bytes:
            data.append(open_data(self.plan.data))
            own.extend(contents(self.plan.data, data[0]))
            return json.dumps([content.digest for content in own]).encode()

        everyone = self.ranks.agree(read, "reading the data")
        other = next((rank for rank, digests in enumerate(everyone) if digests != everyone[0]), None)
        if other is not None:
            names = ", ".join(self.plan.data.paths) or "the standard library's sources"
            message = f"rank {other} reads other data than rank 0 from {names}"
            raise DataError(message, "give all machines the same files")
        return tuple(own), data[0]

    def _load(self, steps: list[int], *, new_data: bool) -> None:
        """Load the newest checkpoint that can be read.

        Args:
            steps: those that have a checkpoint.
            new_data: samples may be of another order, and begin at the first then.

        Raises:
            DataError: the numbers of its samples are of another order.
            OutputError: none can be read, or it is of another model or optimizer.
        """
        trainer, planned, problem = self.trainer, hyperparameters(self.trainer.optimizer), None
        for step in reversed(steps):
            try:
                loaded = self.checkpoints.load(trainer.model, trainer.optimizer, schedule=trainer.schedule, step=step)
            except (CheckpointError, InvalidCheckpointError, FileNotFoundError) as error:
                problem = error
                if self.ranks.rank == 0:  # all have found the same
                    text = f"the checkpoint of step {step} can't be read: {error}"
                    warnings.warn(text, RuntimeWarning, stacklevel=3)
                continue
            except ValueError as error:
                raise OutputError(f"{self.checkpoints.path(step)} doesn't fit the plan: {error}; {_GO_ON}") from error
            if texts := changes(planned, hyperparameters(trainer.optimizer)):
                message = f"the optimizer's {'; '.join(texts)}"
                raise OutputError(f"{loaded.folder} doesn't fit the plan: {message}; {_GO_ON}")
            saved = loaded.data
            own = order(self.plan, self.contents)
            self.sample = next_sample(own, saved, loaded.folder, new_data=new_data)
            self.step, self._clean = loaded.step, saved.get("checked", 0)
            trainer.go_on(loaded.step, saved.get("experts"))
            return
        fix = "take it from a backup, or choose another folder with --out"
        raise OutputError(f"{self.folder} has no checkpoint that can be read: {problem}; {fix}") from problem
