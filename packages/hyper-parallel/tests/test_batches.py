"""Batches that are read ahead."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.data import DataError, Rows
from hyper_parallel.data.samples import Batches


class Numbers:
    """Samples that hold their own numbers; one of them can't be read."""

    def __init__(self, wrong=None):
        self.wrong, self.asked = wrong, []

    def rows(self, numbers):
        self.asked.append(len(numbers))
        if self.wrong in numbers:
            raise DataError(f"sample {self.wrong} is wrong", "leave it out")
        tokens = numbers[:, None] + np.zeros((1, 4), np.int64)
        return Rows(tokens, tokens, tokens, tokens[:, 0])


@pytest.mark.parametrize("length", [4, 1 << 15, 1 << 20])
def test_each_batch_has_this_ranks_samples_in_order(length):
    samples = Numbers()
    batches = Batches(samples, slice(2, 4), 8, sequence_length=length)
    for step in [*range(80), 3, 4, 5]:
        batch = batches.take(5 + 8 * step)
        assert batch.rows.tokens[:, 0].tolist() == [5 + 8 * step + 2, 5 + 8 * step + 3]
        assert batch.wait >= 0
    batches.close()
    assert max(samples.asked) == {4: 64, 1 << 15: 2, 1 << 20: 2}[length]


def test_a_sample_that_can_not_be_read_is_an_error_of_its_own_batch():
    batches = Batches(Numbers(wrong=21), slice(0, 4), 4, sequence_length=4)
    for step in range(5):
        assert batches.take(4 * step).rows.tokens[0, 0] == 4 * step
    with pytest.raises(DataError, match="sample 21 is wrong"):
        batches.take(20)
    batches.close()
