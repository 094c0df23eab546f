from __future__ import annotations

import itertools
import json
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hp_plan import ParallelPlan
from hp_platform import get_platform
from hp_testing import on_ranks, run_ranks
from hyper_parallel.data import DataError, Packed, Rows, TokenFile, write_tokens
from hyper_parallel.output import OutputError, Step, as_json, prepare_folder
from hyper_parallel.run import keep_lines
from hyper_parallel.torch import gathering
from hyper_parallel.torch.trainer import Trainer
from hyper_parallel.worker import train

TABLES = {
    "model": {
        "config": "Qwen3Config",
        "overrides": {
            "vocab_size": 256,
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
    },
    "fsdp": {"groups": ["model.layers.*"]},
    "data": {"sequence_length": 8, "batch_size": 4},
    "run": {"steps": 3, "grad_clip": 1.0, "dtype": "float64"},
}


EXPERTS = {
    "config": "Qwen3MoeConfig",
    "overrides": {
        **TABLES["model"]["overrides"],
        "num_experts": 7,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "experts_implementation": "grouped_linear",  # torch's own has no float64
    },
}


def run(folder, mesh, steps=3, model=None, *, changed=None, optimizer="adamw", **options):
    text = folder / f"text{get_platform().groups.rank()}"  # no rank empties another's file
    text.write_bytes(b"to be or not to be, " * 20)
    tables = {
        **TABLES,
        "model": model or TABLES["model"],
        "mesh": mesh,
        "optimizer": {"name": optimizer},
        "data": {**TABLES["data"], "paths": [str(text)]},
    }
    if not set(mesh) & {"dp_shard", "dp_replicate"} and mesh:
        del tables["fsdp"]  # nothing is sharded
    tables["run"] = {**TABLES["run"], "steps": steps, "checkpoint_every": 2}
    if tables["model"]["config"] == "GPT2Config":
        tables["fsdp"] = {}
    if "pp" not in mesh:
        tables["validation"] = {"paths": [str(text)], "every": 2, "batches": 2}
    tables["metrics"] = {"peak_flops": 1e9}
    for name, value in (changed or {}).items():
        if name in ("validation", "profile"):
            tables[name] = value
        else:
            tables["run" if name == "seed" else "data"][name] = value
    plan = ParallelPlan.from_dict(tables)
    return train(plan, prepare_folder(folder / "run", name="x", resume="resume" in options), **options)


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


def losses(folder) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [value for step in map(json.loads, lines) for value in (step["loss"], step["grad_norm"])]


def validations(folder) -> dict[int, float]:
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {step["step"]: step["validation_loss"] for step in lines if "validation_loss" in step}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(1, run, folder, {})
    return folder


LAYOUTS = [{"dp_shard": 4}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}]
STAGES = [{"pp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}]


@pytest.mark.parametrize("mesh", [*LAYOUTS, *STAGES], ids=str)
def test_every_layout_trains_on_the_same_text_to_the_same_loss(tmp_path, alone, mesh):
    run_ranks(4, run, tmp_path, mesh)
    compare_runs(tmp_path, alone)


@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2, "ep": 4}, {"pp": 2, "dp_shard": 2, "ep": 2}], ids=str)
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(1, run, folder, {}, 5)
    return folder


@pytest.mark.parametrize("after", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_run_goes_on_in_another_layout(tmp_path, undisturbed, after):
    run_ranks(2, run, tmp_path, {"dp_shard": 2})
    with open(tmp_path / "run" / "metrics.jsonl", "a") as lines:
        lines.write(json.dumps({"step": 4}) + '\n{"step": 5, "lo')  # after the checkpoint, killed while writing
    run_ranks(2, run, tmp_path, after, 5, resume="auto")
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), abs=1e-5)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000005",
    ]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"seed": 5}, r"run\.seed was 0 and is 5"),
        ({"sequence_length": 9}, r"data\.sequence_length was 8 and is 9"),
    ],
    ids=str,
)
def test_other_samples_under_the_numbers_of_a_run(tmp_path, changed, text):
    run_ranks(1, run, tmp_path, {}, 1)
    run_ranks(1, refused, tmp_path, changed, text)
    run_ranks(1, run, tmp_path, {}, 2, changed={"batch_size": 2}, resume="auto")


def refused(folder, changed, text):
    (folder / "swapped").write_bytes(b"to be or not to see " * 20)
    with pytest.raises(DataError, match=rf"step-00000001 can't go on .*{text}.*; set it back, or .* --weights .*step"):
        run(folder, {}, 2, changed=changed, resume="auto")


def test_other_data_of_the_same_size(tmp_path):
    run_ranks(1, run, tmp_path, {}, 1)
    run_ranks(1, refused, tmp_path, {"paths": [str(tmp_path / "swapped")]}, r"digest of the data was \[")


@on_ranks(2)
def test_ranks_that_read_different_data_are_refused(tmp_path):
    rank = get_platform().groups.rank()
    own = tmp_path / f"own{rank}"
    own.write_bytes(b"to be or not to be" * 20 + str(rank).encode())
    with pytest.raises(DataError, match="rank 1 reads other data than rank 0 from .*own.*the same files"):
        run(tmp_path, {"dp_shard": 2}, changed={"paths": [str(own)]})


