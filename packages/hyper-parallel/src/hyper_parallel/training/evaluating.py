"""Evaluation: the loss on data that a model is not trained on, and the texts that it writes while it is trained."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint import Checkpointer
from hp_checkpoint.extend import Ranks, summary
from hp_plan import ParallelPlan
from hp_plan.extend import data_parallel_rows, positions, vocabulary
from hyper_parallel.data import (
    IGNORED,
    DataError,
    Rows,
    Samples,
    describe_cuts,
    find_files,
    has_tokens,
    open_data,
    open_samples,
)
from hyper_parallel.data.documents import text_files
from hyper_parallel.data.examples import Examples, chat_of
from hyper_parallel.data.opening import validation_data
from hyper_parallel.data.tokenization.tokenized import tokenizer_of, with_tokens
from hyper_parallel.data.tokenization.tokens import Tokenizer, read_tokenizer
from hyper_parallel.port import Trainer, training
from hyper_parallel.reports.output import OutputError, Step, newest_checkpoint


class Validation:
    """The same samples, each time it is called.

    Args:
        plan: with `[validation]`.
        rows: this rank's slice of a batch.
        vocabulary: of the model; tokens beyond it are refused. None doesn't look.
    """

    def __init__(self, plan: ParallelPlan, rows: slice, *, vocabulary: int | None) -> None:
        # Another seed of the run is no other data to compare it by.
        self._samples = open_samples(validation_data(plan), seed=0, vocabulary=vocabulary)
        self._size, self._batches, self._rows = plan.data.batch_size, plan.validation.batches, rows

    def values(self, trainer: Trainer, ranks: Ranks) -> list[float]:
        """Return the mean loss of a token, or pair, over all samples, and what is measured; every rank calls it.

        Args:
            trainer: whose model is validated; it, the random numbers and the training data stay as they are.
            ranks: of the run.

        Raises:
            DataError: no sample has a token to predict; on all ranks.
        """
        return mean_values(trainer, map(self._batch, range(self._batches)), ranks)

    def _batch(self, number: int) -> Rows:
        first = number * self._size
        return self._samples.rows(np.arange(first + self._rows.start, first + self._rows.stop))


def mean_values(trainer: Trainer, batches: Iterable[Rows], ranks: Ranks) -> list[float]:
    """Return the mean loss of a token, or pair, over batches, and what is measured; every rank calls it.

    Args:
        trainer: whose model is asked.
        batches: this rank's rows of each.
        ranks: of the run.

    Raises:
        DataError: no sample has a token to predict; on all ranks.
    """
    own = np.zeros(2 + len(trainer.measures))
    for rows in batches:
        values, count = trainer.evaluate(rows)
        own += np.array([1.0, *values]) * count
    everyone = np.array([np.frombuffer(record) for record in ranks.gather(own.tobytes())])
    counted, *totals = (math.fsum(column) for column in everyone.T)
    if not counted:
        message = "the samples to validate on have no token to predict: each document of them is one token long"
        raise DataError(message, "give longer documents, or make validation.batches larger")
    return [total / counted for total in totals]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What a model is worth on some data.

    Attributes:
        loss: mean of a token that counts, or of a pair of answers.
        perplexity: of that loss, where it is that of predicting tokens.
        accuracy: part of the pairs whose preferred answer got more; None where the objective compares none.
        margin: by how much, the mean of a pair.
        samples: that were evaluated.
        left_out: that fill no batch, of a model whose loss can't leave out labels.
        checkpoint: the folder of the weights; None for those that the plan begins with.
        cut: says how many examples `data.truncation` has shortened or left out; empty if none.
    """

    loss: float
    perplexity: float | None
    accuracy: float | None
    margin: float | None
    samples: int
    left_out: int
    checkpoint: str | None
    cut: str


def check_checkpoint(folder: Path) -> Path:
    """Return the folder of a checkpoint of a run: the newest one of a run's folder.

    Raises:
        OutputError: it is none.
    """
    newest = newest_checkpoint(folder)
    if not newest.name.startswith("step-") or not (newest / "manifest.json").is_file():
        fix = "name a run's folder, or one of its checkpoints; a model of transformers is evaluated by --set model.path"
        raise OutputError(f"{folder} is no checkpoint of a run: {fix}")
    return newest


