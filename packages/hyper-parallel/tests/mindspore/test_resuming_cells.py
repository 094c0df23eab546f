"""Runs of Cells that go on from a checkpoint."""

from __future__ import annotations

import json

import pytest
from mindspore import mint, nn, ops

from hp_plan import ParallelPlan
from hp_testing import run_ranks
from hyper_parallel.output import prepare_folder
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


GROUPS = [{"patterns": ["embed.weight"], "lr_multiple": 0.5}, {"patterns": ["*.bias"], "weight_decay": 0.0}]


def run(folder, optimizer, mesh, **options):
    (folder / "text").write_bytes(b"to be or not to be, " * 20)
    tables = {
        "model": {"function": f"{__name__}:bigram"},
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


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
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
