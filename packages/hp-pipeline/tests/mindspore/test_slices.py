"""Sequences in slices on MindSpore, against one process that takes them whole."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, _no_grad, nn, ops
from pipeline_cells import WIDTH, Linear

import hp_pipeline
from hp_pipeline import PipelineError, PipelineStage, SequenceState
from hp_platform import get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.device

TOKENS = 6


class Part(nn.Cell):
    """Causal attention; in the last part with a loss behind it."""

    def __init__(self, index, last):
        super().__init__()
        generator = np.random.default_rng(index)
        self.query, self.key = Linear(generator, WIDTH, WIDTH), Linear(generator, WIDTH, WIDTH)
        self.out, self.last = Linear(generator, WIDTH, WIDTH), last

    def construct(self, x, target=None, seq_state=None):
        state = seq_state or SequenceState()
        key = self.joined(state, self.key(x))
        scores = ops.matmul(self.query(x), key.swapaxes(1, 2))
        rows, columns = scores.shape[1:]
        seen = np.tril(np.ones((rows, columns)), columns - rows)
        mixed = ops.matmul(ops.softmax(scores + Tensor((seen - 1) * 1e9), -1), key)
        x = x + self.out(mixed)
        return ((x - target) * (x - target)).mean() if self.last else x

    def joined(self, state, key):
        return state.extend("key", key, 1)


class Unrecorded(Part):
    def joined(self, state, key):
        with _no_grad():
            return super().joined(state, key)


@on_ranks(2)
@pytest.mark.parametrize("name", ["ScheduleSeqPP", "ScheduleGPipe"])
def test_slices_equal_whole_sequences(name):
    rank, generator = get_platform().groups.rank(), np.random.default_rng(0)
    x, target = generator.normal(size=(2, 4, TOKENS, WIDTH))
    parts = [Part(index, index == 1) for index in range(2)]
    own = list(parts[rank].trainable_params())
    schedule = getattr(hp_pipeline, name)(PipelineStage(parts[rank], rank, 2), 2, seq_slices=3)
    losses = schedule.run(Tensor(x), **({"target": Tensor(target)} if rank else {}))

    def whole(x, target):
        return parts[1](parts[0](x), target)

    step = mindspore.value_and_grad(whole, None, own)
    results = [step(Tensor(a), Tensor(b)) for a, b in zip(np.split(x, 2), np.split(target, 2), strict=True)]
    for index, gradient in enumerate(schedule.take_gradients(own)):
        expected = sum(gradients[index].asnumpy() for _, gradients in results) / 2
        np.testing.assert_allclose(gradient.asnumpy(), expected, rtol=1e-12, atol=1e-12)
    expected_losses = [loss.asnumpy() for loss, _ in results] if rank else []
    np.testing.assert_allclose([loss.asnumpy() for loss in losses], expected_losses, rtol=1e-12)


@on_ranks(1)
def test_keys_without_gradients_are_refused():
    x, target = np.random.default_rng(0).normal(size=(2, 4, TOKENS, WIDTH))

    def run(kind):
        part = kind(0, True)
        schedule = hp_pipeline.ScheduleGPipe(PipelineStage(part, 0, 1), 2, seq_slices=3)
        return schedule.run(Tensor(x), target=Tensor(target)), part

    with pytest.raises(
        PipelineError, match="'key' is put where no gradients are recorded, .* Put it outside of no_grad"
    ):
        run(Unrecorded)
    losses, part = run(Part)
    for loss, a, b in zip(losses, np.split(x, 2), np.split(target, 2), strict=True):
        np.testing.assert_allclose(loss.asnumpy(), part(Tensor(a), Tensor(b)).asnumpy(), rtol=1e-12)
