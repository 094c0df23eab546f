"""What a plan may validate on."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from hp_checkpoint.extend import Ranks
from hp_plan.extend import read_plan
from hyper_parallel.data import DataError, write_tokens
from hyper_parallel.data.tokenization.tokenized import prepare
from hyper_parallel.data.tokenization.tokens import Bytes
from hyper_parallel.training.checking import check_run
from hyper_parallel.training.evaluating import Validation


def problems(tables, config=None):
    plan, diagnostics = read_plan(tables)
    report = SimpleNamespace(config=config, model=None)
    return [(each.key, f"{each.message}; {each.fix}") for each in [*diagnostics, *check_run(plan, report)]]


@pytest.mark.parametrize(
    ("section", "model", "text", "mended"),
    [
        (
            {"batches": 3},
            {},
            "100 samples, but 3 batches of data.batch_size = 40 take 120; .*make validation.batches at most 2",
            {"validation": {"batches": 2}},
        ),
        ({"paths": ["nowhere"]}, {}, "nowhere does not exist; give files", {"validation": {"paths": None}}),
        (
            {},
            {"overrides": {"vocab_size": 100}},
            "knows 100 tokens.*; make it 256 or more",
            {"model": {"overrides": {"vocab_size": 256}}},
        ),
        ({"every": 0}, {}, "at least 1", {"validation": {"every": 1}}),
    ],
    ids=str,
)
def test_validation_that_can_not_be_is_refused_before_the_launch(tmp_path, section, model, text, mended):
    (tmp_path / "text").write_bytes(b"x" * 1000)
    (tmp_path / "more").write_bytes(b"x" * 2000)
    data = {"paths": [str(tmp_path / "more")], "sequence_length": 10, "batch_size": 40}
    tables = {"model": model, "data": data, "validation": {"paths": [str(tmp_path / "text")], "batches": 2, **section}}
    ((_, found),) = [each for each in problems(tables) if each[0].startswith(("validation", "model"))]
    assert re.search(text, found)
    for name, values in mended.items():
        tables[name] |= {key: [str(tmp_path / "text")] if value is None else value for key, value in values.items()}
    assert problems(tables) == []


def test_bytes_do_not_validate_a_model_of_tokens(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 1000)
    write_tokens(tmp_path / "corpus", [[1, 2, 3] * 100], vocabulary=300)
    paths = {"text": [str(tmp_path / "text")], "tokens": [str(tmp_path / "corpus.bin")]}
    for trained, validated in (("text", "tokens"), ("tokens", "text")):
        data = {"paths": paths[trained], "sequence_length": 10, "batch_size": 2}
        tables = {"data": data, "validation": {"paths": paths[validated], "batches": 1}}
        (found,) = [text for key, text in problems(tables) if key == "validation.paths"]
        assert f"is trained on {'text as bytes' if trained == 'text' else 'token files'} and would be" in found
        other = "name data.tokenizer" if trained == "text" else "a [model] path that has the tokenizer"
        assert found.endswith(f"; give both alike, or {other}")
        named = {"data": {**data, "tokenizer": "bytes"}, "validation": tables["validation"]}
        assert (problems(named) == []) == (trained == "text")
    prepare(paths["text"], tmp_path / "written", Bytes())
    written = [str(tmp_path / "written.bin")]
    for trained, validated in ((written, paths["tokens"]), (paths["tokens"], written)):
        data = {"paths": trained, "sequence_length": 10, "batch_size": 2}
        assert problems({"data": data, "validation": {"paths": validated, "batches": 1}}) == []


def test_prompts_need_a_tokenizer_and_tokens(tmp_path):
    write_tokens(tmp_path / "corpus", [[1, 2, 3] * 100], vocabulary=300)
    (tmp_path / "text").write_bytes(b"x" * 1000)
    for name, prompt, text in (("corpus.bin", "a", "doesn't say which tokenizer"), ("text", "", "'' has no tokens")):
        data = {"paths": [str(tmp_path / name)], "sequence_length": 10}
        found = problems({"data": data, "validation": {"prompts": [prompt]}})
        assert [(key, text in message) for key, message in found] == [("validation.prompts", True)]
    assert problems({"data": data, "validation": {"prompts": ["a"]}}) == []
    data = {"paths": [str(tmp_path / "corpus.bin")], "sequence_length": 10}
    assert problems({"data": data}) == []


@pytest.mark.parametrize(
    ("prompt", "wanted", "text", "mended"),
    [
        (
            "to be",
            12,
            ", and 12 more go beyond the model's 16 positions; make validation.prompt_tokens at most 11, or",
            ("to be", 11),
        ),
        (
            "to be or not to be",
            1,
            "has 18 tokens, and 1 more go beyond .*; make the prompt shorter, or raise max_position_embeddings",
            ("to be or not to", 1),
        ),
        ("to be", 11, None, ("to be", 11)),
    ],
)
def test_prompts_end_where_the_models_positions_do(tmp_path, prompt, wanted, text, mended):
    (tmp_path / "text").write_bytes(b"x" * 1000)
    data = {"paths": [str(tmp_path / "text")], "sequence_length": 10}
    tables = {"data": data, "validation": {"prompts": [prompt], "prompt_tokens": wanted}}
    found = problems(tables, SimpleNamespace(max_position_embeddings=16))
    assert [key for key, _ in found] == ["validation.prompts"] * (text is not None)
    assert not found or re.search(text, found[0][1])
    assert problems(tables) == [], "a model that says of no end has none"
    assert problems(tables, SimpleNamespace(max_position_embeddings=19)) == []
    tables["validation"] = {"prompts": [mended[0]], "prompt_tokens": mended[1]}
    assert problems(tables, SimpleNamespace(max_position_embeddings=16)) == []


def test_a_validation_counts_only_batches_with_labels(tmp_path):
    write_tokens(tmp_path / "corpus", [[1, 2, 3] * 100], vocabulary=300)
    tables = {
        "data": {"paths": [str(tmp_path / "corpus.bin")], "sequence_length": 10, "batch_size": 2},
        "validation": {"paths": [str(tmp_path / "corpus.bin")], "batches": 2},
    }
    validation = Validation(read_plan(tables)[0], slice(0, 2), vocabulary=None)
    answers = iter([([3.0, 0.5], 8.0), ([0.0, 0.0], 0.0)])
    trainer = SimpleNamespace(evaluate=lambda _: next(answers), measures=("accuracy",))
    assert validation.values(trainer, Ranks()) == [3.0, 0.5]
    answers = iter([([0.0, 0.0], 0.0)] * 2)
    with pytest.raises(DataError, match="no token to predict"):
        validation.values(trainer, Ranks())
