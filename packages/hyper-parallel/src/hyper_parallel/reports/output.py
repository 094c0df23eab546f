"""The files of a run: its folder, tried before any rank starts, metrics.jsonl and the loss curve."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import math
import os
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_checkpoint.extend import local_folder, steps_in

METRICS, RECORD, TEXTS, CHECKPOINTS = "metrics.jsonl", "run.json", "texts.jsonl", "checkpoints"
WARNINGS = "warnings.jsonl"

CORRUPTIONS = "corruptions.jsonl"
FILES = (METRICS, RECORD, "plan.toml", "loss.png", TEXTS, WARNINGS, CORRUPTIONS, "tensorboard", "profile")
"""What a run's folder may have beside checkpoints."""


class OutputError(ValueError):
    """A folder that a run can't write to."""


def prepare_folder(out: str | os.PathLike[str] | None, *, name: str, resume: bool = False) -> Path:
    """Create a run's folder and try to write there.

    Args:
        out: the folder; None is a new `runs/<name>-<time>`.
        name: of the plan.
        resume: go on with the run that may be there.

    Raises:
        OutputError: it can't be made or written to, is a URL, or has a run that is not to go on.
    """
    folder = Path(out) if out is not None else _unused(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        local_folder(folder)
    except ValueError as error:
        raise OutputError(f"--out: {error}") from None
    if not resume and ((folder / METRICS).exists() or (folder / RECORD).exists() or steps_in(folder / CHECKPOINTS)):
        fix = "go on with it by --resume auto, or choose another folder with --out"
        if not steps_in(folder / CHECKPOINTS):
            fix += "; it has no checkpoint, so --resume auto begins anew"
        raise OutputError(f"{folder} has a run, which would be overwritten; {fix}")
    try:
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        for place in (folder, folder / CHECKPOINTS):
            trial = place / f".trial-{os.getpid()}"
            trial.write_bytes(b"")
            trial.unlink()
    except OSError as error:
        raise OutputError(
            f"the checkpoint can't be written to {folder}: {error.strerror} ({error.filename}); choose another folder "
            "with --out"
        ) from error
    return folder


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint of a run's folder, or of one of checkpoints; else the folder that is given."""
    place = folder if steps_in(folder) else folder / CHECKPOINTS
    steps = steps_in(place)
    return place / f"step-{steps[-1]:08d}" if steps else folder


def replace_text(path: Path, text: str) -> None:
    """Write a file anew, such that whoever reads it finds the old text or the new one."""
    part = path.with_name(f".{path.name}")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def weights_option(checkpoint: Path) -> str:
    """Return the option of `train` by which another run begins with the weights of a checkpoint.

    Args:
        checkpoint: its folder, which has a model or an adapter.
    """
    adapter = any(checkpoint.glob("adapter_model*.safetensors"))
    return f"--set adapter.weights={checkpoint}" if adapter else f"--weights {checkpoint}"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other runs out of a run's folder.

    Raises:
        OutputError: another run is in it.
    """
    with open(folder / ".lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for its end, or choose another folder with --out"
            raise OutputError(f"another process is training in {folder}; {fix}") from None
        except OSError:  # a file system without locks
            pass
        yield


def _unused(folder: Path) -> Path:
    """Add a number where two runs begin in the same second."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([folder], numbered) if not each.exists())


_TEXTS = ("step", "texts", "faults")


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        step: from 1.
        loss: mean over the global batch.
        grad_norm: of all gradients together, before clipping.
        lr: the learning rate that was used.
        tokens_per_second: of all ranks together, without padding.
        peak_memory: bytes, of the rank that had most.
        seconds: duration of the step.
        data_wait: seconds of them in which its batch was waited for, of the rank that waited longest.
        mfu: model FLOPs utilization: operations of the model's matrices and attention, of its forward and backward, as
            a part of what the devices could have done meanwhile. None where either isn't known.
        validation_loss: mean of a token of the validation data after the step; None where it isn't computed.
        perplexity: of that loss, where it is that of predicting tokens.
        accuracy: part of the pairs of answers whose preferred one got more; None where the objective compares none.
        margin: by how much, the mean of a pair.
        validation_accuracy: the same of the validation data.
        validation_margin: the same of the validation data.
        lowest_loss: of a rank, in a run that is monitored.
        highest_loss: the same.
        corruptions: how many silent ones were found in the step, in a run with `[sdc]`.
        faults: what was found, as text.
        texts: what the model wrote after the step, for each of `validation.prompts`.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    peak_memory: int
    seconds: float
    data_wait: float = 0.0
    mfu: float | None = None
    validation_loss: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None
    margin: float | None = None
    validation_accuracy: float | None = None
    validation_margin: float | None = None
    lowest_loss: float | None = None
    highest_loss: float | None = None
    corruptions: int | None = None
    faults: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that were trained on, without padding."""
        return round(self.tokens_per_second * self.seconds)

    def metrics(self) -> dict[str, float]:
        """Return the numbers that there are, but the step's own."""
        values = vars(self).items()
        return {name: value for name, value in values if name not in _TEXTS and value is not None}


@dataclass(frozen=True)
class Summary:
    """A finished run.

    Attributes:
        steps: optimizer steps.
        first_loss: of the first step.
        last_loss: mean of the last steps (a tenth of them, ten at most).
        tokens: that were trained on, without padding.
        seconds: all steps together.
        peak_memory: bytes, of each rank.
        folder: where the run's files are.
        checkpoint: folder of the full model, for `from_pretrained`.
        sample: text that the model, loaded back from the checkpoint, wrote; None where it can't generate.
        missed: what could not be written when all steps were done and saved, and why.
        averaged: of how many steps `last_loss` is the mean.
        files: what the run's folder has beside checkpoints.
    """

    steps: int
    first_loss: float
    last_loss: float
    tokens: int
    seconds: float
    peak_memory: tuple[int, ...]
    folder: str
    checkpoint: str
    sample: str | None
    missed: tuple[str, ...] = ()
    averaged: int = 1
    files: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together, over the whole run."""
        return self.tokens / self.seconds


def steps_at_end(steps: int) -> int:
    """Return of how many steps the loss at the end is the mean: a tenth of them, at least one and at most ten."""
    return min(10, max(1, steps // 10))


class Curve:
    """Losses of a run, in sixteen bytes a step.

    Attributes:
        steps: their numbers.
        losses: of each.
        validated: steps after which the model was validated, and the losses.
        seconds: all steps together.
        tokens: of all steps, without padding.
    """

    def __init__(self) -> None:
        self.steps, self.losses, self.seconds, self.tokens = array("q"), array("d"), 0.0, 0
        self.validated = array("q"), array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: Step) -> None:
        """Add a step."""
        self.steps.append(step.step)
        self.losses.append(step.loss)
        if step.validation_loss is not None:
            self.validated[0].append(step.step)
            self.validated[1].append(step.validation_loss)
        self.seconds += step.seconds
        self.tokens += step.tokens

    @property
    def last_loss(self) -> float:
        """The loss at the end, a mean over the last tenth of the steps: at least one, at most ten."""
        return sum(self.losses[-self.averaged :]) / self.averaged

    @property
    def averaged(self) -> int:
        """How many steps `last_loss` is the mean of."""
        return steps_at_end(len(self))


def as_json(value: Step | Summary) -> str:
    """Format as one line of JSON."""
    if not isinstance(value, Step):
        return json.dumps(dataclasses.asdict(value))
    texts = {name: each for name in ("faults", "texts") if (each := getattr(value, name))}
    return json.dumps({"step": value.step, **strict(value.metrics()), **texts}, allow_nan=False)


def strict(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics as JSON can hold them: null where one is no number or infinite.

    >>> strict({"loss": 2.0, "validation_loss": math.nan})
    {'loss': 2.0, 'validation_loss': None}
    """
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


@contextmanager
def attempt(what: str, missed: list[str]) -> Iterator[None]:
    """Let an error of what is done beside training be a note: a run whose steps are done has not failed.

    Args:
        what: is done inside.
        missed: takes the note.
    """
    try:
        yield
    except Exception as error:
        missed.append(f"{what}: {type(error).__name__}: {error}")


def draw_loss(curve: Curve, path: Path, *, title: str) -> None:
    """Draw the loss curve as a PNG.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    figure = make_figure(7, 4)
    axes = figure.add_subplot()
    axes.plot(curve.steps, curve.losses, linewidth=1.2, label="training")
    if curve.validated[0]:
        axes.plot(*curve.validated, marker="o", markersize=3, linewidth=1.2, label="validation")
        axes.legend()
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def make_figure(width: float, height: float) -> Any:
    """Make a figure of matplotlib, which needs no display.

    Args:
        width: in inches.
        height: in inches.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("curves need matplotlib: pip install 'hyper-parallel[train]'") from error
    return Figure(figsize=(width, height), layout="constrained")
