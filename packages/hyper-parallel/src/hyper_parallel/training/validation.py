"""Validation: the loss on data that a run is not trained on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from hp_checkpoint.extend import Ranks
from hp_plan import DataSection, ParallelPlan
from hyper_parallel.data import DataError, Rows, open_samples
from hyper_parallel.port import Trainer


def validation_data(plan: ParallelPlan) -> DataSection:
    """Return the plan's data section with the data to validate on."""
    return dataclasses.replace(plan.data, paths=plan.validation.paths, weights=(), shuffle=True)


def check_validation(plan: ParallelPlan) -> None:
    """Check that there are as many samples as the plan validates on.

    Raises:
        DataError: there are fewer.
    """
    wanted = plan.validation.batches * plan.data.batch_size
    found = len(open_samples(validation_data(plan), seed=0))
    if found < wanted:
        message = (
            f"the data to validate on has {found} samples, but {plan.validation.batches} batches of data.batch_size = "
            f"{plan.data.batch_size} take {wanted}"
        )
        possible = found // plan.data.batch_size
        fix = f"make validation.batches at most {possible}" if possible else "make data.batch_size smaller"
        raise DataError(message, f"give more data, or {fix}")


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
