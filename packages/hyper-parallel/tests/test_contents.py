"""What the data of a run is, so that another under the same name is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from hp_plan import DataSection
from hyper_parallel.data import contents, write_tokens


def described(path):
    (content,) = contents(DataSection(paths=(str(path),)))
    return content


def test_token_files_of_one_size_differ_by_tokens_and_by_documents(tmp_path):
    write_tokens(tmp_path / "one", [[1, 2, 3], [4]], vocabulary=50)
    first = described(tmp_path / "one.bin")
    assert (first.tokens, first.documents) == (4, 2)
    for name, documents in {"tokens": [[1, 2, 4], [4]], "documents": [[1, 2], [3, 4]]}.items():
        write_tokens(tmp_path / name, documents, vocabulary=50)
        assert described(tmp_path / f"{name}.bin").digest != first.digest
    write_tokens(tmp_path / "same", [[1, 2, 3], [4]], vocabulary=50)
    assert described(tmp_path / "same.idx").digest == first.digest


@pytest.mark.parametrize("place", [0, 1_000_000, -1])
def test_large_files_are_sampled_to_their_ends(tmp_path, place):
    tokens = np.arange(3_000_000) % 40_000
    write_tokens(tmp_path / "one", [tokens], vocabulary=50_000)
    first = described(tmp_path / "one.bin")
    tokens = tokens.copy()
    tokens[place : place + 20_000 if place > 0 else None] = 0
    write_tokens(tmp_path / "one", [tokens], vocabulary=50_000)
    assert described(tmp_path / "one.bin").digest != first.digest


def test_text_differs_by_any_byte(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"x" * 100_000)
    before = described(file)
    file.write_bytes(b"x" * 50_000 + b"y" + b"x" * 49_999)
    assert (before.tokens, before.documents) == (100_000, None)
    assert described(file).digest != before.digest
