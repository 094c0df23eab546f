"""`hyper-parallel evaluate`: a checkpoint's loss over all samples, on any mesh and in batches of any size."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_models import CHATML, save_tokenizer, write
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hp_checkpoint.extend import Ranks
from hp_plan import ParallelPlan, build_model
from hp_testing import on_ranks
from hyper_parallel.commands import cli
from hyper_parallel.data import DataError
from hyper_parallel.data.examples import Examples
from hyper_parallel.data.tokenization.tokens import read_tokenizer
from hyper_parallel.reports.output import OutputError
from hyper_parallel.training.evaluating import (
    check_checkpoint,
    check_parts,
    check_prompts,
    evaluate,
    first_prompt,
    prompt_tokens,
)
from hyper_parallel.worker import train

pytestmark = pytest.mark.framework("torch")
SMALL = {
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WORDS = ("red", "blue", "green", "a dog", "the sun")


def write_all(place: Path) -> None:
    """Write a model with a tokenizer, conversations, and pairs of answers."""
    folder = save_tokenizer(place / "model", CHATML)
    plan = {"model": {"config": "LlamaConfig", "overrides": SMALL}, "run": {"dtype": "float64"}}
    build_model(ParallelPlan.from_dict(plan)).save_pretrained(folder)
    asked = [{"role": "user", "content": "say"}]
    talks = [{"messages": [*asked, {"role": "assistant", "content": word}]} for word in WORDS]
    write(place / "chat.jsonl", *talks)
    pairs = [{"prompt": "say", "chosen": word, "rejected": word[::-1]} for word in WORDS]
    write(place / "pairs.jsonl", *pairs)


def plan_of(place: Path, mesh: dict[str, int], size: int, **sections: Any) -> ParallelPlan:
    tables: dict[str, Any] = {
        "model": {"path": str(place / "model")},
        "mesh": mesh,
        "data": {"paths": [str(place / "chat.jsonl")], "format": "messages", "sequence_length": 64, "batch_size": size},
        "optimizer": {"lr": 0.01},
        "run": {"steps": 2, "dtype": "float64"},
        **({"fsdp": {"groups": ["model.layers.*"]}} if "dp_shard" in mesh else {}),
    }
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    return ParallelPlan.from_dict(tables)


def loss_of(folder: Path, place: Path) -> float:
    """Return the mean loss of a token of the answers, one conversation after the other, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total = count = 0.0
    for each in Examples("messages", read_tokenizer(str(place / "model"))).read(place / "chat.jsonl"):
        logs = model(torch.tensor([each.tokens])).logits[0].log_softmax(-1)
        for number in range(1, len(each.tokens)):
            if each.trained[number]:
                total, count = total - logs[number - 1, each.tokens[number]].item(), count + 1
    return total / count


@on_ranks(2)
def test_every_token_that_counts_has_the_same_weight_on_any_mesh(tmp_path):
    if torch.distributed.get_rank() == 0:
        write_all(tmp_path)
    Ranks().gather(b" ")
    train(plan_of(tmp_path, {"dp_shard": 2}, 4), tmp_path / "run")
    newest = check_checkpoint(tmp_path / "run")
    assert newest == check_checkpoint(newest) == check_checkpoint(newest.parent)
    expected = loss_of(newest, tmp_path)
    for mesh, size in (({"dp_shard": 2}, 4), ({"dp_shard": 2}, 2), ({"tp": 2}, 3), ({"cp": 2}, 5)):
        result = evaluate(plan_of(tmp_path, mesh, size), newest)
        assert result.loss == pytest.approx(expected, rel=1e-6)  # transformers computes losses in float32
        assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-6)
        assert (result.samples, result.left_out, result.checkpoint) == (5, 0, str(newest))
    before = evaluate(plan_of(tmp_path, {"tp": 2}, 5), None)
    assert before.checkpoint is None and before.loss == pytest.approx(loss_of(tmp_path / "model", tmp_path), rel=1e-6)
    assert abs(before.loss - expected) > 1e-3
    assert evaluate(plan_of(tmp_path, {"dp_shard": 2}, 2), newest, batches=1).samples == 2
    with pytest.raises(OutputError, match="doesn't fit the plan"):
        smaller = {"path": None, "config": "LlamaConfig", "overrides": {**SMALL, "hidden_size": 8}}
        tables = plan_of(tmp_path, {"dp_shard": 2}, 2, data={"tokenizer": str(tmp_path / "model")}).to_dict()
        evaluate(ParallelPlan.from_dict({**tables, "model": smaller}), newest)


