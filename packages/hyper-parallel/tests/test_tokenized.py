"""Text with a tokenizer, in a plan: tokens once, in the run's folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hp_checkpoint.extend import Ranks, to_hugging_face
from hp_plan import MeshSection, ParallelPlan, build_model
from hp_platform import get_platform
from hp_testing import on_ranks
from hyper_parallel.commands import cli
from hyper_parallel.data import DataError, TokenFile, opening, write_tokens
from hyper_parallel.data.tokenization.tokenized import (
    text_notes,
    token_files,
    tokenizer_files,
    tokenizer_of,
    with_tokens,
)
from hyper_parallel.run import Run
from hyper_parallel.training.checking import check_run
from hyper_parallel.worker import train

pytestmark = pytest.mark.framework("torch")  # transformers, whose model and tokenizer it is
SMALL = {
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
WORDS = "to be or not the question <end>".split()


@pytest.fixture
def place(tmp_path):
    if get_platform().groups.is_initialized() and get_platform().groups.rank():
        return tmp_path
    model = build_model(ParallelPlan.from_dict({"model": {"config": "LlamaConfig", "overrides": SMALL}}))
    model.save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    described = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(described))
    (tmp_path / "a.txt").write_text("to be or not to be " * 20)
    lines = [{"body": "the question"}, {"body": "to be"}] * 20
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def plan_of(place, *, model=None, validation=None, **data) -> ParallelPlan:
    return ParallelPlan.from_dict(
        {
            "model": model or {"path": str(place / "model")},
            "mesh": {"dp_shard": 2},
            "data": {"paths": [str(place / "a.txt")], "sequence_length": 8, "batch_size": 2, **data},
            "run": {"steps": 2},
            "validation": validation or {},
        }
    )


@pytest.mark.framework("torch")
@on_ranks(2)
def test_a_run_reads_text_by_the_models_tokenizer(place):
    Ranks().gather(b" ")  # rank 0 has written
    paths = [str(place / name) for name in ("a.txt", "b.jsonl")]
    plan = plan_of(place, paths=paths, field="body", validation={"paths": paths[:1], "batches": 1, "every": 1})
    assert check_run(plan) == []
    summary = train(plan, place / "run")
    tokens = place / "run" / "tokens" / "data.bin"
    file, written = TokenFile(tokens), tokens.stat().st_mtime_ns
    assert file.document(0).tolist()[-3:] == [0, 1, 6] and file.document(1).tolist() == [4, 5, 6]
    assert TokenFile(place / "run" / "tokens" / "validation.bin").tokens.size == 121
    if summary is not None:
        check_tokenizer(Path(summary.checkpoint), place)
        assert summary.sample is not None and set(summary.sample.split()) <= set(WORDS)
        assert summary.first_loss < 3, "eight words have a loss of about log(8)"
    further = dataclasses.replace(plan, run=dataclasses.replace(plan.run, steps=3))
    train(further, place / "run", resume="auto")
    assert tokens.stat().st_mtime_ns == written, "tokenized once"
    if get_platform().groups.rank() == 0:
        (place / "a.txt").write_text("not to be " * 20)
    again = with_tokens(plan, place / "run", Ranks())
    assert again.data.paths == (str(tokens),) and TokenFile(tokens).tokens[:3].tolist() == [3, 0, 1]


def check_tokenizer(checkpoint, place):
    """transformers finds model and tokenizer in a checkpoint, and in what is converted from it."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert {"tokenizer.json", "tokenizer_config.json"} <= manifest["files"].keys()
    to_hugging_face(checkpoint, place / "converted", dtype="bfloat16")
    for folder in (checkpoint, place / "converted"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.encode("not to be") == [3, 0, 1] and tokenizer.eos_token == "<end>"
        assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(tokenizer) + 1


def test_a_tokenizer_elsewhere_is_saved_with_the_model(place):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(place / "words.json"))
    files = tokenizer_files(plan_of(place, tokenizer=str(place / "words.json")))
    (place / "saved").mkdir()
    for name, content in files.items():
        (place / "saved" / name).write_bytes(content)
    assert sorted(files) == ["tokenizer.json", "tokenizer_config.json"]
    assert AutoTokenizer.from_pretrained(place / "saved").encode("b a b") == [1, 0, 1]
    assert tokenizer_files(plan_of(place, tokenizer="bytes")) == {}
    assert "chat_template.jinja" not in tokenizer_files(plan_of(place))
    (place / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_files(plan_of(place))["chat_template.jinja"] == b"{{ messages }}"


def test_files_are_read_once(place, monkeypatch):
    reads = []
    from_buffer = Tokenizer.from_buffer
    counted = SimpleNamespace(from_buffer=lambda raw: reads.append(len(raw)) or from_buffer(raw))
    monkeypatch.setattr("tokenizers.Tokenizer", counted)
    validation = {"paths": [str(place / "a.txt")], "batches": 1, "prompts": ["to be"]}
    plan = plan_of(place, validation=validation)
    assert check_run(plan) == []
    assert tokenizer_files(plan)
    assert len(reads) == 1
    named = json.loads((place / "model" / "tokenizer_config.json").read_text())
    (place / "model" / "tokenizer_config.json").write_text(json.dumps({**named, "eos_token": "question"}))
    assert tokenizer_of(plan).end == WORDS.index("question"), "but again where it has changed"


@on_ranks(1)
def test_text_as_bytes_is_read_once(place, monkeypatch):
    text = mock.Mock(wraps=opening.read_text)
    monkeypatch.setattr(opening, "read_text", text)
    own = plan_of(place, model={"config": "LlamaConfig", "overrides": {**SMALL, "vocab_size": 256}})
    alone = dataclasses.replace(own, mesh=MeshSection())
    with Run(alone, place / "run") as run:
        assert run.contents[0].tokens == 380 and len(run.samples) == 47
    assert text.call_count == 1


@pytest.mark.framework("torch")
@pytest.mark.parametrize("weights", [(), (2, 1)], ids=str)
def test_a_launcher_knows_the_files_that_ranks_will_read(place, weights):
    paths = [str(place / name) for name in ("a.txt", "b.jsonl")]
    plan = plan_of(place, paths=paths, field="body", weights=weights)
    assert token_files(plan, place / "run") is None, "they are still to be written"
    written = with_tokens(plan, place / "run", Ranks())
    assert token_files(plan, place / "run") == written.data == token_files(written, place / "run")
    (place / "a.txt").write_text("not to be " * 20)
    assert token_files(plan, place / "run") is None


@pytest.mark.framework("torch")
def test_weights_and_bytes(place):
    paths = [str(place / name) for name in ("a.txt", "b.jsonl")]
    plan = plan_of(place, paths=paths, field="body", weights=[3, 1], packing=True, tokenizer="bytes")
    (vocabulary,) = check_run(plan)
    assert str(vocabulary).startswith("model.overrides.vocab_size: the model knows 8 tokens, but text as bytes has 256")
    found = with_tokens(plan, place / "run", Ranks()).data
    assert [bytes(TokenFile(path).document(0).tolist())[:2] for path in found.paths] == [b"to", b"th"]
    assert found.weights == (3.0, 1.0) and found.packing


@pytest.mark.framework("torch")
def test_mistakes(place):
    write_tokens(place / "c", [[1, 2, 3] * 9], vocabulary=8)
    missing = str(place / "nowhere")
    (place / "old").mkdir()
    for name in ("config.json", "model.safetensors"):
        (place / "old" / name).write_bytes((place / "model" / name).read_bytes())
    (place / "old" / "tokenizer.model").write_bytes(b"")
    (place / "d.parquet").write_bytes(b"PAR1")
    cases = [
        (plan_of(place, tokenizer=missing), "data.tokenizer: the tokenizer"),
        (plan_of(place, paths=[str(place / "c.bin")], tokenizer="bytes"), "data.tokenizer is for text, but"),
        (plan_of(place, paths=[str(place / "c.bin")], field="body"), "data.field is for text, but"),
        (plan_of(place, max_bytes=100), "data.max_bytes is for text as bytes, but this text has a tokenizer; leave it"),
        (plan_of(place, paths=[str(place / "c.bin")], max_bytes=100), "data.max_bytes is for text as bytes, but"),
        (plan_of(place, weights=[1, 2]), "data.weights: 1 paths have 2 weights"),
        (plan_of(place, model={"path": str(place / "old")}), "old has tokenizer.model, but no tokenizer.json"),
        *(
            (
                plan_of(place, model={"config": "LlamaConfig"}, paths=[str(place / name)]),
                f"{name} would be read as bytes; name a tokenizer",
            )
            for name in ("d.parquet", "b.jsonl")
        ),
        (plan_of(place, model={"config": "LlamaConfig"}, field="body"), "has no effect without data.tokenizer"),
    ]
    for plan, expected in cases:
        (diagnostic,) = check_run(plan)
        assert expected in str(diagnostic)
    (found,) = check_run(plan_of(place, paths=[str(place / "b.jsonl")]))
    assert "b.jsonl, line 1, has no 'text'; it has 'body'" in found.message
    assert "name the text's key with --field, or data.field in a plan" in found.fix
    with pytest.raises(DataError, match="b.jsonl, line 1, has no 'text'"):
        with_tokens(plan_of(place, paths=[str(place / "b.jsonl")]), place / "run", Ranks())


@pytest.mark.framework("torch")
def test_what_a_mistake_is_told_to_do_helps(place):
    write_tokens(place / "c", [[1, 2, 3] * 9], vocabulary=8)
    tokens, text, lines = [str(place / "c.bin")], [str(place / "a.txt")], [str(place / "b.jsonl")]
    plain = {"config": "LlamaConfig"}
    save = ["config.json", "model.safetensors"]
    (place / "old").mkdir()
    for name in save:
        (place / "old" / name).write_bytes((place / "model" / name).read_bytes())
    (place / "old" / "tokenizer.model").write_bytes(b"")
    old = {"path": str(place / "old")}
    for wrong, fix, ways in (
        ({"tokenizer": str(place)}, "give a tokenizer.json, or a folder that has one", [{"tokenizer": "F"}, {}]),
        ({"paths": tokens, "tokenizer": "bytes"}, "leave it out", [{"paths": tokens}]),
        ({"paths": tokens, "field": "body"}, "leave it out", [{"paths": tokens}]),
        ({"paths": tokens, "max_bytes": 9}, "leave it out", [{"paths": tokens}]),
        ({"max_bytes": 100}, "leave it out", [{}]),
        ({"weights": [1, 2]}, "give one for each path", [{"weights": [1]}]),
        ({"paths": lines}, "name the text's key with --field, or data.field", [{"paths": lines, "field": "body"}]),
        ({"model": old}, "or name another with data.tokenizer ('bytes')", [{"model": old, "tokenizer": "F"}]),
        (
            {"model": plain, "paths": lines},
            "name a tokenizer: data.tokenizer = 'bytes', or a folder",
            [{"model": plain, "paths": lines, "tokenizer": name, "field": "body"} for name in ("bytes", "D")],
        ),
        (
            {"model": plain, "field": "body"},
            "name one, or leave it out",
            [{"model": plain}, {"model": plain, "field": "body", "tokenizer": "bytes"}],
        ),
        (
            {"paths": tokens, "model": plain, "validation": {"paths": text, "batches": 1}},
            "give both alike, or a [model] path that has the tokenizer",
            [{"paths": tokens, "validation": {"paths": text, "batches": 1}}],
        ),
        (
            {"paths": tokens, "model": plain, "validation": {"prompts": ["to be"]}},
            "leave the prompts out, or give a [model] path that has the tokenizer",
            [{"paths": tokens, "model": plain}, {"paths": tokens, "validation": {"prompts": ["to be"]}}],
        ),
    ):
        (found,) = check_run(plan_of(place, **wrong))
        assert fix in found.fix
        for way in ways:
            named = {"F": str(place / "model" / "tokenizer.json"), "D": str(place / "model")}
            if "tokenizer" in way:
                way = {**way, "tokenizer": named.get(str(way["tokenizer"]), way["tokenizer"])}
            assert check_run(plan_of(place, **way)) == [], way


@pytest.mark.framework("torch")
def test_documents_of_which_nothing_tells_the_end_are_noted(place, capsys):
    tables = plan_of(place, paths=[str(place / "b.jsonl")], field="body")
    assert text_notes(tables) == []
    (place / "model" / "tokenizer_config.json").write_text("{}")
    (note,) = text_notes(tables)
    assert "tokenizer_config.json names no eos_token. Name one there; or set data.packing = true" in note
    for data in ({"packing": True}, {"paths": [str(place / "a.txt")]}, {"tokenizer": "bytes"}):
        other = {"paths": [str(place / "b.jsonl")], "field": "body", **data}
        assert text_notes(plan_of(place, **other)) == []
    (place / "plan.toml").write_text(tables.to_toml())
    with pytest.raises(SystemExit) as ended:
        cli.main(["lint", str(place / "plan.toml")])
    assert ended.value.code == 0 and f"note: {note}\n" in capsys.readouterr().err


def test_a_validation_that_is_too_small_is_refused_before_the_training_data_is_tokenized(place):
    (place / "few.txt").write_text("to be " * 10)
    plan = plan_of(place, validation={"paths": [str(place / "few.txt")], "batches": 3, "every": 1})
    with pytest.raises(DataError, match="has 2 samples, but 3 batches of data.batch_size = 2 take 6"):
        with_tokens(plan, place / "run", Ranks())
    assert {path.stem for path in (place / "run" / "tokens").iterdir()} == {"validation"}
