"""What the training loop does with a Cell."""

from __future__ import annotations

import numpy as np
from mindspore import mint, nn, ops

from hp_plan import ParallelPlan
from hp_testing import on_ranks
from hyper_parallel.data import Rows
from hyper_parallel.mindspore.trainer import Trainer

SEEN: list[tuple[bool, bool]] = []


class Head(nn.Cell):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = mint.nn.Linear(4, 256), nn.Dropout(p=0.5)

    def construct(self, values):
        dropped = self.dropout(ops.ones((64,)))
        SEEN.append((self.training, bool((dropped == 0).any())))
        return self.linear(values)


class Model(nn.Cell):
    def __init__(self):
        super().__init__()
        self.head = Head()

    def construct(self, input_ids, labels):
        likely = ops.log_softmax(self.head(ops.ones((*input_ids.shape, 4))), -1)
        return {"loss": -ops.mean(ops.gather_elements(likely, 2, ops.expand_dims(labels, -1)))}


def model():
    return Model()


@on_ranks(1)
def test_cells_train_in_a_step():
    tables = {"model": {"function": f"{__name__}:model"}, "fsdp": {"groups": ["head"]}}
    trainer = Trainer(ParallelPlan.from_dict(tables))
    tokens = np.zeros((2, 8), np.int64)
    trainer.step(Rows(tokens, tokens, tokens))
    assert SEEN == [(True, True)]
