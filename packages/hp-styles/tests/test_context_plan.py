"""Which blocks of attention each rank computes: together the whole mask, each place once, and balanced."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_styles.context.plan import DegreeError, chunk_order, chunks_of, divided, kv_copies, ring_blocks, split_degrees


def _places(size: int, rank: int, length: int, load_balance: bool) -> np.ndarray:
    chunks = np.arange(length).reshape(2 * size if load_balance else size, -1)
    return chunks[chunks_of(rank, size, load_balance)].reshape(-1)


def _seen(size: int, rank: int, inner: int, *, causal: bool, load_balance: bool, length: int) -> np.ndarray:
    """How often a rank's blocks cover each pair of places in the whole sequence."""
    seen = np.zeros((length, length), dtype=int)
    mine, half = _places(size, rank, length, load_balance), length // size // 2
    for block in ring_blocks(size, rank, causal=causal, load_balance=load_balance, inner=inner):
        if block is None:
            continue
        keys = _places(size, block.source, length, load_balance)
        queries = mine[half:] if block.queries == "tail" else mine
        keys = keys[:half] if block.keys == "head" else keys
        shape = (len(queries), len(keys))
        seen[np.ix_(queries, keys)] += np.tril(np.ones(shape, dtype=int)) if block.causal else np.ones(shape, dtype=int)
    return seen


@settings(deadline=None)
@given(
    outer=st.integers(1, 3),
    inner=st.integers(1, 4),
    chunk=st.integers(1, 3),
    causal=st.booleans(),
    load_balance=st.booleans(),
)
def test_the_blocks_of_all_ranks_are_the_mask(
    outer: int, inner: int, chunk: int, causal: bool, load_balance: bool
) -> None:
    size = outer * inner
    length = 2 * size * chunk
    seen = [_seen(size, r, inner, causal=causal, load_balance=load_balance, length=length) for r in range(size)]
    ones = np.ones((length, length), dtype=int)
    np.testing.assert_array_equal(sum(seen), np.tril(ones) if causal else ones)
    if load_balance:
        assert len({each.sum() for each in seen}) == 1, "all ranks work as much"


@settings(deadline=None)
@given(ring=st.integers(1, 6), ulysses=st.integers(1, 6))
def test_head_and_tail_nest(ring: int, ulysses: int) -> None:
    size = ring * ulysses
    for group in range(ring):
        inside = sorted(c for i in range(ulysses) for c in chunks_of(group * ulysses + i, size, True))
        wanted = np.arange(2 * size).reshape(2 * ring, ulysses)[chunks_of(group, ring, True)]
        assert inside == sorted(wanted.reshape(-1).tolist())


def test_the_order_of_chunks() -> None:
    assert chunk_order(3, True) == [0, 5, 1, 4, 2, 3]
    assert chunk_order(3, False) == [0, 1, 2]


def test_groups_are_neighbours_and_rings_stride() -> None:
    degrees = split_degrees(8, 2)
    assert (degrees.ring, degrees.ulysses) == (4, 2)
    assert list(degrees.ulysses_ranks(5)) == [4, 5] and list(degrees.ring_ranks(5)) == [1, 3, 5, 7]
    assert split_degrees(8, None).ring == 1
    degrees = split_degrees(16, 2, 4)
    assert (degrees.outer, degrees.inner, degrees.ulysses) == (2, 4, 2)
    assert list(degrees.inner_ranks(5)) == [1, 3, 5, 7] and list(degrees.inner_ranks(10)) == [8, 10, 12, 14]
    with pytest.raises(ValueError, match=r"ulysses_degree=3 does not divide the 4 ranks .* one of \[1, 2, 4\]"):
        split_degrees(4, 3)
    with pytest.raises(
        ValueError, match=r"inner_ring_degree=3 does not divide the 4 ranks of a ring, .* of \[1, 2, 4\]"
    ):
        split_degrees(8, 2, 3)


def test_heads_that_divide() -> None:
    assert [kv_copies(8, kv, 4, 4) for kv in (8, 4, 2, 1)] == [1, 1, 2, 4]
    assert kv_copies(None, 2, 4, 4) == 2 and kv_copies(8, None, 4, 4) == 1
    with pytest.raises(ValueError, match=r"6 query heads and 6 key/value heads .* group of 4 ranks .* one of \[1, 2\]"):
        kv_copies(6, 6, 4, 4)
    with pytest.raises(ValueError, match="12 query heads and 3 key/value heads"):
        kv_copies(12, 3, 2, 4)


def test_a_refused_degree_has_its_parts_as_fields() -> None:
    with pytest.raises(DegreeError) as degree:
        split_degrees(4, 3)
    with pytest.raises(DegreeError) as heads:
        kv_copies(6, 6, 4, 4)
    assert str(degree.value) == f"ContextParallel: {degree.value.problem.replace(' = ', '=')}; choose one of [1, 2, 4]"
    assert str(heads.value) == f"ContextParallel: {heads.value.problem}. Pass ulysses_degree= one of [1, 2]"
    for error, choices in ((degree.value, [1, 2, 4]), (heads.value, [1, 2])):
        again = pickle.loads(pickle.dumps(error))
        assert (error.name, error.choices) == ("ulysses_degree", choices)
        assert vars(again) == vars(error) and str(again) == str(error)


def test_lengths_that_divide() -> None:
    assert divided(12, 3, True, (1, 12), 1) == 2
    with pytest.raises(
        ValueError, match="length 9 .* does not divide over 3 ranks, with load_balance into 6 chunks; pad it to 12"
    ):
        divided(9, 3, True, (1, 9), 1)
