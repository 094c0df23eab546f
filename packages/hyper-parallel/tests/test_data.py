from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.data import ByteText, DataError, check_text, find_files


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


def test_files_and_folders_are_read_in_order(text):
    whole = ByteText([str(text)], max_bytes=1000)
    assert len(whole) == 200
    assert check_text([str(text)], sequence_length=200, max_bytes=1000) == 200
    options = {"seed": 0, "step": 0, "batch_size": 1, "sequence_length": 200, "rows": slice(0, 1)}
    assert whole.batch(**options).tolist() == [list(range(200))]
    assert len(ByteText([str(text)], max_bytes=150)) == 150


def test_every_layout_of_ranks_draws_the_same_batch(text):
    source = ByteText([str(text)], max_bytes=1000)
    options = {"seed": 3, "step": 7, "batch_size": 12, "sequence_length": 9}
    whole = source.batch(**options, rows=slice(0, 12))
    assert whole.shape == (12, 9)
    assert whole.dtype == np.int64
    for parts in (2, 3, 4):
        rows = [slice(i * 12 // parts, (i + 1) * 12 // parts) for i in range(parts)]
        assert np.concatenate([source.batch(**options, rows=part) for part in rows]).tolist() == whole.tolist()
    assert source.batch(**{**options, "step": 8}, rows=slice(0, 12)).tolist() != whole.tolist()
    assert source.batch(**{**options, "seed": 4}, rows=slice(0, 12)).tolist() != whole.tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "the data file {path} does not exist; give files or folders of text with --data"),
        (
            lambda path: path.touch(),
            r"the data file {path} is empty \(0 bytes\); leave it out, or give another with --data",
        ),
        (lambda path: path.mkdir(), "the data folder {path} has no files; give files or folders of text with --data"),
        (
            lambda path: path.write_bytes(b"short"),
            "{path} has 5 bytes of text, but one sample takes 16; give more with --data, or make data.sequence_length "
            "at most 5",
        ),
    ],
)
def test_text_that_can_not_be_trained_on(tmp_path, make, message):
    path = tmp_path / "text"
    make(path)
    with pytest.raises(DataError, match=message.format(path=path)):
        check_text([str(path)], sequence_length=16, max_bytes=1000)
