"""Exchanges of rows, for all ranks at once, without any."""

from __future__ import annotations

import random

from hp_moe.routes.dispatch import Dispatch, Message, fit


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


def test_ranks_fit_where_all_have_inputs_of_one_kind_and_none_are_wrong():
    good, other, wrong = (Message(each, 2) for each in ([3, 0, 8, 7, 0], [1, 0, 4, 6, 0], [1, 0, 4, 7, 2]))
    assert fit([good, good])
    assert not fit([good, other]) and not fit([good, wrong])
