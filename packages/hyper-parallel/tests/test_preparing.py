"""Tokenizing files before training."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from hyper_parallel.commands import cli
from hyper_parallel.data import DataError, TokenFile
from hyper_parallel.data.documents import read_documents
from hyper_parallel.data.tokenization.tokenized import prepare
from hyper_parallel.data.tokenization.tokens import Bytes, read_tokenizer


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes("one \u00e9".encode() + b"\xff")
    lines = [{"text": "two"}, {"text": ""}, {"text": "three"}]
    (folder / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    return folder


def documents_of(path):
    file = TokenFile(path)
    return [bytes(file.document(number).tolist()) for number in range(len(file))]


def test_files_become_documents_of_bytes(texts, tmp_path):
    shown = []
    prepared = prepare(
        [str(texts)], tmp_path / "out", Bytes(), progress=lambda file, tokens: shown.append((file.name, tokens))
    )
    assert documents_of(tmp_path / "out") == [b"one \xc3\xa9\xff", b"two", b"three"]
    assert (prepared.tokens, prepared.documents, prepared.vocabulary) == (15, 3, 256)
    assert shown == [("a.txt", 7), ("b.jsonl", 8)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.idx", "out.json", "texts"]
    assert json.loads((tmp_path / "out.json").read_text())["sources"].keys() == {
        str(texts / "a.txt"),
        str(texts / "b.jsonl"),
    }


class Counting(Bytes):
    """Bytes that fail at a text, and count those before."""

    def __init__(self, wrong):
        self.wrong, self.encoded = wrong, 0

    def encode(self, texts):
        if self.wrong in texts:
            raise KeyboardInterrupt
        self.encoded += len(texts)
        return super().encode(texts)


def test_an_interrupted_call_goes_on_where_it_was(texts, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        prepare([str(texts)], tmp_path / "out", Counting("three"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parts", "texts"]
    again = Counting("")
    again.wrong = None
    prepare([str(texts)], tmp_path / "out", again)
    assert again.encoded == 3  # the lines of b.jsonl alone
    assert documents_of(tmp_path / "out") == [b"one \xc3\xa9\xff", b"two", b"three"]
    (texts / "a.txt").write_text("other")
    prepare([str(texts)], tmp_path / "out", Bytes())
    assert documents_of(tmp_path / "out")[0] == b"other"


@pytest.mark.parametrize(
    ("line", "message", "mended", "field"),
    [
        ("{", "c.jsonl, line 2, is not JSON: ", '{"text": "x"}', "text"),
        ("[1]", 'c.jsonl, line 2, is a list, not an object; write {"text": ...}', '{"text": "x"}', "text"),
        (
            '{"body": "x"}',
            "c.jsonl, line 2, has no 'text'; it has 'body'; name the text's key with --field",
            '{"body": "x"}',
            "body",
        ),
        ('{"text": 3}', "c.jsonl, line 2, has int in 'text', not text", '{"text": 3, "body": "x"}', "body"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path, line, message, mended, field):
    file = tmp_path / "c.jsonl"
    file.write_text('{"text": "fine", "body": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=re.escape(message)):
        prepare([str(file)], tmp_path / "out", Bytes())
    assert not (tmp_path / "out.bin").exists()
    file.write_text('{"text": "fine", "body": "fine"}\n' + mended + "\n")
    prepare([str(file)], tmp_path / "out", Bytes(), field=field)
    assert documents_of(tmp_path / "out") == [b"fine", b"x"]


def test_files_without_text_and_parquet_without_its_library_are_refused(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="the 1 files have no text; give files with text"):
        prepare([str(tmp_path / "d.jsonl")], tmp_path / "out", Bytes())
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    assert prepare([str(tmp_path / "d.jsonl")], tmp_path / "out", Bytes())
    with pytest.raises(DataError, match="bytes have no token '<end>'; give a tokenizer, or no end token"):
        read_tokenizer(None, end="<end>")
    assert read_tokenizer(None).end is None
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist; give a tokenizer\.json, or a folder"):
        read_tokenizer(str(tmp_path))


@pytest.fixture
def tokenizer_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed in this environment")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(["one two three two one", "three two"], trainer)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_of_a_folder_ends_each_document(texts, tmp_path, tokenizer_folder):
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    tokenizer = read_tokenizer(str(tokenizer_folder))
    assert tokenizer.end == 1
    prepare([str(texts / "b.jsonl")], tmp_path / "out", tokenizer)
    file = TokenFile(tmp_path / "out")
    assert [tokenizer.decode(file.document(number).tolist()) for number in range(len(file))] == ["two", "three"]
    assert [file.document(number)[-1] for number in range(len(file))] == [1, 1]
    assert int(np.max(file.tokens)) < tokenizer.vocabulary
    plain = read_tokenizer(str(tokenizer_folder / "tokenizer.json"), end="<unk>")
    assert plain.end == 0
    assert plain.digest != tokenizer.digest


def test_a_tokenizer_that_can_not_be_read_is_named(tokenizer_folder):
    with pytest.raises(DataError, match=r"has no token '</s>'; give the text of one of its special tokens"):
        read_tokenizer(str(tokenizer_folder), end="</s>")
    assert read_tokenizer(str(tokenizer_folder), end="<end>").end == 1
    assert read_tokenizer(str(tokenizer_folder / "tokenizer.json"), end="<end>").end == 1  # or the file itself
    config = tokenizer_folder / "tokenizer_config.json"
    config.write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json can't be read.*; mend it, or give the end token by"):
        read_tokenizer(str(tokenizer_folder))
    assert read_tokenizer(str(tokenizer_folder), end="<end>").end == 1
    config.write_text('{"eos_token": "<end>"}')
    assert read_tokenizer(str(tokenizer_folder)).end == 1
    (tokenizer_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json can't be read: "):
        read_tokenizer(str(tokenizer_folder), end="<end>")


def test_other_files_are_one_document(tmp_path):
    (tmp_path / "x.md").write_text("a\nb")
    assert list(read_documents(tmp_path / "x.md", field="text")) == ["a\nb"]


@pytest.fixture
def pyarrow():
    return pytest.importorskip("pyarrow", reason="pyarrow is not installed in this environment")


def test_rows_of_parquet_and_of_a_dataset_on_disk_are_documents(pyarrow, tmp_path):
    from pyarrow import parquet

    table = pyarrow.table({"id": [1, 2, 3], "body": ["one", "", "three"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    dataset = tmp_path / "dataset"  # what Dataset.save_to_disk writes
    dataset.mkdir()
    with pyarrow.ipc.new_stream(dataset / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("dataset_info.json", "state.json"):
        (dataset / name).write_text("{}")
    for paths in (["a.parquet"], ["dataset"]):
        prepare([str(tmp_path / path) for path in paths], tmp_path / "out", Bytes(), field="body")
        assert documents_of(tmp_path / "out") == [b"one", b"three"]
    with pytest.raises(
        DataError, match=r"a\.parquet has no column 'text'; it has id, body; name the text's column with"
    ):
        list(read_documents(tmp_path / "a.parquet", field="text"))
    with pytest.raises(DataError, match=r"a\.parquet, row 0, has int in 'id', not text; name a column of strings"):
        list(read_documents(tmp_path / "a.parquet", field="id"))
    assert list(read_documents(tmp_path / "a.parquet", field="body")) == ["one", "", "three"]
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"b\.parquet can't be read: .*; leave it out, or write it again"):
        list(read_documents(tmp_path / "b.parquet", field="body"))
    parquet.write_table(table, tmp_path / "b.parquet")
    assert list(read_documents(tmp_path / "b.parquet", field="body")) == ["one", "", "three"]


def test_the_command_prepares_and_says_what_is_wrong(texts, tmp_path):
    done = CliRunner().invoke(cli.app, ["data", "prepare", str(texts), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert f"{tmp_path / 'out'}: 15 tokens in 3 documents\n" in done.output
    assert documents_of(tmp_path / "out")[1] == b"two"
    refused = CliRunner().invoke(cli.app, ["data", "prepare", str(tmp_path / "none"), "--out", str(tmp_path / "x")])
    assert refused.exit_code == 1
    assert "error: the data file" in refused.output
    assert "does not exist; give files or folders of text" in refused.output


def test_a_tokenizer_refuses_text_that_is_not_utf8(tokenizer_folder):
    tokenizer = read_tokenizer(str(tokenizer_folder))
    with pytest.raises(DataError, match=r"begins with 'b\\udcff' is not UTF-8, so the tokenizer can't .*; convert its"):
        tokenizer.encode(["a", b"b\xff".decode(errors="surrogateescape")])
    assert len(tokenizer.encode(["a", b"b\xff".decode("latin-1")])) == 2  # converted


def test_a_file_that_is_not_utf8_is_named(texts, tmp_path, tokenizer_folder):
    with pytest.raises(DataError, match=r"texts/a\.txt: the document that begins with 'one .* is not UTF-8"):
        prepare([str(texts)], tmp_path / "out", read_tokenizer(str(tokenizer_folder)))
    prepare([str(texts / "b.jsonl")], tmp_path / "out", read_tokenizer(str(tokenizer_folder)))  # left out
    (texts / "a.txt").write_text((texts / "a.txt").read_text("latin-1"), "utf-8")  # converted
    prepare([str(texts)], tmp_path / "out", read_tokenizer(str(tokenizer_folder)))
    (texts / "b.jsonl").write_text('{"text": "\u00e9"}', "latin-1")
    with pytest.raises(DataError, match=r"b\.jsonl is not UTF-8: .*; convert it, or leave it out"):
        prepare([str(texts)], tmp_path / "out", Bytes())
    (texts / "b.jsonl").write_text((texts / "b.jsonl").read_text("latin-1"), "utf-8")
    prepare([str(texts)], tmp_path / "out", Bytes())
    assert documents_of(tmp_path / "out")[1] == "\u00e9".encode()


def test_a_tokenizer_without_an_end_token_is_noted(texts, tmp_path, tokenizer_folder):
    def said(*arguments):
        command = ["data", "prepare", *arguments, "--tokenizer", str(tokenizer_folder), "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(cli.app, command)
        assert done.exit_code == 0, done.output
        return done.output

    rows, config = str(texts / "b.jsonl"), tokenizer_folder / "tokenizer_config.json"
    note = "note: documents run together, with no token at their end: "
    assert f"{note}{config} does not exist. Name one there, or pass --end\n" in said(rows)
    config.write_text("{}")
    assert f"{note}{config} names no eos_token. Name one there" in said(rows)
    assert "note" not in said(rows, "--end", "<end>")
    (texts / "c.txt").write_text("one")
    assert "note" not in said(str(texts / "c.txt")), "one document has nothing to run into"
