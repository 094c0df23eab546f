"""Files of tokens."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest

from hyper_parallel.data import DataError, Packed, TokenFile, Windows, write_tokens

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 11, 12]]


@pytest.fixture
def stem(tmp_path):
    assert write_tokens(tmp_path / "corpus", DOCUMENTS, vocabulary=50) == 8
    return tmp_path / "corpus"


def test_documents_are_read_as_they_were_written(stem):
    for path in (stem, f"{stem}.bin", f"{stem}.idx"):
        file = TokenFile(path)
        assert [file.document(number).tolist() for number in range(len(file))] == [[5, 6, 7], [8], [9, 10, 11, 12]]
        assert file.tokens.dtype == np.uint16
        assert isinstance(file.tokens, np.memmap)
    assert Windows([file.tokens], 4, seed=0).rows(np.arange(2)).tokens.max() == 12
    packed = Packed(file, 4, seed=0, padding=0)
    assert sorted(packed.rows(np.arange(len(packed))).tokens.ravel().tolist()) == [5, 6, 7, 8, 9, 10, 11, 12]


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    write_tokens(tmp_path / "a.b", [[70_000, 1]], vocabulary=100_000)
    file = TokenFile(tmp_path / "a.b.bin")
    assert file.tokens.dtype == np.int32
    assert file.tokens.tolist() == [70_000, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx"]


def test_an_index_with_several_sequences_a_document_is_read(tmp_path):
    # What Megatron writes for documents of several sentences: lengths of sequences, then documents counted in them.
    np.arange(10, dtype="<i4").tofile(tmp_path / "m.bin")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 3, 3)
    lengths, places, documents = np.array([2, 3, 5], "<i4"), np.array([0, 8, 20], "<i8"), np.array([0, 2, 3], "<i8")
    (tmp_path / "m.idx").write_bytes(header + lengths.tobytes() + places.tobytes() + documents.tobytes())
    file = TokenFile(tmp_path / "m")
    assert [file.document(number).tolist() for number in range(len(file))] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def rewrite(stem, suffix, change):
    path = stem.with_name(stem.name + suffix)
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".bin", lambda raw: raw[:-1], "corpus.bin has 15 bytes, but corpus.idx lists 8 tokens of uint16, 16 bytes"),
        (".idx", lambda raw: raw[:-3], "corpus.idx has 99 bytes, but 3 sequences take 102; write it again"),
        (".idx", lambda raw: b"PK" + raw[2:], "corpus.idx is not an index of tokens: it doesn't begin with"),
        (".idx", lambda raw: raw[:9] + b"\x07" + raw[10:], "corpus.idx has version 7 and type 8; version 1 and types"),
        (".idx", lambda raw: raw[:-8] + b"\x01" + raw[-7:], "corpus.idx lists documents out of order"),
    ],
    ids=["odd", "short", "magic", "version", "order"],
)
def test_files_that_do_not_fit_are_refused_by_name(stem, suffix, change, message):
    rewrite(stem, suffix, change)
    with pytest.raises(DataError, match=re.escape(message)):
        TokenFile(stem)
    write_tokens(stem, DOCUMENTS, vocabulary=50)  # written again
    assert len(TokenFile(stem)) == 3


def test_a_missing_file_is_named(stem):
    stem.with_name("corpus.idx").unlink()
    with pytest.raises(DataError, match=r"corpus\.idx does not exist; hyper-parallel data prepare writes a \.bin and"):
        TokenFile(stem)


def test_a_token_that_the_model_lacks_is_found_in_its_file(stem):
    file = TokenFile(stem)
    file.check(np.array([[11, 3]]), 12)
    with pytest.raises(
        DataError, match=r"corpus\.bin has token 12 at place 7, but the model's vocabulary has 12; take"
    ):
        file.check(np.array([[12, 3]]), 12)
    file.check(np.array([[12, 3]]), 50)  # of the tokenizer's model


@pytest.mark.parametrize(
    ("documents", "message", "mended"),
    [
        (
            [[1], [2, 50]],
            "document 1 has token 50, but the vocabulary has 50; give the vocabulary of the tokenizer",
            ([[1], [2, 50]], 51),
        ),
        ([[], []], "there are no tokens to write to .*; give files with text", ([[], [1, 2, 3]], 50)),
    ],
)
def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path, documents, message, mended):
    with pytest.raises(DataError, match=message):
        write_tokens(tmp_path / "x", documents, vocabulary=50)
    assert list(tmp_path.iterdir()) == []
    documents, vocabulary = mended
    assert write_tokens(tmp_path / "x", documents, vocabulary=vocabulary) == 3
