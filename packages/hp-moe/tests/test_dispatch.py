"""Exchanges of rows, for all ranks at once, without any."""

from __future__ import annotations

import random

from hp_moe.dispatch import Dispatch, Message, refusal, settings


def test_rows_arrive_ordered_by_expert_and_source():
    draw = random.Random(1)
    for _ in range(100):
        ranks, widths = draw.randint(1, 4), [draw.randint(1, 3) for _ in range(4)]
        widths = widths[:ranks]
        # rows[source][expert] are names of rows, the experts of rank 0 first
        rows = [
            [[f"{s}.{e}.{i}" for i in range(draw.choice([0, 1, 4]))] for e in range(sum(widths))] for s in range(ranks)
        ]
        begin = [sum(widths[:rank]) for rank in range(ranks)]
        messages = [
            [[len(rows[s][begin[d] + e]) for e in range(widths[d])] for d in range(ranks)] for s in range(ranks)
        ]
        for d in range(ranks):
            plan = Dispatch.of(messages[d], [messages[s][d] for s in range(ranks)])
            assert plan.sent == tuple(sum(len(rows[d][begin[o] + e]) for e in range(widths[o])) for o in range(ranks))
            arrived = [name for s in range(ranks) for e in range(widths[d]) for name in rows[s][begin[d] + e]]
            assert sum(plan.received) == len(arrived)
            computed = [name for first, count in plan.blocks for name in arrived[first : first + count]]
            expected = [name for e in range(widths[d]) for s in range(ranks) for name in rows[s][begin[d] + e]]
            assert computed == expected
            assert plan.sizes == tuple(sum(len(rows[s][begin[d] + e]) for s in range(ranks)) for e in range(widths[d]))
            assert plan.sorted == (arrived == expected)


def test_all_ranks_are_told_alike_of_what_is_wrong():
    good = [3, 0, 8, 2, *settings("all_to_all", "fast"), 0, 0]
    bad = [1, 0, 16, 4, *settings("all_to_all", "exact"), 5, 6]
    assert refusal("Experts", 4, [Message(good, 1), Message(good, 1)]) is None
    text = refusal("Experts", 4, [Message(good, 1), Message(bad, 1)])
    assert text == (
        "Experts: rank 1 has tokens of size 16, rank 0 8; rank 1 has choices a token 4, rank 0 2; rank 1 runs with"
        " token_dispatcher='all_to_all', combine='exact', rank 0 with token_dispatcher='all_to_all', combine='fast':"
        " give all ranks one style; rank 1 chose 5 experts that are none of 4: their numbers go from 0 to 3; rank 1"
        " has 6 weights that are not finite: look at the router."
    )
