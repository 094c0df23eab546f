"""Runs of Cells that go on from a checkpoint."""

from __future__ import annotations

import json

import pytest
from mindspore import mint, nn, ops

from hp_plan import ParallelPlan
from hp_testing import run_ranks
from hyper_parallel.reports.output import prepare_folder
from hyper_parallel.worker import train


class Embedding(mint.nn.Embedding):
    def construct(self, tokens):
        return ops.gather(self.weight, tokens, 0)


class Bigram(nn.Cell):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.head = Embedding(256, 8), mint.nn.Linear(8, 8), mint.nn.Linear(8, 256)

    def construct(self, input_ids, labels):
        likely = ops.log_softmax(self.head(mint.tanh(self.hidden(self.embed(input_ids[:, :-1])))), -1)
        return {"loss": -ops.mean(ops.gather_elements(likely, 2, ops.expand_dims(labels[:, 1:], -1)))}


def bigram():
    return Bigram()


class Failing(Bigram):
    calls = 0

    def construct(self, input_ids, labels):
        self.calls += 1
        if self.calls == 4:
            raise ValueError("the weights went bad")
        return super().construct(input_ids, labels)


def failing():
    return Failing()


GROUPS = [{"patterns": ["embed.weight"], "lr_multiple": 0.5}, {"patterns": ["*.bias"], "weight_decay": 0.0}]


def run(folder, optimizer, mesh, model="bigram", **options):
    (folder / "text").write_bytes(b"to be or not to be, " * 20)
    tables = {
        "model": {"function": f"{__name__}:{model}"},
        "mesh": mesh,
        "optimizer": {"name": optimizer, "lr": 0.05, "groups": GROUPS if optimizer == "adamw" else []},
        "schedule": {"kind": "cosine", "warmup_steps": 2},
        "data": {"sequence_length": 8, "batch_size": 4, "paths": [str(folder / "text")]},
        "run": {"steps": 5, "checkpoint_every": 2},
    }
    if mesh:
        tables["fsdp"] = {}
    plan = ParallelPlan.from_dict(tables)
    train(plan, prepare_folder(folder / "run", name="x", resume="resume" in options), **options)


def losses(folder):
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [value for step in map(json.loads, lines) for value in (step["loss"], step["grad_norm"], step["lr"])]


@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("muon", "sgd"))]
)
def test_a_run_goes_on(tmp_path, optimizer):
    """In the same layout with the same losses; alone up to the order of sums."""
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    run_ranks(2, run, tmp_path / "whole", optimizer, {"dp_shard": 2})
    run_ranks(2, run, tmp_path / "parts", optimizer, {"dp_shard": 2}, until=2)
    run_ranks(2, run, tmp_path / "parts", optimizer, {"dp_shard": 2}, until=4, resume="auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")[: 4 * 3]
    run_ranks(1, run, tmp_path / "parts", optimizer, {}, resume="auto")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_a_single_rank_that_raises_saves_its_last_step(tmp_path):
    (tmp_path / "whole").mkdir()
    run_ranks(1, run, tmp_path / "whole", "adamw", {})
    run_ranks(1, fail, tmp_path)
    run_ranks(1, run, tmp_path, "adamw", {}, resume="auto")
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path) == whole


def fail(folder):
    said: list[str] = []
    with pytest.raises(ValueError, match="the weights went bad"):
        run(folder, "adamw", {}, "failing", tell=said.append)
    assert said == [f"the ranks that are left saved step 3, whole and verified: {folder}/run/checkpoints/step-00000003"]
