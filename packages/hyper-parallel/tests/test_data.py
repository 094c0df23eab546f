from __future__ import annotations

import numpy as np
import pytest

from hp_plan import DataSection
from hyper_parallel.data import (
    IGNORED,
    DataError,
    check_data,
    check_text,
    find_files,
    open_samples,
    read_text,
    write_tokens,
)
from hyper_parallel.data.tokenization.tokenized import prepare
from hyper_parallel.data.tokenization.tokens import Bytes, TokenFile


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.py").write_bytes(bytes(range(100, 200)))
    (tmp_path / "b" / ".hidden").write_bytes(b"x" * 50)
    return tmp_path


def test_the_standard_library_is_there_without_being_asked_for():
    files = find_files([])
    assert len(files) > 100
    assert all(file.suffix == ".py" and "site-packages" not in file.parts for file in files)
    assert check_text([], sequence_length=128, max_bytes=1 << 40) > 5_000_000
    for file in files:
        file.read_bytes().decode("utf-8")  # every tokenizer reads them


def test_files_and_folders_are_read_in_order(text):
    assert read_text([str(text)], max_bytes=1000).tolist() == list(range(200))
    assert check_text([str(text)], sequence_length=200, max_bytes=1000) == 200
    assert len(read_text([str(text)], max_bytes=150)) == 150


def section(*paths, **options):
    return DataSection(paths=tuple(map(str, paths)), sequence_length=9, **options)


def test_every_layout_of_ranks_draws_the_same_samples(text):
    samples = open_samples(section(text), seed=3)
    assert len(samples) == 200 // 9
    numbers = np.arange(84, 96)
    whole = samples.rows(numbers)
    assert whole.tokens.shape == (12, 9)
    assert whole.tokens.dtype == np.int64
    for parts in (2, 3, 4):
        rows = [samples.rows(part).tokens for part in np.split(numbers, parts)]
        assert np.concatenate(rows).tolist() == whole.tokens.tolist()
    assert open_samples(section(text), seed=4).rows(numbers).tokens.tolist() != whole.tokens.tolist()
    epoch = samples.rows(np.arange(22)).tokens[:, 0]
    assert sorted(epoch.tolist()) == list(range(0, 198, 9))


def test_samples_keep_the_order_of_the_file(text):
    samples = open_samples(section(text, shuffle=False), seed=3)
    assert samples.rows(np.arange(22)).tokens[:, 0].tolist() == list(range(0, 198, 9))


@pytest.fixture
def tokens(tmp_path):
    for number, name in enumerate(("a", "b")):
        documents = [[50 * number + token] * (token % 7 + 1) for token in range(40)]
        write_tokens(tmp_path / name, documents, vocabulary=90)
    (tmp_path / "a.json").write_text('{"vocabulary": 90}')
    return [tmp_path / "a.bin", tmp_path / "b.bin"]


