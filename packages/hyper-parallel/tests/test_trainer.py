from __future__ import annotations

import itertools
import json
import logging
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import DROPOUT, EXPERTS, TABLES, losses, run, validations

from hp_plan import ParallelPlan
from hp_platform import get_platform
from hp_testing import on_ranks, run_ranks
from hyper_parallel.data import Packed, Rows, TokenFile, write_tokens
from hyper_parallel.torch import trainer
from hyper_parallel.torch.trainer import Trainer
from hyper_parallel.training.evaluating import Validation


@on_ranks(2)
def test_the_checkpoint_is_a_model_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

    summary = run(tmp_path, {"dp_shard": 2})
    if get_platform().groups.rank() != 0:
        assert summary is None
        return
    assert summary is not None
    assert summary.steps == 3
    assert summary.tokens == 3 * 4 * 8
    assert len(summary.peak_memory) == 2
    assert summary.sample is not None
    assert summary.sample.startswith("def ")
    model = AutoModelForCausalLM.from_pretrained(summary.checkpoint)
    assert type(model) is Qwen3ForCausalLM
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = torch.tensor([list(b"to be or")])
    with torch.no_grad():
        assert 0 < model(tokens, labels=tokens).loss < summary.first_loss
    assert ParallelPlan.from_toml(tmp_path / "run" / "plan.toml").run.steps == 3


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(1, run, folder, {})
    return folder


