"""Every interleaving of collectives over symmetric memory: Note [Two meetings] of `hp_onesided.memory.collectives`."""

from __future__ import annotations

import itertools

import pytest
from interleavings import TORN, Action, explore

KINDS = ("barrier", "all_gather", "all_reduce")


def actions_of(kinds, ranks: int, lacking: str = "", headers: int = 2) -> list[list[Action]]:
    """Write what each rank does in collectives one after the other, each with new inputs; writes have two halves."""
    made: list[list[Action]] = []
    waits: list[tuple[Action, int, int]] = []
    for rank in range(ranks):
        actions: list[Action] = []
        others = [peer for peer in range(ranks) if peer != rank]
        met = 0

        def write(name: str, cells, actions=actions) -> None:
            actions.extend((Action(name, writes=dict.fromkeys(cells, TORN)), Action(name, writes=cells)))

        def read(name: str, reads, actions=actions) -> None:
            actions.extend(Action(name, reads=reads) for _ in range(2))

        def arrive(name: str, actions=actions, others=others) -> None:
            nonlocal met
            met += 1
            actions.append(Action("post"))
            for peer in others if name != lacking else ():
                actions.append(Action(name))
                waits.append((actions[-1], peer, met))

        for number, kind in enumerate(kinds):
            write("input", {share: (number, "in", share) for share in range(ranks)})
            write("call", {("header", number % headers): number})
            arrive("first")
            read("check", [(peer, ("header", number % headers), number) for peer in others])
            if kind == "all_gather":
                read("gather", [(peer, 0, (number, "in", 0)) for peer in others])
            if kind == "all_reduce":
                read("reduce", [(peer, rank, (number, "in", rank)) for peer in others])
                write("reduce", {rank: (number, "sum", rank)})
                arrive("between")
                for peer in others:
                    read("share", [(peer, peer, (number, "sum", peer))])
                    write("share", {peer: (number, "sum", peer)})
            if kind != "barrier":
                arrive("last")
        made.append(actions)
    posts = [[at + 1 for at, action in enumerate(actions) if action.name == "post"] for actions in made]
    for action, peer, count in waits:
        action.needs.append((peer, posts[peer][count - 1]))
    return made


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=3)), ids="-".join)
def test_two_ranks_read_what_was_written(kinds):
    assert explore(actions_of(kinds, 2)) is None


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=2)), ids="-".join)
def test_three_ranks_read_what_was_written(kinds):
    assert explore(actions_of(kinds, 3)) is None


@pytest.mark.parametrize("lacking", ["first", "between", "last"])
def test_each_meeting_is_needed(lacking):
    assert explore(actions_of(("all_reduce", "all_reduce"), 2, lacking)) is not None


def test_one_header_is_too_few():
    assert "check finds 1 at ('header', 0) of 1" in str(explore(actions_of(("barrier", "barrier"), 2, headers=1)))
