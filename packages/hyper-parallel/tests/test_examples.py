"""Examples to fine-tune on: which tokens are trained, how long ones are cut, and a run on them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from chat_models import CHATML, save_tokenizer, write
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from hp_plan import DataSection, ParallelPlan, build_model
from hyper_parallel.commands import cli
from hyper_parallel.data import DataError, TokenFile, check_data, describe_cuts, open_data, open_samples
from hyper_parallel.data.examples import Examples
from hyper_parallel.data.packing import Cut, Padded
from hyper_parallel.data.samples import IGNORED
from hyper_parallel.data.tokenization.tokenized import is_prepared, prepare
from hyper_parallel.data.tokenization.tokens import Bytes, read_tokenizer
from hyper_parallel.training.checking import check_run

pytestmark = pytest.mark.framework("torch")  # transformers reads chat templates
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What was thought is left out of all answers but the last, as Qwen3's template does.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "good \u00e9 day"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "bye"},
]


@pytest.fixture
def folder(tmp_path):
    return save_tokenizer(tmp_path / "model", CHATML)


def texts(folder: Path, file: Path, format: str) -> list[tuple[str, list[str]]]:
    """Return the text of each example, and the parts of it that are trained."""
    tokenizer = read_tokenizer(str(folder))
    found = []
    for example in Examples(format, tokenizer).read(file):
        edges = np.flatnonzero(np.diff([False, *example.trained, False])).reshape(-1, 2)
        parts = [tokenizer.decode(example.tokens[a:b], special=True) for a, b in edges]
        found.append((tokenizer.decode(example.tokens, special=True), parts))
    return found


@pytest.mark.parametrize(("template", "rest"), [(CHATML, "\n"), (MARKED, "")], ids=["compared", "marked"])
def test_what_the_assistant_says_is_trained(tmp_path, template, rest):
    folder = save_tokenizer(tmp_path / "model", template)
    ((text, parts),) = texts(folder, write(tmp_path / "a.jsonl", {"messages": TALK}), "messages")
    turns = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in TALK)
    assert (text, parts) == (turns, [f"good \u00e9 day<|im_end|>{rest}", f"bye<|im_end|>{rest}"])


def test_tools_come_to_the_template(folder, tmp_path):
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    row = {"messages": [TALK[1], {**TALK[2], "tool_calls": None}], "tools": [tool, tool]}
    ((text, parts),) = texts(folder, write(tmp_path / "a.jsonl", row), "messages")
    assert text.startswith("tools: 2\n<|im_start|>user") and parts == ["good \u00e9 day<|im_end|>\n"]


def test_a_template_that_forgets_is_refused_unless_there_is_one_answer(tmp_path):
    folder = save_tokenizer(tmp_path / "model", FORGETFUL)
    file = write(tmp_path / "a.jsonl", {"messages": TALK[:3]}, {"messages": TALK})
    with pytest.raises(DataError, match=r"line 2, has a message, number 2, that the chat template writes differently"):
        texts(folder, file, "messages")
    assert len(texts(save_tokenizer(tmp_path / "marked", MARKED), file, "messages")) == 2
    ((_, parts),) = texts(folder, write(tmp_path / "b.jsonl", {"messages": TALK[:3]}), "messages")
    assert parts == ["<think></think>good \u00e9 day<|im_end|>\n"]


def test_a_token_across_the_border_is_refused(tmp_path):
    folder = save_tokenizer(tmp_path / "model", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = {**whole.get_vocab(with_added_tokens=False), "ab": 256}
    whole.model = models.BPE(vocabulary, [("a", "b")])
    whole.save(str(folder / "tokenizer.json"))
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(DataError, match="has a token, 'ab', of which only a part was said by the assistant"):
        texts(folder, write(tmp_path / "a.jsonl", row), "messages")
    parted = save_tokenizer(tmp_path / "parted", "{% for m in messages %}{{ m['content'] }}{{ '\\n' }}{% endfor %}")
    whole.save(str(parted / "tokenizer.json"))
    ((_, parts),) = texts(parted, tmp_path / "a.jsonl", "messages")
    assert parts == ["b\n"]


def test_prompts_with_completions_as_text_and_as_messages(folder, tmp_path):
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": TALK[:4], "completion": TALK[4:]}]
    (one, other) = texts(folder, write(tmp_path / "a.jsonl", *rows), "prompt-completion")
    assert one == ("<s>1+1=2<end>", ["2<end>"]), "a prompt begins as it does where a model goes on with it"
    assert other[1] == ["bye<|im_end|>\n"], "the answer in the prompt is not trained"


def test_preferences_with_a_prompt_or_one_that_both_share(folder, tmp_path):
    other = {"role": "assistant", "content": "no"}
    rows = [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"chosen": TALK[1:3], "rejected": [TALK[1], other]},
        {"prompt": TALK[:2], "chosen": [TALK[2]], "rejected": [other]},
    ]
    found = texts(folder, write(tmp_path / "a.jsonl", *rows), "preference")
    assert [parts for _, parts in found] == [
        *(["yes<end>"], ["no<end>"]),
        *(["good \u00e9 day<|im_end|>\n"], ["no<|im_end|>\n"]) * 2,
    ]
    assert found[2][0].startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("format", "row", "message"),
    [
        (
            "messages",
            {"text": "a"},
            "line 1, has no 'messages', which data.format = 'messages' needs; it has text; ren",
        ),
        ("messages", {"prompt": "a", "completion": "b"}, "it has prompt, completion; write format = 'prompt-comp"),
        ("messages", {"messages": "hi"}, "has a str where messages are expected; a message is an object such as"),
        ("messages", {"messages": [{"from": "user", "value": "hi"}]}, "has no role in message 0, but 'from', 'value'"),
        ("messages", {"messages": TALK[:2]}, "has no token of an assistant; leave the row out"),
        ("messages", {"messages": []}, "has no message; leave"),
        ("prompt-completion", {"prompt": "a", "completion": [TALK[2]]}, "has text on one side and messages on the oth"),
        ("preference", {"chosen": "a", "rejected": "b"}, "has no 'prompt'; give the text that both answers follow"),
    ],
)
def test_rows_that_are_refused(folder, tmp_path, format, row, message):
    with pytest.raises(DataError) as caught:
        texts(folder, write(tmp_path / "a.jsonl", row), format)
    assert message in str(caught.value)
    mended = {
        "messages": {"messages": TALK[:3]},
        "prompt-completion": {"prompt": "a", "completion": "b"},
        "preference": {"prompt": "q", "chosen": "a", "rejected": "b"},
    }
    named = caught.value.fix.removeprefix("write format = '").removesuffix("'")
    assert texts(folder, write(tmp_path / "b.jsonl", mended[format]), format)
    if named in mended:
        assert texts(folder, tmp_path / "a.jsonl", named)


@pytest.mark.parametrize(
    ("template", "turns", "message", "mended", "others"),
    [
        (
            "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}" + CHATML,
            TALK,
            "is refused by the chat template: TemplateError: begin with the user; change the messages, or the template",
            CHATML,
            TALK[1:3],
        ),
        (
            MARKED.replace("== 'assistant' %}", "== 'assistant' and loop.last %}"),
            TALK,
            "has 2 messages of an assistant, but the template marks 1; mend the {% generation %} marks of the template",
            MARKED,
            TALK[:3],
        ),
    ],
    ids=["raises", "marks"],
)
def test_what_a_template_refuses_is_changed_or_the_template_is(tmp_path, template, turns, message, mended, others):
    folder = save_tokenizer(tmp_path / "model", template)
    file = write(tmp_path / "a.jsonl", {"messages": turns})
    with pytest.raises(DataError) as caught:
        texts(folder, file, "messages")
    assert message in str(caught.value)
    ((_, of_messages),) = texts(folder, write(tmp_path / "b.jsonl", {"messages": others}), "messages")
    ((_, of_template),) = texts(save_tokenizer(tmp_path / "mended", mended), file, "messages")
    assert (len(of_messages), len(of_template)) == (1, 2)


def test_messages_need_a_template(tmp_path):
    folder = save_tokenizer(tmp_path / "model", None)
    file = write(tmp_path / "a.jsonl", {"messages": TALK})
    with pytest.raises(DataError, match="has no chat template; put its chat_template.jinja beside"):
        texts(folder, file, "messages")
    with pytest.raises(DataError, match="has messages, but the tokenizer has no chat template"):
        list(Examples("messages", Bytes()).read(file))
    with pytest.raises(DataError, match="is text, which has no rows; give files that have: .jsonl, .parquet, .arrow"):
        list(Examples("messages", Bytes()).read(tmp_path / "a.txt"))
    (folder / "chat_template.jinja").write_text(CHATML)
    assert texts(folder, file, "messages")
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    assert texts(save_tokenizer(tmp_path / "plain", None), tmp_path / "b.jsonl", "prompt-completion")


def test_parquet_has_keys_that_a_message_lacks(folder, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": [{**TALK[1], "name": None}, TALK[2]]}]), tmp_path / "a.parquet"
    )
    ((_, parts),) = texts(folder, tmp_path / "a.parquet", "messages")
    assert parts == ["good \u00e9 day<|im_end|>\n"]


def prepared(folder: Path, tmp_path: Path, format: str, *rows) -> str:
    prepare([str(write(tmp_path / "rows.jsonl", *rows))], tmp_path / "out", read_tokenizer(str(folder)), format=format)
    return str(tmp_path / "out.bin")


def test_files_have_masks_and_say_their_format(folder, tmp_path):
    row = {"prompt": "abc", "completion": "de"}
    path = prepared(folder, tmp_path, "prompt-completion", row, row)
    file = TokenFile(path)
    assert file.mask is not None and file.mask.tolist() == [0, 0, 0, 0, 1, 1, 1] * 2
    tokenizer, rows = read_tokenizer(str(folder)), [str(tmp_path / "rows.jsonl")]
    assert is_prepared(rows, tmp_path / "out", tokenizer, format="prompt-completion")
    assert not is_prepared(rows, tmp_path / "out", tokenizer)
    section = DataSection(paths=(path,), sequence_length=8, batch_size=1)
    with pytest.raises(DataError, match="was prepared as 'prompt-completion', but data.format is 'text'") as caught:
        check_data(section)
    assert caught.value.fix == "write format = 'prompt-completion', or prepare the data again"
    section = dataclasses.replace(section, format="prompt-completion")
    check_data(section)
    for suffix, message in (
        ("json", "out.json can't be read: .*; remove it, or prepare"),
        ("mask", "out.mask has 1 bytes, but out.bin has 14 tokens; prepare the data again"),
    ):
        (tmp_path / f"out.{suffix}").write_bytes(b"\1")
        with pytest.raises(DataError, match=message):
            check_data(section)
        prepared(folder, tmp_path, "prompt-completion", row, row)
        check_data(section)


class Numbered:
    """Documents of these lengths, whose last token alone is trained."""

    def __init__(self, *sizes: int) -> None:
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def document(self, number):
        return (np.arange(self.starts[number + 1] - self.starts[number]) + 100 * number).astype(np.uint16)

    def trained(self, number):
        return (np.arange(self.starts[number + 1] - self.starts[number]) == 1).astype(np.uint8)


@pytest.mark.parametrize(
    ("policy", "left", "shortened", "dropped"),
    [("right", [[0, 1, 2], [100, 101, 102], [200, 201]], 1, 0), ("left", [[0, 1, 2], [200, 201]], 0, 1)],
)
def test_long_examples_are_cut_and_counted(policy, left, shortened, dropped):
    cut = Cut(Numbered(3, 5, 2), 3, policy)
    assert [cut.document(number).tolist() for number in range(len(cut))] == left
    assert (cut.shortened, cut.dropped) == (shortened, dropped), "one without an answer left is left out"
    assert [len(cut.trained(number)) for number in range(len(cut))] == [len(each) for each in left]


def test_long_examples_are_left_out_or_refused():
    assert (len(cut := Cut(Numbered(3, 5, 2), 3, "drop")), cut.dropped) == (2, 1)
    assert (len(cut := Cut(Numbered(3, 5, 2, 2), 3, "drop", together=2)), cut.dropped) == (2, 2), "with its pair"
    with pytest.raises(DataError, match="example 1 has 5 tokens, and a sample takes 3; make data.sequence_length 5"):
        Cut(Numbered(3, 5, 2), 3, "refuse")
    assert len(Cut(Numbered(3, 5, 2), 5, "refuse")) == 3 and len(Cut(Numbered(3, 5, 2), 3, "right")) == 3
    with pytest.raises(DataError, match="no example has a token to train in 3 tokens"):
        Cut(Numbered(5, 5), 3, "drop")
    assert len(Cut(Numbered(5, 5), 5, "drop")) == 2


def test_a_row_has_one_example_with_the_answers_labels():
    samples = Padded(Numbered(3, 2, 3, 2), 4, seed=1, width=2, padding=9)
    assert len(samples) == 2
    rows = samples.rows(np.array([0, 1]))
    order = [int(row[0]) // 100 for row in rows.tokens]
    assert order in ([0, 1, 2, 3], [2, 3, 0, 1])
    assert rows.sizes.tolist() == [3, 2, 3, 2]
    for number, tokens, labels, positions in zip(order, rows.tokens, rows.labels, rows.positions):
        size = (3, 2, 3, 2)[number]
        assert tokens.tolist() == [*(100 * number + np.arange(size)), *[9] * (4 - size)]
        assert labels.tolist() == [IGNORED, 100 * number + 1, IGNORED, IGNORED]
        assert positions.tolist() == [*range(size), *range(4 - size)]


@pytest.mark.parametrize("packing", [False, True])
def test_samples_of_a_plan_have_the_labels_of_answers_alone(folder, tmp_path, packing):
    rows = [{"prompt": "a" * number, "completion": "bc"} for number in range(1, 6)]
    path = prepared(folder, tmp_path, "prompt-completion", *rows)
    section = DataSection(paths=(path,), sequence_length=7, batch_size=1, packing=packing, format="prompt-completion")
    samples = open_samples(section, seed=0)
    found = samples.rows(np.arange(len(samples)))
    trained = found.labels[found.labels != IGNORED]
    tokenizer = read_tokenizer(str(folder))
    assert sorted(tokenizer.decode(trained.tolist(), special=True).replace("<end>", "")) == sorted(
        "bc" * 3 + "bc"[:1] + "bc"
    )
    assert describe_cuts(section, open_data(section)) == ", 2 examples cut to 7"


@pytest.mark.parametrize("format", ["prompt-completion", "preference"])
def test_examples_keep_the_order_of_their_file(folder, tmp_path, format):
    rows = [{"prompt": "a" * number, "completion": "b", "chosen": "b", "rejected": "c"} for number in range(1, 6)]
    path = prepared(folder, tmp_path, format, *rows)
    samples = open_samples(DataSection(paths=(path,), sequence_length=9, shuffle=False, format=format), seed=4)
    if format == "preference":
        weighted = DataSection(paths=(path, path), sequence_length=9, weights=(1.0, 1.0), format=format)
        with pytest.raises(DataError, match="pairs of answers are not mixed by weights; leave weights out"):
            check_data(weighted)
        assert len(open_samples(dataclasses.replace(weighted, weights=()), seed=4)) == 2 * len(samples)
    found, a = samples.rows(np.arange(5, 10)), read_tokenizer(str(folder)).encode(["a"])[0][0]
    sizes = [1, 2, 3, 4, 5] if format == "prompt-completion" else [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert (found.tokens == a).sum(1).tolist() == sizes


def test_a_plan_is_checked_and_shown(folder, tmp_path):
    build_model(ParallelPlan.from_dict({"model": MODEL})).save_pretrained(folder)
    write(tmp_path / "talk.jsonl", *[{"messages": TALK}] * 4)
    plan = tmp_path / "plan.toml"
    data = 'paths = ["talk.jsonl"]\nformat = "messages"\nsequence_length = 64\nbatch_size = 2'
    plan.write_text(f'[model]\npath = "{folder}"\n[data]\n{data}\n'.replace("talk.jsonl", str(tmp_path / "talk.jsonl")))
    assert check_run(ParallelPlan.from_toml(plan)) == []
    shown = CliRunner().invoke(cli.app, ["data", "show", str(plan)], catch_exceptions=False).output
    assert "document 0: " in shown and "of which a sample has 64 (data.truncation); a loss is taken of 13" in shown
    assert "\u27e6good \u00e9 day<|im_end|>" in shown
    line = CliRunner().invoke(cli.app, ["data", "show", str(plan), "--json"], catch_exceptions=False).output
    assert [text for text, on in json.loads(line)["parts"] if on] == ["good \u00e9 day<|im_end|>\n"]
    wrong = CliRunner().invoke(cli.app, ["data", "show", str(plan), "--first", "9"])
    assert wrong.exit_code == 1 and "the data has no document 9; they are counted from 0 on" in wrong.output
    last = CliRunner().invoke(cli.app, ["data", "show", str(plan), "--first", "3"])
    assert last.exit_code == 0 and "document 3: " in last.output
    (found,) = check_run(
        ParallelPlan.from_dict(
            {
                **ParallelPlan.from_toml(plan).to_dict(),
                "data": {
                    "paths": [str(tmp_path / "talk.jsonl")],
                    "format": "preference",
                    "sequence_length": 64,
                    "batch_size": 2,
                },
            }
        )
    )
    assert found.key == "data.format" and found.fix.startswith("give lines with 'prompt', 'chosen' and 'rejected'")


MODEL = {
    "config": "LlamaConfig",
    "overrides": {
        "vocab_size": 260,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}


def test_the_answers_of_a_pair_are_shown_as_such(folder, tmp_path):
    file = write(tmp_path / "pairs.jsonl", {"prompt": "hi", "chosen": "good", "rejected": "bad"})
    data = {"paths": [str(file)], "format": "preference", "sequence_length": 16}
    plan = tmp_path / "plan.toml"
    plan.write_text(ParallelPlan.from_dict({"model": {"path": str(folder)}, "data": data}).to_toml())
    result = CliRunner().invoke(cli.app, ["data", "show", str(plan), "--count", "2"])
    assert result.exit_code == 0, result.output
    assert "document 0 (pair 0, chosen): " in result.output and "document 1 (pair 0, rejected): " in result.output


def test_conversations_are_not_taken_for_pairs(folder, tmp_path):
    """The objective may have asked for pairs, so nobody is sent back to the format of the file."""
    file = write(tmp_path / "chat.jsonl", {"messages": TALK})
    with pytest.raises(DataError, match="no 'chosen'") as caught:
        list(Examples("preference", read_tokenizer(str(folder))).read(file))
    assert caught.value.fix.startswith("give lines with 'prompt', 'chosen' and 'rejected'")