@on_ranks(2)
def test_pairs_are_counted_as_pairs(tmp_path):
    """Five pairs in batches of four have the mean of five; of a model before training every margin is 0."""
    if torch.distributed.get_rank() == 0:
        write_all(tmp_path)
    Ranks().gather(b" ")
    data = {"paths": [str(tmp_path / "pairs.jsonl")], "format": "preference"}
    sections: dict[str, Any] = {"data": data, "objective": {"kind": "dpo"}, "adapter": {"kind": "lora", "rank": 2}}
    before = evaluate(plan_of(tmp_path, {"dp_shard": 2}, 4, **sections), None)
    assert before.loss == pytest.approx(math.log(2)) and before.perplexity is None
    assert (before.accuracy, before.margin, before.samples) == (0.0, 0.0, 5)
    run = train(plan_of(tmp_path, {"dp_shard": 2}, 4, **sections), tmp_path / "run")
    results = [
        evaluate(plan_of(tmp_path, mesh, size, **sections), check_checkpoint(tmp_path / "run"))
        for mesh, size in (({"dp_shard": 2}, 4), ({"tp": 2}, 5), ({"dp_shard": 2}, 2))
    ]
    for result in results:
        assert result.loss == pytest.approx(results[0].loss, rel=1e-9) and result.loss < math.log(2)
        assert result.margin == pytest.approx(results[0].margin, rel=1e-9)
    if run is not None:
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert all({"accuracy", "margin"} <= line.keys() and "perplexity" not in line for line in lines)
        assert lines[0]["margin"] == 0.0 and lines[1]["margin"] > 0.0


def test_the_command(tmp_path, monkeypatch):
    """In a world of one: a run in stages is evaluated on another mesh, by the validation's data or that of the line."""
    write_all(tmp_path)
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_of(tmp_path, {}, 2, validation={"paths": [str(tmp_path / "chat.jsonl")]}).to_toml())

    def command(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(cli.app, ["evaluate", str(plan), *arguments])
        assert result.exit_code == code, result.output
        return result.output

    monkeypatch.chdir(tmp_path)
    result = json.loads(command("--json"))
    assert result["samples"] == 5 and result["loss"] == pytest.approx(loss_of(tmp_path / "model", tmp_path), rel=1e-6)
    assert "the weights of the plan: loss" in command("--batches", "1") and "of 2 samples" in command("--batches", "1")
    assert f"{tmp_path} is no checkpoint of a run: name a run's folder" in command(str(tmp_path), code=1)
    assert "nowhere" in command("--data", "nowhere", code=1)
    assert "set mesh.pp=1" in command("--nproc", "2", "--set", "mesh.pp=2", code=1)
    assert "the weights of the plan: loss" in command("--set", "mesh.pp=2", "--set", "mesh.pp=1")


def test_prompts_are_asked_as_the_data_has_them(tmp_path):
    write_all(tmp_path)
    tokenizer = read_tokenizer(str(tmp_path / "model"))
    chat = plan_of(tmp_path, {}, 2, validation={"prompts": ["say"]})
    asked = "<|im_start|>user\nsay<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt_tokens(chat, tokenizer, "say"), special=True) == asked
    assert first_prompt(chat, tokenizer) == prompt_tokens(chat, tokenizer, "say")
    pairs = {"paths": [str(tmp_path / "pairs.jsonl")], "format": "preference"}
    assert tokenizer.decode(first_prompt(plan_of(tmp_path, {}, 2, data=pairs), tokenizer), special=True) == "<s>say"
    text = plan_of(tmp_path, {}, 2, data={"format": "text"})
    assert tokenizer.decode(prompt_tokens(text, tokenizer, "say")) == "say"
    bare = plan_of(tmp_path, {}, 2, data={"tokenizer": "bytes"}, validation={"prompts": ["say"]})
    with pytest.raises(DataError, match="no chat template"):
        check_prompts(bare)


def test_preferences_without_an_objective_are_refused(tmp_path):
    write_all(tmp_path)
    plan = tmp_path / "plan.toml"
    data = {"paths": [str(tmp_path / "pairs.jsonl")], "format": "preference"}
    plan.write_text(plan_of(tmp_path, {}, 2, data=data).to_toml())
    result = CliRunner().invoke(cli.app, ["lint", str(plan)])
    assert result.exit_code == 1 and "data.format" in result.output


@on_ranks(1)
def test_a_whole_model_is_evaluated_with_a_plan_of_an_adapter_as_its_base(tmp_path):
    write_all(tmp_path)
    plain, adapted = (plan_of(tmp_path, {}, 2, adapter=each) for each in ({}, {"kind": "lora", "rank": 2}))
    train(plain, tmp_path / "plain")
    train(adapted, tmp_path / "adapted")
    whole, adapter = (check_checkpoint(tmp_path / name) for name in ("plain", "adapted"))
    check_parts(plain, whole)
    check_parts(adapted, adapter)
    with pytest.raises(
        OutputError, match=f"has a whole model, and the plan loads .* --set model.path={whole} in its place"
    ):
        check_parts(adapted, whole)
    with pytest.raises(OutputError, match="has an adapter alone, and the plan has no .*checkpoint merge") as refused:
        check_parts(plain, adapter)
    command = str(refused.value).split("after hyper-parallel ")[1].split(", by")[0]
    done = CliRunner().invoke(cli.app, command.replace("TARGET", str(tmp_path / "merged")).split())
    assert done.exit_code == 0, done.output
    merged = evaluate(plan_of(tmp_path, {}, 2, adapter={}, model={"path": str(tmp_path / "merged")}), None)
    assert merged.loss == pytest.approx(evaluate(adapted, adapter).loss, rel=1e-6)
    named = plan_of(tmp_path, {}, 2, adapter={"kind": "lora", "rank": 2}, model={"path": str(whole)})
    assert evaluate(named, None).loss == pytest.approx(evaluate(plain, whole).loss, rel=1e-9)