def test_token_files_are_read_side_by_side_packed_or_mixed(tokens):
    assert check_data(section(*tokens)) == 90
    assert check_data(section(tokens[1])) == 0  # nothing says what its vocabulary is
    together = open_samples(section(*tokens), seed=0)
    assert len(together) == 2 * (157 // 9)
    mixed = open_samples(section(*tokens, weights=(3.0, 1.0)), seed=0)
    of_b = (mixed.rows(np.arange(4096)).tokens[:, 0] >= 50).sum()
    assert of_b == 1024
    packed = open_samples(section(tokens[0], packing=True), seed=0)
    rows = packed.rows(np.arange(len(packed)))
    assert len(rows) == 18  # 157 tokens of 40 documents, none of them cut
    assert ((rows.labels == rows.tokens) | (rows.labels == IGNORED)).all()
    assert (rows.positions == 0).sum() >= 40
    assert rows.sizes.sum() == 155 and together.rows(np.arange(3)).sizes.tolist() == [9, 9, 9]


def test_packed_files_without_weights_give_each_document_once_an_epoch(tokens, tmp_path):
    write_tokens(tmp_path / "small", [[89, 88]], vocabulary=90)  # far under a mixture's least share
    write_tokens(tmp_path / "large", [[token % 80] * 9 for token in range(9000)], vocabulary=90)
    files = [*tokens, tmp_path / "small.bin", tmp_path / "large.bin"]
    samples = open_samples(section(*files, packing=True), seed=0)
    rows = samples.rows(np.arange(len(samples)))
    documents = [TokenFile(file).document(n) for file in files for n in range(len(TokenFile(file).starts) - 1)]
    assert (rows.positions == 0).sum() >= len(documents)
    found = np.bincount(rows.tokens.ravel(), minlength=90)[1:]  # 0 is the padding as well
    assert found.tolist() == np.bincount(np.concatenate(documents), minlength=90)[1:].tolist()


@pytest.mark.parametrize(
    ("paths", "options", "message", "mended"),
    [
        (
            ["a", "text"],
            {},
            "a.bin is a token file, but .*a.txt is text; write tokens for the text too",
            (["a", "w"], {}),
        ),
        (["text"], {"packing": True}, "packing is for token files, but .* as bytes; write token files", (["w"], {})),
        (["text"], {"weights": (1.0,)}, "weights is for token files, but the data is text as bytes", (["w"], {})),
        (
            ["a", "b"],
            {"weights": (1.0,)},
            "2 paths have 1 weights; give one for each path",
            (["a", "b"], {"weights": (1.0, 2.0)}),
        ),
        (
            ["a", "b"],
            {"weights": (1.0, 0.0)},
            r"are positive numbers, got \(1.0, 0.0\); leave out a source",
            (["a"], {"weights": (1.0,)}),
        ),
        (["w"], {}, r"the token file .*w\.bin does not exist; hyper-parallel data prepare writes a .bin", (["w"], {})),
        (["a"], {"packing": True, "shuffle": False}, "packed and .*; leave shuffle, or", (["a"], {"packing": False})),
        (["a"], {"weights": (1.0,), "shuffle": False}, "packed and weighted .*, out", (["a"], {"shuffle": True})),
    ],
)
def test_data_that_does_not_fit_together_is_refused(tokens, text, paths, options, message, mended):
    named = {"a": tokens[0], "b": tokens[1], "text": text / "a.txt", "w": tokens[0].with_name("w.bin")}
    with pytest.raises(DataError, match=message):
        check_data(section(*(named[path] for path in paths), **options))
    prepare([str(text / "a.txt")], tokens[0].with_name("w"), Bytes())  # what `data prepare` does
    others, changed = mended
    assert check_data(section(*(named[path] for path in others), **{**options, **changed})) >= 0


def test_a_token_beyond_the_vocabulary_is_named_when_it_is_read(tokens):
    samples = open_samples(section(*tokens), seed=0, vocabulary=80)
    with pytest.raises(DataError, match=r"b\.bin has token 80 at place \d+, but the model's vocabulary has 80"):
        samples.rows(np.arange(len(samples)))
    (tokens[0].with_suffix(".json")).write_text("[]")
    with pytest.raises(DataError, match=r"a\.json can't be read"):
        check_data(section(*tokens))
    (tokens[0].with_suffix(".json")).unlink()  # "remove it, or prepare the data again"
    check_data(section(*tokens))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "the data file {path} does not exist; give files or folders of text"),
        (
            lambda path: path.touch(),
            r"the data file {path} is empty \(0 bytes\); leave it out, or give another",
        ),
        (lambda path: path.mkdir(), "the data folder {path} has no files; give files or folders of text"),
        (
            lambda path: path.write_bytes(b"short"),
            "{path} has 5 bytes of text, but one sample takes 16; give more, or make data.sequence_length at most 5",
        ),
    ],
)
def test_text_that_can_not_be_trained_on(tmp_path, make, message):
    path = tmp_path / "text"
    make(path)
    with pytest.raises(DataError, match=message.format(path=path)):
        check_text([str(path)], sequence_length=16, max_bytes=1000)
    if path.is_file() and path.stat().st_size:
        assert check_text([str(path)], sequence_length=5, max_bytes=1000) == 5
    other = tmp_path / "other"
    other.write_bytes(b"x" * 16)
    assert check_text([str(other)], sequence_length=16, max_bytes=1000) == 16
