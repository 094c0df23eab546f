"""What the training loop does with a Cell."""

from __future__ import annotations

import json

import mindspore
import numpy as np
import pytest
from mindspore import mint, nn, ops
from typer.testing import CliRunner

from hp_plan import ParallelPlan, PlanError
from hp_plan.extend import data_parallel_rows
from hp_platform import manual_seed
from hp_testing import on_ranks, run_ranks
from hp_testing.leftovers import leftovers
from hyper_parallel.commands import checkpoints
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
    take_step(trainer, tokens)
    assert SEEN == [(True, True)]
    loss, labels = trainer.evaluate(Rows(tokens, tokens, tokens, tokens[:, 0]))
    assert SEEN == [(True, True), (False, False)] and trainer.model.head.training
    (value,) = loss
    assert value > 0 and labels == 2 * 7


class Rowwise(nn.Cell):
    """A model without dropout."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = mint.nn.Linear(16, 4), mint.nn.Linear(4, 16)

    def construct(self, input_ids, labels):
        wide = ops.expand_dims(input_ids, -1).astype(mindspore.float32) * ops.ones((1, 1, 16)) / 16
        likely = ops.log_softmax(self.head(self.embed(wide)), -1)
        return {"loss": -ops.mean(ops.gather_elements(likely, 2, ops.expand_dims(labels, -1)))}


def rowwise():
    return Rowwise()


def take_step(trainer, tokens):
    loss, norm = trainer.gradients(Rows(tokens, tokens, tokens, tokens[:, 0]))
    trainer.update()
    return loss, float(norm.asnumpy())


def whole_weights(trainer):
    return [each.full_tensor().asnumpy() for each in trainer.model.trainable_params()]


@on_ranks(2)
@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_accumulated_micro_batches_are_one_step(deterministic):
    tokens = np.random.default_rng(0).integers(0, 16, (8, 4))
    results = []
    for parts in (1, 4):
        run = {"accumulate": parts, "deterministic": deterministic}
        model, mesh = {"function": f"{__name__}:rowwise"}, {"dp_shard": 2}
        sections = {"model": model, "mesh": mesh, "fsdp": {"groups": ["head"]}, "run": run}
        plan = ParallelPlan.from_dict({**sections, "optimizer": {"name": "sgd", "lr": 1.0}})
        trainer = Trainer(plan)
        own = tokens[data_parallel_rows(plan)]
        losses = [take_step(trainer, own) for _ in range(2)]
        results.append((losses, whole_weights(trainer)))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    for one, several in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_allclose(one, several, rtol=1e-5, atol=1e-6)


DROPPED: list[str] = []


class Dropping(nn.Cell):
    """A model that drops twice, by a function and by a Cell."""

    def __init__(self, cell):
        super().__init__()
        self.linear = mint.nn.Linear(4, 16)
        if cell:
            self.dropout = nn.Dropout(p=0.5)

    def construct(self, input_ids, labels):
        for drop in [ops.dropout, *([self.dropout] if "dropout" in self._cells else [])]:
            ones = ops.ones((40,))
            kept = drop(ones) if drop is not ops.dropout else drop(ones, p=0.5)
            DROPPED.append("".join(str(int(each)) for each in kept.asnumpy()))
        likely = ops.log_softmax(self.linear(ops.ones((*input_ids.shape, 4))), -1)
        return {"loss": -ops.mean(ops.gather_elements(likely, 2, ops.expand_dims(labels, -1)))}


def dropping(cell=True):
    return Dropping(cell)


def dropped(mesh, *, seed=0, **run):
    DROPPED.clear()
    model = {"function": f"{__name__}:dropping", "overrides": {} if not run else {"cell": False}}
    tables = {"model": model, "mesh": mesh, "data": {"batch_size": 4}, "run": {"seed": seed, **run}}
    plan = ParallelPlan.from_dict(tables | ({"styles": {"linear": "colwise"}} if "tp" in mesh else {}))
    trainer = Trainer(plan)
    manual_seed(plan.run.seed * 1_000_003)
    take_step(trainer, np.zeros((4, 4), np.int64)[data_parallel_rows(plan)])
    return [*DROPPED]


def test_ranks_drop_the_same_only_where_they_hold_the_same():
    first, second = run_ranks(2, dropped, {"dp_replicate": 2})
    assert len(first) == 2 and not set(first) & set(second)
    first, second = run_ranks(2, dropped, {"tp": 2}, seed=2**40)  # more bits than NumPy takes
    assert len(first) == 2 and first == second


def test_what_is_dropped_depends_on_the_sample():
    two = run_ranks(2, dropped, {"dp_replicate": 2}, accumulate=2, deterministic=True)
    (one,) = run_ranks(1, dropped, {}, accumulate=4, deterministic=True)
    assert [each for kept in two for each in kept] == one and len(set(one)) == 4


@on_ranks(1)
def test_a_cell_of_dropout_is_not_deterministic():
    tables = {"model": {"function": f"{__name__}:dropping"}, "run": {"deterministic": True}}
    with pytest.raises(PlanError, match=r"got true, but .dropout. is a Cell of dropout.*ops\.dropout"):
        Trainer(ParallelPlan.from_dict(tables))


@on_ranks(2)
@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate", "tp"])
def test_a_step_leaves_nothing_to_the_collector(axis):
    tokens = np.random.default_rng(0).integers(0, 16, (8, 4))
    tables = {"model": {"function": f"{__name__}:rowwise"}, "mesh": {axis: 2}}
    if axis == "tp":
        tables["styles"] = {"embed": "colwise", "head": "rowwise"}
    else:
        tables["fsdp"] = {"groups": ["head"]}
    plan = ParallelPlan.from_dict(tables)
    trainer, own = Trainer(plan), tokens[data_parallel_rows(plan)]
    assert leftovers(lambda: take_step(trainer, own)) == []


def test_an_adapter_is_merged_where_pytorch_is(tmp_path):
    for folder, name in (("base", "config.json"), ("step", "adapter_config.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    done = CliRunner().invoke(checkpoints.app, ["merge", str(tmp_path / "step"), str(tmp_path / "whole")])
    assert done.exit_code == 1 and "merging an adapter needs PyTorch with peft" in " ".join(done.output.split())
