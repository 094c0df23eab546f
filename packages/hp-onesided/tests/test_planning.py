from __future__ import annotations

import doctest
from fractions import Fraction

import pytest

from hp_onesided import wire
from hp_onesided.planning import plans
from hp_onesided.planning.headers import Call, disagreement
from hp_onesided.planning.plans import two_level
from hp_onesided.planning.steps import GRAIN, all_gather, all_reduce, slot_bytes


@pytest.mark.parametrize("module", [plans, wire], ids=lambda module: module.__name__)
def test_examples(module):
    assert doctest.testmod(module) == (0, doctest.testmod(module).attempted)


HOSTS = ((0, 1, 2), (3, 4, 5))


def done(kind: str, values: list[list[Fraction]], hosts) -> list[list[Fraction]]:
    """Do a collective in parts, on lists."""
    for part in two_level(kind, hosts):
        after = [list(each) for each in values]
        for group in part.groups:
            tensors = [values[rank] for rank in group]
            if part.kind == "all_gather":
                results = [[each for tensor in tensors for each in tensor]] * len(group)
            else:
                total = [sum(column) for column in zip(*tensors)]
                size = len(total) // len(group)
                pieces = [total[place * size : (place + 1) * size] for place in range(len(group))]
                results = pieces if part.kind == "reduce_scatter" else [total] * len(group)
            for rank, result in zip(group, results):
                after[rank] = list(result)
        values = after
    return values


def test_parts_do_the_whole():
    values = [[Fraction(rank * 100 + at) for at in range(12)] for rank in range(6)]
    total = [sum(column) for column in zip(*values)]
    assert done("all_reduce", values, HOSTS) == [total] * 6
    pieces = done("reduce_scatter", values, HOSTS)
    order = [(host, place) for place in range(3) for host in range(2)]
    assert [each for host, place in order for each in pieces[HOSTS[host][place]]] == total
    whole = done("all_gather", [[Fraction(rank)] for rank in range(6)], HOSTS)
    assert whole == [[HOSTS[host][place] for host, place in order]] * 6


def test_between_hosts_goes_the_share_of_one_rank():
    shares = [part.share for part in two_level("all_reduce", HOSTS) if part.level == "between"]
    assert shares == [Fraction(1, 3)]
    assert [part.level for part in two_level("all_gather", ((0,), (1,)))] == ["between"]
    assert [part.level for part in two_level("all_gather", ((0, 1),))] == ["host"]
    with pytest.raises(ValueError, match=r"hosts of \[2, 1\] ranks"):
        two_level("all_reduce", ((0, 1), (2,)))


@pytest.mark.parametrize("size", [2, 3, 7, 16, 17, 63])
def test_pieces_are_whole_cache_lines(size):
    slot = slot_bytes(size)
    assert slot % (GRAIN * size) == 0 and slot <= 2**22
    for nbytes in (0, 1, slot - 1, slot, 5 * slot + 3):
        program = all_gather(0, size, nbytes, slot)
        assert program.steps[0].piece * program.rounds >= nbytes > program.steps[0].piece * (program.rounds - 1) - 1
        assert all(step.piece % GRAIN == 0 and step.piece <= slot for step in program.steps)
        for step in all_reduce(1, size, nbytes, slot).steps:
            assert step.slot + step.piece <= slot


CALLS = [
    Call("barrier"),
    Call("all_gather", "float32", nbytes=12),
    Call("broadcast", "bool", root=3, nbytes=1),
    Call("all_reduce", "bfloat16", "max", 0, 2**40),
    Call("all_to_all", "int64", sent=(8, 0, 16, 8), received=(8, 8, 8, 0)),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_calls_are_read_as_written(call):
    assert Call.read(call.words(4)) == call


@pytest.mark.parametrize("call", CALLS[:4], ids=str)
def test_what_differs_is_told_alike_on_all_ranks(call):
    other = Call("all_gather", "float32", nbytes=16)
    told = disagreement([call.words(3), call.words(3), other.words(3)])
    assert told == f"rank 0 of the group calls {call}, rank 2 all_gather(16 bytes of float32)"
    assert disagreement([call.words(3)] * 3) is None


def test_counts_that_differ_are_told():
    one = Call("all_to_all", "int64", sent=(0, 8), received=(0, 8))
    other = Call("all_to_all", "int64", sent=(8, 0), received=(16, 0))
    told = disagreement([one.words(2), other.words(2)])
    assert told == "in an all_to_all rank 0 of the group sends 8 bytes to rank 1, which expects 16"