LAYOUTS = [{"dp_shard": 2, "cp": 2}, {"pp": 2, "dp_shard": 2}]
OTHERS = [{"dp_shard": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_shard": 4}]
THOROUGH = [pytest.param(mesh, marks=pytest.mark.thorough) for mesh in OTHERS]
SPARSE_LAYOUTS = [
    {"dp_shard": 2, "tp": 2, "ep": 4},
    pytest.param({"pp": 2, "dp_shard": 2, "ep": 2}, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("mesh", [*LAYOUTS, *THOROUGH], ids=str)
def test_every_layout_trains_on_the_same_text_to_the_same_loss(tmp_path, alone, mesh):
    run_ranks(4, run, tmp_path, mesh)
    compare_runs(tmp_path, alone)


@pytest.mark.parametrize("mesh", SPARSE_LAYOUTS, ids=str)
def test_experts_over_ranks_train_to_the_same_weights_and_are_saved_whole(tmp_path, mesh):
    (tmp_path / "alone").mkdir()
    run_ranks(1, run, tmp_path / "alone", {}, 3, EXPERTS)
    run_ranks(4, run, tmp_path, mesh, 3, EXPERTS)
    compare_runs(tmp_path, tmp_path / "alone")


def compare_runs(tmp_path, alone):
    # transformers computes norms and softmax in float32 whatever the weights are.
    assert losses(tmp_path) == pytest.approx(losses(alone), abs=1e-5)
    assert validations(alone).keys() == {2, 3}
    if not json.loads((tmp_path / "run" / "run.json").read_text())["starts"][0]["plan"]["mesh"]["pp"] > 1:
        assert validations(tmp_path) == pytest.approx(validations(alone), abs=1e-5)
    got, expected = (
        load_file(folder / "run" / "checkpoints" / "step-00000003" / "model.safetensors")
        for folder in (tmp_path, alone)
    )
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-5)


def test_validation_changes_nothing_of_the_training(tmp_path):
    written = {"prompts": ["to be", "or"], "prompt_tokens": 5}
    for folder, section in {"with": {"every": 1, "batches": 2, **written}, "without": {}}.items():
        (tmp_path / folder).mkdir()
        own = {"paths": [str(tmp_path / folder / "text0")], **section} if section else {}
        run_ranks(2, run, tmp_path / folder, {"dp_shard": 2}, 4, DROPOUT, changed={"validation": own})
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    got, expected = (
        load_file(tmp_path / folder / "run" / "checkpoints" / "step-00000004" / "model.safetensors")
        for folder in ("with", "without")
    )
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert validations(tmp_path / "with").keys() == {1, 2, 3, 4}
    assert not validations(tmp_path / "without")
    texts = [json.loads(line) for line in (tmp_path / "with" / "run" / "texts.jsonl").read_text().splitlines()]
    assert [text["step"] for text in texts] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert all(text["text"].startswith(("to be", "or")) for text in texts)


def test_the_checkpoints_with_the_smallest_validation_loss_stay(tmp_path):
    run_ranks(2, validated_as, tmp_path, [3.0, 1.0], until=5)
    run_ranks(2, validated_as, tmp_path, [4.0, 2.0], resume="auto")
    folders = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    metrics = {folder.name: json.loads((folder / "manifest.json").read_text())["metric"] for folder in folders}
    assert metrics == {"step-00000004": 1.0, "step-00000008": 2.0}


def validated_as(folder, losses, **options):
    """A run whose validations give these losses, and which is stopped between two of them."""
    with mock.patch.object(Validation, "values", lambda *_: [losses.pop(0)]):
        changed = {"keep": 1, "keep_best": 2}
        run(folder, {"dp_shard": 2}, 8, changed=changed, **options)


def test_texts_are_those_of_one_process(tmp_path):
    texts = []
    for number, mesh in enumerate(({}, {"dp_shard": 2}, {"tp": 2})):
        folder = tmp_path / str(number)
        folder.mkdir()
        section = {"validation": {"prompts": ["to be"], "prompt_tokens": 12}}
        run_ranks(2 if mesh else 1, run, folder, mesh, 2, changed=section)
        texts.append((folder / "run" / "texts.jsonl").read_text())
    assert texts[1] == texts[0] and texts[2] == texts[0]
    assert json.loads(texts[0])["step"] == 2


def test_the_validation_of_packed_documents_counts_each_token_once(tmp_path):
    documents = [[place % 250 + number for place in range(2 + number)] for number in range(6)] * 8
    write_tokens(tmp_path / "corpus", documents, vocabulary=256)
    packed = {"paths": [str(tmp_path / "corpus.bin")], "packing": True}
    packed["validation"] = {"paths": packed["paths"], "every": 2, "batches": 3}
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        run_ranks(ranks, run, tmp_path / str(ranks), {"dp_shard": ranks}, 2, changed=packed)
    assert validations(tmp_path / "2") == pytest.approx(validations(tmp_path / "1"), abs=1e-6)
    model = trained(tmp_path / "1")
    rows = Packed(TokenFile(tmp_path / "corpus"), 8, seed=0).rows(np.arange(12))
    total, count = 0.0, 0
    for row in range(12):  # one document at a time
        starts = [*np.flatnonzero(rows.positions[row] == 0), 8]
        for start, end in itertools.pairwise(starts):
            labels = torch.from_numpy(rows.labels[row, start + 1 : end])
            if bool((labels != -100).any()):
                logits = model(torch.from_numpy(rows.tokens[None, row, start:end])).logits[0, :-1]
                total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
                count += int((labels != -100).sum())
    assert validations(tmp_path / "1")[2] == pytest.approx(total / count, abs=1e-6)


@torch.no_grad()
def trained(folder):
    from transformers import AutoModelForCausalLM

    path = folder / "run" / "checkpoints" / "step-00000002"
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


# A layer's projections and its perceptron's matrices, two layers, the head: for each of 4 x 8 tokens two operations a
# weight, and four for each of 16 entries of the heads and each of 4 tokens seen on average; backward is twice forward.
DENSE = 2 * (2 * (16 * 16 + 16 * 8 + 16 * 8 + 16 * 16 + 3 * 16 * 20) + 16 * 256) + 2 * 4 * 16 * 4
SPARSE = 2 * (2 * (16 * 16 + 16 * 8 + 16 * 8 + 16 * 16 + 16 * 7 + 2 * 3 * 16 * 6) + 16 * 256) + 2 * 4 * 16 * 4


@pytest.mark.parametrize(("model", "mesh", "operations"), [(None, {"dp_shard": 2}, DENSE), (EXPERTS, {}, SPARSE)])
def test_utilization_is_by_the_operations_of_what_a_token_meets(tmp_path, model, mesh, operations):
    ranks = mesh.get("dp_shard", 1)
    run_ranks(ranks, run, tmp_path, mesh, 2, model)
    for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()):
        counted = line["mfu"] * line["seconds"] * 1e9 * ranks
        assert counted == pytest.approx(3 * operations * 4 * 8, rel=1e-3)
        assert 0 <= line["data_wait"] <= line["seconds"]


def test_a_profile_has_the_steps_and_ranks_of_the_plan(tmp_path):
    run_ranks(2, run, tmp_path, {"dp_shard": 2}, 4, changed={"profile": {"start": 2, "steps": 2, "ranks": [1]}})
    (file,) = (tmp_path / "run" / "profile").iterdir()
    assert file.name == "rank-1.json"
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"hp.step 2", "hp.step 3", "hp.forward(model.layers.1.mlp)"} <= names
    assert not {"hp.step 1", "hp.step 4"} & names


@on_ranks(2)
def test_what_fails_after_the_last_step_does_not_fail_the_run(tmp_path):
    full = OSError(28, "No space left on device")
    changed = {"profile": {"start": 3, "steps": 5, "ranks": [0]}}
    with (
        mock.patch.dict(sys.modules, {"matplotlib.figure": None}),
        mock.patch("hyper_parallel.reports.sinks.JsonLines.close", side_effect=full),
        mock.patch("hyper_parallel.run.Profile.close", side_effect=full),
        mock.patch("hyper_parallel.torch.trainer.write_sample", side_effect=full),
    ):
        summary = run(tmp_path, {"dp_shard": 2}, changed=changed)
    if get_platform().groups.rank() != 0:
        return
    assert summary.steps == 3 and summary.sample is None
    assert any(Path(summary.checkpoint).glob("*.safetensors")), "saved before anything else is written"
    said = {each.partition(":")[0]: each for each in summary.missed}
    assert {*said} == {"the profile", "the last metrics of JsonLines", "loss.png", "a text of the model"}
    assert "pip install 'hyper-parallel[train]'" in said["loss.png"] and "No space left" in said["the profile"]


def test_numbers_of_a_step_are_read_when_the_next_is_launched(tmp_path):
    run_ranks(1, launches_before_reads, tmp_path)


def launches_before_reads(folder):
    events = []
    updated, numbers = Trainer.update, trainer.Numbers

    class Watched(numbers):
        def read(self):
            events.append("read")
            return super().read()

    def update(self):
        events.append("launch")
        updated(self)

    Trainer.update, trainer.Numbers = update, Watched
    try:
        run(folder, {}, 5)  # with a checkpoint and a validation after steps 2 and 4
    finally:
        Trainer.update, trainer.Numbers = updated, numbers
    assert events == ["launch", "launch", "read", "read", "launch", "launch", "read", "read", "launch", "read"]


@on_ranks(2)
@pytest.mark.parametrize("options", [{"slots": 1}, {"capacity": 1}], ids=str)
def test_the_trainer_looks_at_experts_every_so_many_steps(monkeypatch, options):
    from hyper_parallel.torch.trainer import Trainer

    sections = {"mesh": {"dp_shard": 2, "ep": 2}, "experts": {"every": 2, **options}}
    trainer = Trainer(ParallelPlan.from_dict({**TABLES, "model": EXPERTS, **sections}))
    layers = [module._expert_layer for module in trainer.model.modules() if hasattr(module, "_expert_layer")]
    tokens = np.random.default_rng(get_platform().groups.rank()).integers(0, 256, (2, 8))
    seen, warned = [], []
    monkeypatch.setattr(logging.getLogger("hp_moe"), "warning", lambda text, *_: warned.append(text))
    for _ in range(2):
        trainer.gradients(Rows(tokens, tokens, tokens, tokens[:, 0]))
        trainer.update()
        replicas = any(any(layer.placement.replicas) for layer in layers)
        seen.append((replicas, any("dropped" in text for text in warned)))
    assert seen == [(False, False), ("slots" in options, "capacity" in options)]
