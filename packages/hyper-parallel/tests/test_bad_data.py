"""Data that can't be trained on, before a run and in its middle: each is named, and costs nothing that was trained."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from hp_plan import ParallelPlan
from hp_platform import get_platform
from hp_testing import run_ranks
from hyper_parallel.data import DataError, open_samples, write_tokens
from hyper_parallel.training.checking import check_run

DOCUMENTS = [[token % 50] * 9 for token in range(64)]


@pytest.fixture
def tokens(tmp_path):
    write_tokens(tmp_path / "corpus", DOCUMENTS, vocabulary=64)
    return tmp_path / "corpus.bin"


def plan_of(path, *, length=8, batch=4, **sections) -> ParallelPlan:
    data = {"paths": [str(path)], "sequence_length": length, "batch_size": batch}
    return ParallelPlan.from_dict({"data": data, **sections})


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "spoil", "text", "mended"),
    [
        ("text", lambda path: path.write_bytes(b""), "text is empty (0 bytes); leave it out, or give another", None),
        (
            "corpus.bin",
            cut,
            "corpus.bin has 1151 bytes, but corpus.idx lists 576 tokens of uint16, 1152 bytes; write both again",
            None,
        ),
        ("corpus.bin", Path.unlink, "corpus.bin does not exist", None),
        (
            "text",
            lambda path: path.write_bytes(b"x" * 31),
            "text has 3 samples of 8 tokens, but a batch takes 4; give more data, or make data.batch_size at most 3",
            {"batch": 3},
        ),
        (
            "text",
            lambda path: path.write_bytes(b"x" * 7),
            "text has 7 bytes of text, but one sample takes 8; give more, or make data.sequence_length at most 7",
            {"length": 7, "batch": 1},
        ),
    ],
    ids=["empty", "odd", "missing", "batch", "sample"],
)
def test_what_is_wrong_before_a_run(tmp_path, tokens, name, spoil, text, mended):
    (tmp_path / "text").write_bytes(b"x" * 1000)
    assert check_run(plan_of(tmp_path / name)) == []
    spoil(tmp_path / name)
    (found,) = check_run(plan_of(tmp_path / name))
    assert found.key == "data.paths"
    assert text in str(found)
    if mended is not None:
        assert check_run(plan_of(tmp_path / name, **mended)) == []
    (tmp_path / "text").write_bytes(b"x" * 1000)
    write_tokens(tmp_path / "corpus", DOCUMENTS, vocabulary=64)
    assert check_run(plan_of(tmp_path / name)) == []


def test_fewer_samples_of_tokens_than_a_batch_takes(tokens):
    (found,) = check_run(plan_of(tokens, batch=73))
    message = "corpus.bin has 72 samples of 8 tokens, but a batch takes 73; give more data, or make"
    assert f"{message} data.batch_size at most 72" in str(found)
    assert check_run(plan_of(tokens, batch=72)) == []


def test_tokens_that_are_written_to_are_no_longer_read(tokens):
    section = plan_of(tokens).data
    samples = open_samples(section, seed=0)
    before = samples.rows(np.arange(8)).tokens.tolist()
    other = tokens.with_name("other.bin")
    other.write_bytes(tokens.read_bytes()[::-1])
    os.replace(other, tokens)  # what the run has mapped is still the file that it began with
    assert samples.rows(np.arange(8)).tokens.tolist() == before
    write_tokens(tokens.with_suffix(""), DOCUMENTS, vocabulary=64)
    samples = open_samples(section, seed=0)
    rows = samples.rows(np.arange(8)).tokens.tolist()
    with open(tokens, "r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError, match=r"corpus\.bin has been written to since the run began, from 1152 bytes to 10"):
        samples.rows(np.arange(8))
    write_tokens(tokens.with_suffix(""), DOCUMENTS, vocabulary=64)  # "once it is as it was"
    assert open_samples(section, seed=0).rows(np.arange(8)).tokens.tolist() == rows


class Poisoned:
    """A model whose loss is no number on one rank, from some step on."""

    def __new__(cls, at, gradient):
        import torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head, self.calls = torch.nn.Embedding(256, 4), torch.nn.Linear(4, 256), 0

            def forward(self, input_ids, labels):
                self.calls += 1
                logits = self.head(self.embed(input_ids[:, :-1]))
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
                if self.calls >= at and get_platform().groups.rank() == 1:
                    poison = (self.embed.weight.sum() * 0).sqrt()  # its gradient is 0 / 0, itself it is 0
                    loss = loss + (poison if gradient else float("nan"))
                return {"loss": loss}

        return Model()


def poisoned(at, gradient):
    return Poisoned(at, gradient)


def diverges(folder, gradient, text):
    from hyper_parallel.reports.output import prepare_folder
    from hyper_parallel.supervision.run_end import DivergedError
    from hyper_parallel.worker import train

    (folder / "text").write_bytes(b"to be or not to be, " * 20)
    model = {"function": f"{__name__}:poisoned", "overrides": {"at": 4, "gradient": gradient}}
    run = {"steps": 9, "checkpoint_every": 2}
    plan = plan_of(folder / "text", model=model, mesh={"dp_shard": 2}, fsdp={"groups": [""]}, run=run)
    with pytest.raises(DivergedError, match=text):
        train(plan, prepare_folder(folder / "run", name="x"))


@pytest.mark.framework("torch")
@pytest.mark.parametrize(
    ("gradient", "what"), [(False, "the loss of step 4 is nan"), (True, "the gradients of step 4 have norm nan")]
)
def test_a_run_whose_loss_is_no_number_ends_and_saves_nothing_of_it(tmp_path, gradient, what):
    """On one of two ranks, at a step whose checkpoint is due."""
    run_ranks(2, diverges, tmp_path, gradient, rf"{what}, .*the newest checkpoint is .*step-00000002; start again")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000002"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