def test_a_metrics_file_that_was_cut_off(tmp_path):
    file = tmp_path / "metrics.jsonl"
    step = Step(step=1, loss=2.0, grad_norm=1.0, lr=0.1, tokens_per_second=8.0, peak_memory=9, seconds=1.0)
    line = as_json(step)
    file.write_text(f"{line}\n{line[:20]}")
    assert keep_lines(file, 2) == [step]
    assert file.read_text() == f"{line}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "state.json"])
def test_a_checkpoint_that_is_damaged_is_passed_over(tmp_path, undisturbed, name):
    run_ranks(1, run, tmp_path, {})
    damage(tmp_path / "run" / "checkpoints" / "step-00000003" / name)
    run_ranks(1, resume_with_a_warning, tmp_path, name)
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), abs=1e-12)


def damage(file):
    data = bytearray(file.read_bytes())
    data[-100 % len(data)] ^= 1
    file.write_bytes(data)


def resume_with_a_warning(folder, name):
    with pytest.warns(RuntimeWarning, match=rf"the checkpoint of step 3 can't be read: .*{name}"):
        run(folder, {}, 5, resume="auto")


DROPOUT = {
    "config": "GPT2Config",
    "overrides": {"vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "resid_pdrop": 0.5},
}


def test_dropout_goes_on_where_it_was(tmp_path):
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    run_ranks(1, run, tmp_path / "whole", {}, 5, DROPOUT)
    run_ranks(1, run, tmp_path / "parts", {}, 5, DROPOUT, until=3)
    run_ranks(1, run, tmp_path / "parts", {}, 5, DROPOUT, resume="auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_muon_goes_on_where_it_was(tmp_path):
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    run_ranks(1, run, tmp_path / "whole", {}, 4, optimizer="muon")
    run_ranks(1, run, tmp_path / "parts", {}, 4, optimizer="muon", until=2)
    run_ranks(1, run, tmp_path / "parts", {}, 4, optimizer="muon", resume="auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


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


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_texts_are_those_of_one_process(tmp_path, mesh):
    texts = []
    for folder, own in {"alone": {}, "ranks": mesh}.items():
        (tmp_path / folder).mkdir()
        section = {"validation": {"prompts": ["to be"], "prompt_tokens": 12}}
        run_ranks(2 if own else 1, run, tmp_path / folder, own, 2, changed=section)
        texts.append((tmp_path / folder / "run" / "texts.jsonl").read_text())
    assert texts[0] == texts[1]
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


def test_numbers_of_a_step_are_read_when_the_next_is_launched(tmp_path):
    run_ranks(1, launches_before_reads, tmp_path)


def launches_before_reads(folder):
    events = []
    updated, numbers = Trainer.update, gathering.Numbers

    class Watched(numbers):
        def read(self):
            events.append("read")
            return super().read()

    def update(self):
        events.append("launch")
        updated(self)

    Trainer.update, gathering.Numbers = update, Watched
    try:
        run(folder, {}, 5)  # with a checkpoint and a validation after steps 2 and 4
    finally:
        Trainer.update, gathering.Numbers = updated, numbers
    assert events == ["launch", "launch", "read", "read", "launch", "launch", "read", "read", "launch", "read"]


@on_ranks(2)
def test_a_run_of_another_model_does_not_go_on(tmp_path):
    run(tmp_path, {"dp_shard": 2})
    if get_platform().groups.rank() == 0:
        (tmp_path / "run" / "metrics.jsonl").unlink()
        with pytest.raises(OutputError, match=r"has a finished run of 3 steps, and no metrics\.jsonl .*run\.steps"):
            run(tmp_path, {"dp_shard": 2}, resume="auto")
    else:
        run(tmp_path, {"dp_shard": 2}, resume="auto")
    smaller = {**TABLES["model"], "overrides": {**TABLES["model"]["overrides"], "num_hidden_layers": 1}}
    with pytest.raises(OutputError, match=r"step-00000003 doesn't fit the plan: .*that the model lacks.*with --out"):
        run(tmp_path, {"dp_shard": 2}, 5, smaller, resume="auto")
    wider = {**TABLES["model"], "overrides": {**TABLES["model"]["overrides"], "hidden_size": 32}}
    with pytest.raises(OutputError, match=r"step-00000003 doesn't fit the plan: .*of shape.*with --out"):
        run(tmp_path, {"dp_shard": 2}, 5, wider, resume="auto")
    if get_platform().groups.rank() == 0:
        for folder in (tmp_path / "run" / "checkpoints").iterdir():
            damage(folder / "manifest.json")
    get_platform().collectives.barrier()
    with (
        pytest.warns(RuntimeWarning, match=r"can't be read"),
        pytest.raises(OutputError, match=r"no checkpoint that can be read: .*manifest\.json.*with --out"),
    ):
        run(tmp_path, {"dp_shard": 2}, 5, resume="auto")


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
        trainer.gradients(Rows(tokens, tokens, tokens))
        trainer.update()
        replicas = any(any(layer.placement.replicas) for layer in layers)
        seen.append((replicas, any("dropped" in text for text in warned)))
    assert seen == [(False, False), ("slots" in options, "capacity" in options)]