def check_parts(plan: ParallelPlan, checkpoint: Path) -> None:
    """Check that a checkpoint has what the plan loads: the adapter of a plan with one, else the model.

    Raises:
        OutputError: it has the other, or can't be read.
    """
    try:
        content: dict[str, Any] = summary(checkpoint)
    except ValueError as error:
        raise OutputError(f"{checkpoint} can't be read: {error}") from error
    parts = content["parts"]
    if plan.adapter.kind is not None and "adapter_model" not in parts:
        fix = f"evaluate it by --set model.path={checkpoint} in its place: an adapter that begins adds nothing"
        raise OutputError(f"{checkpoint} has a whole model, and the plan loads an adapter ([adapter] kind); {fix}")
    if plan.adapter.kind is None and "model" not in parts and "adapter_model" in parts:
        command = f"hyper-parallel checkpoint merge {checkpoint} TARGET"
        fix = f"evaluate it with the plan that it was trained by, or, after {command}, by --set model.path=TARGET"
        raise OutputError(f"{checkpoint} has an adapter alone, and the plan has no [adapter] kind; {fix}")


def evaluate(plan: ParallelPlan, checkpoint: Path | None, *, batches: int | None = None) -> Evaluation:
    """Evaluate the plan's model on its data. Every rank calls it.

    Text becomes tokens in a temporary folder of rank 0's machine: ranks of other machines take token files.

    Args:
        plan: whose data is taken in its order, each sample once.
        checkpoint: its folder, of any mesh; None takes the weights that the plan begins with.
        batches: so many, at most; None takes all.

    Raises:
        OutputError: the checkpoint doesn't fit the plan.
        DataError: the data can't be read, or has no token to predict.
    """
    ranks = Ranks()
    with ExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory()) if ranks.rank == 0 else ""
        folder = Path(ranks.first(own.encode, "evaluate").decode())
        plan = with_tokens(plan, folder, ranks)
        data = open_data(plan.data)
        trainer = training().Trainer(plan)
        if checkpoint is not None:
            _load(trainer, checkpoint)
        samples = open_samples(plan.data, seed=0, vocabulary=vocabulary(plan.model), data=data)
        size, count = plan.data.batch_size, len(samples)
        taken = count if batches is None else min(count, batches * size)
        left_out = 0 if plan.model.of_transformers else taken % size
        rows = _rows(samples, taken - left_out, size, data_parallel_rows(plan), plan.data.width)
        loss, *measured = mean_values(trainer, rows, ranks)
        ranks.gather(b" ")  # the folder of the tokens stays until all have read it
    named = dict(zip(trainer.measures, measured, strict=True))
    return Evaluation(
        loss=loss,
        perplexity=None if plan.objective.is_own else math.exp(min(loss, 700.0)),
        accuracy=named.get("accuracy"),
        margin=named.get("margin"),
        samples=taken - left_out,
        left_out=left_out,
        checkpoint=None if checkpoint is None else str(checkpoint),
        cut=describe_cuts(plan.data, data).removeprefix(", "),
    )


def _load(trainer: Trainer, folder: Path) -> None:
    step = int(folder.name.removeprefix("step-"))
    with Checkpointer(folder.parent, adapter=trainer.adapter) as checkpoints:
        try:
            checkpoints.load(trainer.model, step=step)
        except ValueError as error:
            fix = "evaluate it with the plan that it was trained by"
            raise OutputError(f"{folder} doesn't fit the plan: {error}; {fix}") from error


def _rows(samples: Samples, count: int, size: int, own: slice, width: int) -> Iterator[Rows]:
    """Yield this rank's rows of each batch; what the last one lacks is filled with rows that have no label."""
    for first in range(0, count, size):
        numbers = np.arange(first + own.start, first + own.stop)
        rows = samples.rows(np.minimum(numbers, count - 1))
        rows.labels[np.repeat(numbers >= count, width)] = IGNORED
        yield rows


