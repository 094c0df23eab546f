"""The order of samples, windows, packing and mixtures."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data import IGNORED, DataError, Mixture, Packed, Windows, permuted
from hyper_parallel.data.packing import Piece, pack


@settings(deadline=None)
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 1000))
def test_an_epoch_has_every_item_once(count, seed, epoch):
    order = permuted(np.arange(count) + epoch * count, count=count, seed=seed)
    assert sorted(order) == list(range(count))


def test_a_million_items_are_each_there_once_and_in_no_order():
    order = permuted(np.arange(10**6), count=10**6, seed=1)
    assert len(np.unique(order)) == 10**6
    assert abs(np.corrcoef(order, np.arange(10**6))[0, 1]) < 0.01
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.01
    other = permuted(np.arange(10**6), count=10**6, seed=2)
    assert (order == other).sum() < 20
    next_epoch = permuted(np.arange(10**6) + 10**6, count=10**6, seed=1)
    assert (order == next_epoch).sum() < 20


def test_the_order_of_any_part_is_that_of_the_whole():
    whole = permuted(np.arange(10**6 - 500, 10**6 + 500), count=10**12, seed=5)
    parts = [permuted(part, count=10**12, seed=5) for part in np.array_split(np.arange(10**6 - 500, 10**6 + 500), 7)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert 0 <= whole.min() < whole.max() < 10**12


@pytest.mark.parametrize(
    ("count", "places", "message"), [(0, [0], "at least one item, got count=0"), (3, [1, -2], "counted from 0, got -2")]
)
def test_an_order_of_nothing_and_places_before_the_first_are_refused(count, places, message):
    with pytest.raises(ValueError, match=message):
        permuted(np.array(places), count=count, seed=0)


def test_the_order_of_the_files_begins_anew_each_epoch():
    windows = Windows([np.arange(11), np.arange(20, 24)], 4, seed=None)
    assert windows.rows(np.array([0, 1, 2, 3, 7])).tokens[:, 0].tolist() == [0, 4, 20, 0, 4]


def test_windows_cover_each_stream_once_an_epoch():
    streams = [np.arange(23, dtype=np.uint16), np.arange(100, 104), np.arange(200, 240, dtype=np.uint8)]
    windows = Windows(streams, 5, seed=3)
    assert len(windows) == 4 + 0 + 8
    rows = windows.rows(np.arange(12))
    firsts = sorted(rows.tokens[:, 0].tolist())
    assert firsts == [0, 5, 10, 15, *range(200, 240, 5)]
    assert (rows.tokens == rows.tokens[:, :1] + np.arange(5)).all()
    assert (rows.labels[:, 1:] == rows.tokens[:, 1:]).all()
    assert (rows.labels[:, 0] == IGNORED).all()
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4]] * 12
    again = windows.rows(np.arange(12, 24))
    assert sorted(again.tokens[:, 0].tolist()) == firsts
    assert again.tokens.tolist() != rows.tokens.tolist()
    assert windows.rows(np.array([17, 3])).tokens.tolist() == [again.tokens[5].tolist(), rows.tokens[3].tolist()]


def test_streams_shorter_than_a_sample_are_refused():
    with pytest.raises(DataError, match="one sample takes 8 tokens, but the longest stream has 7; give more data"):
        Windows([np.arange(7), np.arange(3)], 8, seed=0)
    assert len(Windows([np.arange(8), np.arange(3)], 8, seed=0)) == len(Windows([np.arange(7)], 7, seed=0)) == 1


class Letters:
    """Documents whose tokens tell which document and place they are from."""

    def __init__(self, lengths):
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def document(self, number):
        return 1000 * number + np.arange(self.starts[number + 1] - self.starts[number])

    def trained(self, number):
        return None


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any),
    length=st.integers(2, 17),
    window=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_packed_rows_hold_every_token_once_and_no_label_crosses_a_document(lengths, length, window, seed):
    documents = Letters([*lengths, 1])
    packed = Packed(documents, length, seed=seed, window=window, padding=-1)
    rows = packed.rows(np.arange(len(packed)))
    kept = rows.tokens[rows.tokens != -1]
    assert sorted(kept.tolist()) == sorted(np.concatenate([documents.document(i) for i in range(len(lengths) + 1)]))
    for tokens, labels, positions in zip(rows.tokens, rows.labels, rows.positions, strict=True):
        for place in range(length):
            begins = positions[place] == 0
            if tokens[place] == -1 or begins:
                assert labels[place] == IGNORED
            else:
                assert labels[place] == tokens[place] == tokens[place - 1] + 1
                assert positions[place] == positions[place - 1] + 1
    # A packing that goes on from the middle, in another process, has the same rows.
    later = Packed(documents, length, seed=seed, window=window, padding=-1)
    numbers = np.arange(len(packed) // 2, len(packed) * 2)
    assert later.rows(numbers).tokens.tolist() == packed.rows(numbers).tokens.tolist()


def test_documents_without_tokens_are_refused():
    with pytest.raises(DataError, match="there are no tokens to pack; give files with text"):
        Packed(Letters([0, 0]), 4, seed=0)
    assert len(Packed(Letters([0, 3]), 4, seed=0)) == 1


def test_epochs_of_packed_rows_are_packed_anew():
    packed = Packed(Letters([3, 4, 5, 6, 7, 8]), 10, seed=0, window=3)
    count = len(packed)
    first = packed.rows(np.arange(count))
    assert first.tokens.max() > 5000
    assert packed.rows(np.arange(count, 2 * count)).tokens.tolist() != first.tokens.tolist()


def test_a_piece_goes_where_it_fits_best():
    lengths = [9, 5, 5, 3, 2, 1, 4]
    rows = pack([Piece(number, 0, size) for number, size in enumerate(lengths)], 10)
    assert [[piece.length for piece in row] for row in rows] == [[9, 1], [5, 5], [4, 3, 2]]
    random = np.random.default_rng(0).integers(1, 100, 1024).tolist()
    rows = pack([Piece(number, 0, size) for number, size in enumerate(random)], 128)
    assert sum(random) / (128 * len(rows)) > 0.98


def test_a_mixture_has_its_proportions_in_every_block_and_each_sample_once():
    sources = [
        Windows([np.arange(i * 10**6, i * 10**6 + 3 * size)], 3, seed=i) for i, size in enumerate((3000, 500, 7))
    ]
    mixture = Mixture(sources, [3, 1, 0.001], seed=4)
    numbers = np.arange(3 * 4096)
    chosen, within = mixture.places(numbers)
    for block in np.split(chosen, 3):
        assert np.bincount(block).tolist() == [3071, 1024, 1]
    for source in range(3):
        assert sorted(within[chosen == source].tolist()) == list(range(int((chosen == source).sum())))
    rows = mixture.rows(numbers[100:140])
    assert (rows.tokens[:, 0] // 10**6).tolist() == chosen[100:140].tolist()
    parts = [mixture.rows(part) for part in np.array_split(numbers[100:140], 3)]
    assert np.concatenate([part.tokens for part in parts]).tolist() == rows.tokens.tolist()
    first = [sources[chosen[n]].rows(within[n : n + 1]).tokens[0].tolist() for n in range(9)]
    assert mixture.rows(np.arange(9)).tokens.tolist() == first


@pytest.mark.parametrize(
    ("weights", "message", "mended"),
    [
        ([1.0], "a mixture of 2 sources has 1 weights; give one weight for each source", [[1.0, 1.0]]),
        ([1.0, -1.0], "positive numbers, got (1.0, -1.0); leave out a source that is not wanted", [[1.0]]),
        (
            [1.0, 0.0001],
            "source 1 has weight 0.0001 of 1.0001: under half a sample in 4096; give it a larger weight, or leave it",
            [[1.0, 0.001], [1.0]],
        ),
        ([1.0, float("nan")], "positive numbers, got (1.0, nan)", [[1.0]]),
    ],
)
def test_weights_that_give_a_source_nothing_are_refused(weights, message, mended):
    sources = [Windows([np.arange(9)], 3, seed=0)] * 2
    with pytest.raises(DataError, match=re.escape(message)):
        Mixture(sources, weights, seed=0)
    for right in mended:
        Mixture(sources[: len(right)], right, seed=0)
