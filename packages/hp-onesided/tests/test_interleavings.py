"""Every interleaving of the steps: nobody reads early, nobody overwrites what is read, nobody waits for ever."""

from __future__ import annotations

import itertools

import pytest
from interleavings import Action, Operation, actions_of, explore

from hp_onesided.planning import steps
from hp_onesided.planning.steps import GRAIN


def operation(kind: str, ranks: int, rounds: int = 1, root: int = 0) -> Operation:
    """Make a collective of so many rounds in the smallest slots."""
    slot = ranks * GRAIN
    everyone = range(ranks)
    if kind == "barrier":
        return Operation([steps.barrier(rank, ranks) for rank in everyone], lambda rank, cell: None)
    if kind == "all_gather":
        cells = rounds * ranks
        programs = [steps.all_gather(rank, ranks, cells * GRAIN, slot) for rank in everyone]
        return Operation(programs, lambda rank, cell: divmod(cell, cells))
    if kind == "reduce_scatter":
        programs = [steps.reduce_scatter(rank, ranks, rounds * GRAIN, slot) for rank in everyone]
        return Operation(programs, lambda rank, cell: rank * rounds + cell)
    if kind == "all_reduce":
        programs = [steps.all_reduce(rank, ranks, rounds * slot, slot) for rank in everyone]
        return Operation(programs, lambda rank, cell: cell)
    if kind == "broadcast":
        programs = [steps.broadcast(rank, ranks, root, rounds * slot, slot) for rank in everyone]
        return Operation(programs, lambda rank, cell: (root, cell))
    counts = [[(one + 2 * other) % (rounds + 1) * GRAIN for other in everyone] for one in everyone]
    counts[0][1] = rounds * GRAIN
    received = [[counts[sender][rank] for sender in everyone] for rank in everyone]
    programs = [steps.all_to_all(rank, ranks, counts[rank], received[rank], slot) for rank in everyone]

    def wanted(rank: int, cell: int) -> tuple[int, int]:
        for sender, count in enumerate(received[rank]):
            if cell * GRAIN < count:
                return sender, sum(counts[sender][:rank]) // GRAIN + cell
            cell -= count // GRAIN
        raise AssertionError(f"rank {rank} has no cell {cell}")

    return Operation(programs, wanted, counts)


def run(operations, ranks, without=None):
    return explore(actions_of(operations, ranks, dict(enumerate(range(ranks))), without))


SEQUENCES = [
    [("all_gather", 3)],
    [("reduce_scatter", 3)],
    [("all_reduce", 3)],
    [("all_to_all", 3)],
    [("broadcast", 2), ("all_gather", 1)],
    [("all_gather", 1), ("broadcast", 1), ("reduce_scatter", 1)],
    [("barrier", 1), ("all_to_all", 1), ("barrier", 1), ("all_reduce", 1)],
]


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda sequence: "+".join(kind for kind, _ in sequence))
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_interleavings_are_right(sequence, ranks):
    assert run([operation(kind, ranks, rounds) for kind, rounds in sequence], ranks) is None


def test_shares_of_an_all_reduce(monkeypatch):
    monkeypatch.setattr(steps, "SMALL", 0)  # each rank reduces its share even of the smallest tensor
    assert run([operation("all_reduce", 3, 2)], 3) is None


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier"])
def test_each_wait_is_needed(kind, monkeypatch):
    monkeypatch.setattr(steps, "SMALL", 0)
    ranks = 3
    operations = [operation("all_gather", ranks), operation(kind, ranks), operation("all_gather", ranks)]
    waits = set()
    assert run(operations, ranks, lambda *wait: waits.add(wait)) is None
    assert len(waits) >= 3 * ranks * (ranks - 1)
    for left_out in waits:
        assert run(operations, ranks, lambda *wait, left_out=left_out: wait == left_out) is not None, left_out


def test_what_is_left_out_is_found():
    ranks = 2
    gather = operation("all_gather", ranks, 3)

    def changed(change):
        programs = [steps.Program(change(program.steps), program.rounds) for program in gather.programs]
        return Operation(programs, gather.wanted)

    early = changed(lambda each: (each[1], each[0], *each[2:]))  # post, then copy
    assert "finds" in (run([early], ranks) or "")
    silent = changed(lambda each: each[2:])  # no post
    with pytest.raises(IndexError):
        run([silent], ranks)


def test_threads_complete_whatever_the_order_of_waits():
    """Two groups of the same two ranks: each rank issues and waits in an order of its own."""
    ranks, groups = 2, 2
    found = []
    for orders in itertools.product(list(itertools.permutations(range(groups))), repeat=4):
        issues, waits = orders[:2], orders[2:]
        threads: list[list[Action]] = []
        for group in range(groups):
            first = ranks + group * ranks
            threads += actions_of([operation("barrier", ranks)], ranks, {rank: first + rank for rank in range(ranks)})
        mains = []
        for rank in range(ranks):
            main = [Action(f"issue {group}") for group in issues[rank]]
            for group in waits[rank]:
                thread = ranks + group * ranks + rank
                main.append(Action(f"wait {group}", needs=[(thread, len(threads[thread - ranks]))]))
            mains.append(main)
            for group in range(groups):
                threads[group * ranks + rank][0].needs.append((rank, issues[rank].index(group) + 1))
        found.append(explore(mains + threads))
    assert found == [None] * 16


def test_meeting_in_the_wait_itself_deadlocks():
    """Why a group has a thread: were a collective done where it is waited for, these two ranks would never meet."""
    first = [Action("post"), Action("meet 0", needs=[(1, 3)]), Action("post"), Action("meet 1", needs=[(1, 1)])]
    other = [Action("post"), Action("meet 1", needs=[(0, 3)]), Action("post"), Action("meet 0", needs=[(0, 1)])]
    assert "deadlock" in (explore([first, other]) or "")