PROMPT = "def "  # what a model of text goes on with; plans without data train on Python's own sources


class Prompts:
    """The prompts of a plan, and a model that goes on with them.

    Args:
        plan: as it was given, with its text and its tokenizer.
        trainer: whose model writes.
    """

    def __init__(self, plan: ParallelPlan, trainer: Trainer) -> None:
        self._trainer, self._count = trainer, plan.validation.prompt_tokens
        config = getattr(trainer.model, "config", None)
        self._tokenizer = check_prompts(plan, config)
        prompts = plan.validation.prompts
        self._prompts = [(text, prompt_tokens(plan, self._tokenizer, text)) for text in prompts]
        self._between = "" if plan.data.format == "text" else "\n"

    def texts(self) -> tuple[str, ...]:
        """Return each prompt with what the model writes after it; every rank calls it.

        The model, the random numbers and the training data stay as they are.
        """
        decode, write = self._tokenizer.decode, self._trainer.write
        return tuple(prompt + self._between + decode(write(tokens, self._count)) for prompt, tokens in self._prompts)


def prompt_tokens(plan: ParallelPlan, tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a prompt as the plan's data has them: of messages by the chat template.

    Args:
        plan: the plan.
        tokenizer: of its data.
        text: of the prompt.

    Raises:
        DataError: the tokenizer has no chat template.
    """
    if plan.data.format == "messages":
        return chat_of(tokenizer).asked(text)
    return tokenizer.encode([text])[0] if plan.data.format == "text" else tokenizer.encode_prompt(text)


def first_prompt(plan: ParallelPlan, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that a model goes on with to show what it has learned.

    Args:
        plan: the plan; of examples to fine-tune on it is the prompt of the first one.
        tokenizer: of its data.
    """
    if plan.data.format == "text":
        return tokenizer.encode([PROMPT])[0]
    example = next(Examples(plan.data.format, tokenizer).read(next(iter(text_files(find_files(plan.data.paths))))))
    return example.tokens[: example.trained.index(True)]


def most_tokens(config: Any, prompt: Sequence[int], wanted: int) -> int:
    """Return how many tokens a model writes after a prompt: those wanted, but for those beyond its positions.

    Args:
        config: of the model.
        prompt: the tokens before.
        wanted: at most so many.
    """
    limit = positions(config)  # where positions are learned, there are no others
    return wanted if limit is None else max(0, min(wanted, limit - len(prompt)))


def check_prompts(plan: ParallelPlan, config: Any = None) -> Tokenizer:
    """Return the tokenizer of a plan's prompts.

    Args:
        plan: the plan.
        config: of the model; None where it has none, or is not known.

    Raises:
        DataError: it can't be told, a prompt has no tokens, or what follows one goes beyond the model's positions.
    """
    tokenizer = tokenizer_of(plan)
    if tokenizer is None and has_tokens(plan.data):
        message = f"{plan.data.paths[0]} doesn't say which tokenizer has written it"
        raise DataError(message, "leave the prompts out, or give a [model] path that has the tokenizer")
    tokenizer = tokenizer or read_tokenizer(None)
    for prompt in plan.validation.prompts:
        tokens = prompt_tokens(plan, tokenizer, prompt)
        if not tokens:
            raise DataError(f"the prompt {prompt!r} has no tokens", "write at least a letter")
        wanted = plan.validation.prompt_tokens
        possible = most_tokens(config, tokens, wanted)
        if possible < wanted:
            message = (
                f"the prompt {prompt!r} has {len(tokens)} tokens, and {wanted} more go beyond the model's"
                f" {positions(config)} positions"
            )
            shorter = f"make validation.prompt_tokens at most {possible}" if possible else "make the prompt shorter"
            raise DataError(message, f"{shorter}, or raise max_position_embeddings in [model.overrides]")
    return tokenizer


def write_texts(path: Path, step: Step) -> None:
    """Add a step's texts to a file, a line of JSON each."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps({"step": step.step, "text": text}, ensure_ascii=False) + "\n" for text in step.texts)
