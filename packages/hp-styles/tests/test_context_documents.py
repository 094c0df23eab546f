"""What the ranks tell each other of documents and padding, and what follows: plain values, no framework."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_styles.context.plan import chunks_of
from hp_styles.context.rounds import (
    RUNS,
    SIZE,
    Header,
    Part,
    Rounds,
    Run,
    Segment,
    check_alike,
    joined_parts,
    plain_runs,
)


def _parts(positions: list[int], kept: list[bool], size: int, load_balance: bool, **more: Any) -> list[Part]:
    """What each rank says of its part of a sequence."""
    chunks = 2 * size if load_balance else size
    width, parts = len(positions) // chunks, []
    for rank in range(size):
        places = [c * width + i for c in chunks_of(rank, size, load_balance) for i in range(width)]
        runs = []
        for i, place in enumerate(places):
            begins = i % width == 0 or kept[place] != kept[places[i - 1]]
            if begins or positions[place] != positions[places[i - 1]] + 1:
                runs.append(Run(i, positions[place], kept[place]))
        parts.append(Part((tuple(runs),), **more))
    return parts


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4]),
    st.booleans(),
    st.lists(st.integers(1, 7), min_size=2, max_size=6).filter(lambda sizes: len(set(sizes)) > 1),
)
def test_documents_of_any_lengths(size: int, load_balance: bool, sizes: list[int]) -> None:
    unit = 2 * size if load_balance else size
    sizes = [*sizes, -sum(sizes) % unit or unit]
    positions = [i for n in sizes for i in range(n)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = _parts(positions, [True] * len(positions), size, load_balance, packed=True)
    length = len(positions) // size
    if all(run.position == run.start for part in parts for run in part.rows[0]) and size > 1:
        return  # refused below
    rows = joined_parts(parts, length=length, load_balance=load_balance, ranks=range(size))
    assert rows == (tuple(Segment(start, i) for i, start in enumerate(starts)),)


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4]), st.booleans(), st.lists(st.booleans(), min_size=16, max_size=16))
def test_padding_anywhere(size: int, load_balance: bool, kept: list[bool]) -> None:
    parts = _parts(list(range(16)), kept, size, load_balance)
    rows = joined_parts(parts, length=16 // size, load_balance=load_balance, ranks=range(size))
    if all(kept):
        assert rows == ()
        return
    told = [segment.document for segment in rows[0]]
    ends = [*(segment.start for segment in rows[0][1:]), 16]
    spread = [d for d, s, e in zip(told, rows[0], ends, strict=True) for _ in range(s.start, e)]
    assert spread == [0 if stays else -1 for stays in kept]


def _joined(positions: list[int], size: int, load_balance: bool = False, **more: Any) -> Any:
    parts = _parts(positions, [True] * len(positions), size, load_balance, **more)
    return joined_parts(parts, length=len(positions) // size, load_balance=load_balance, ranks=range(size))


def test_what_position_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="count from 0 to 3 on each of the 2 ranks. .* so does generate..: pass"):
        _joined([0, 1, 2, 3, 0, 1, 2, 3], 2)
    assert _joined(list(range(8)), 2) == ()
    assert _joined([0, 1, 2, 3, 0, 1, 2, 3], 2, True, packed=True) == ((Segment(0, 0), Segment(4, 1)),)
    with pytest.raises(ValueError, match="sharded with load_balance=True, the style has load_balance=False"):
        _joined([0, 1, 6, 7, 2, 3, 4, 5], 2, packed=True)
    with pytest.raises(ValueError, match="sharded with load_balance=False, the style has load_balance=True"):
        _joined([0, 1, 4, 5, 6, 7, 2, 3], 2, True)
    with pytest.raises(ValueError, match="token 4 .* position id 0, the one before it 3, .* cannot be recognised"):
        _joined([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7], 3)
    assert _joined([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7], 3, True, packed=True) == ((Segment(0, 0), Segment(4, 1)),)
    with pytest.raises(
        ValueError, match="token 4 .* position id 0, the one before it 0, .* there is an attention_mask"
    ):
        _joined([0, 1, 2, 0, 0, 1, 2, 3], 2, joined=True)
    three = ((Segment(0, 0), Segment(3, 1), Segment(4, 2)),)
    assert _joined([0, 1, 2, 0, 0, 1, 2, 3], 2, True, packed=True) == three
    with pytest.raises(ValueError, match="token 4 .* position id 5, the one before it 0, but a document begins at 0"):
        _joined([0, 1, 2, 0, 5, 6, 7, 8], 2, packed=True)
    one, other = _parts([0, 1, 0, 1, 2, 3, 0, 1], [True] * 8, 2, False)
    mixed = [Part(one.rows, packed=True), Part(other.rows, joined=True)]
    with pytest.raises(ValueError, match=r"ranks \[0\] keep documents apart .* those of ranks \[1\] have one"):
        joined_parts(mixed, length=4, load_balance=False, ranks=[0, 1])
    for alike in ({"packed": True}, {"joined": True}):  # a mask on no rank, or on all
        _joined([0, 1, 0, 1, 2, 3, 0, 1], 2, **alike)
    some = [one, Part(other.rows, positioned=False)]
    with pytest.raises(ValueError, match=r"ranks \[1\] pass no position_ids, but the others do"):
        joined_parts(some, length=4, load_balance=False, ranks=[0, 1])


def test_documents_that_a_mask_joins_are_one() -> None:
    assert _joined([0, 1, 0, 1, 2, 3, 0, 1], 2, joined=True) == ()
    assert joined_parts([Part(), Part()], length=4, load_balance=True, ranks=[0, 1]) == ()
    assert plain_runs(1, 2, 4, True) == (Run(0, 2), Run(2, 4))


def test_a_message_is_read_as_it_was_said() -> None:
    many = Part(tuple((Run(0, 5), Run(3, 0, False)) for _ in range(RUNS)), packed=True, joined=True)
    for part in (Part(), Part(((Run(0, 0), Run(2, 7, False)),), positioned=False), many):
        for causal in (None, False, True):
            said = Header(((1, 2, 3, 4), (1, 2), (5,)), causal, 7, True, (2, 1), part, fault=1)
            numbers = said.numbers()
            assert len(numbers) == SIZE
            longest = Header.longest([numbers, Header((), None, None, False, (1, 1), Part()).numbers()])
            runs = said.runs() if longest else None
            assert longest == (4 * 2 * RUNS if part is many else 0) and Header.read(numbers, runs) == said


def test_what_is_not_alike() -> None:
    plain = Header(((1, 2),), True, None, False, (2, 1), Part())
    check_alike([plain, plain], [0, 1], None)
    sliding = Header(((1, 2),), True, 4, False, (2, 1), Part())
    with pytest.raises(ValueError, match="rank 4: .1, 2., is_causal=True, window=None; rank 6: .1, 2., .* window=4"):
        check_alike([plain, sliding], [4, 6], None)
    own = TypeError("own")
    with pytest.raises(TypeError, match="^own$"):
        check_alike([plain, plain], [0, 1], own)


def test_rounds() -> None:
    rounds, root, inner = Rounds(), object(), object()
    a, b = 1, 2
    rounds.enter(root)
    first = rounds.of(a, backward=False)
    rounds.enter(inner)
    assert rounds.of(b, backward=False) is first and rounds.of(a, backward=False) is first
    rounds.leave(inner)
    rounds.leave(inner)  # of an error before it was entered
    assert rounds.of(b, backward=False) is first
    rounds.leave(root)
    alone = rounds.of(a, backward=False)
    assert alone is not first and rounds.of(b, backward=False) is not alone
    again = rounds.of(b, backward=True)
    assert rounds.of(a, backward=True) is again and rounds.of(b, backward=True) is not again
