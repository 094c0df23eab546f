"""What ``check`` finds in broken orders, and that what it passes runs to its end."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from hp_pipeline import Costs, MetaStep, MetaStepType, Pipeline, check, lower, placed, schedules, simulate


def steps(text):
    return tuple(map(MetaStep.of, text.split()))


PAIR = Pipeline((0, 1), 2)
GOOD = {0: steps("0F0 0F1 0B0 0B1"), 1: steps("1F0 1B0 1F1 1B1")}


def test_a_step_reads_and_writes_its_short_form():
    for text in ("2F0", "0B13", "1I2.3", "3FS1", "0FU", "2F3+1B0", "1B0+2F3"):
        assert str(MetaStep.of(text)) == text
    assert MetaStep.of("2F0.1") == MetaStep(0, MetaStepType.FORWARD, 2, None, 1)
    for text in ("F0", "2X0", "2", "", "2F1x", "2F0+"):
        with pytest.raises(ValueError, match=f"{re.escape(repr(text.split('+')[-1]))} is not a step"):
            MetaStep.of(text)


def test_a_good_order_says_what_each_rank_holds():
    assert check(GOOD, PAIR) == (2, 1)
    assert check(lower(GOOD, PAIR), PAIR) == (2, 1)


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ({0: GOOD[0], 1: steps("1F0 1B0 1F1")}, "steps that are missing: 1B1."),
        ({0: GOOD[0], 1: steps("1F0 1B0 1F1 1I1")}, "steps that are missing: 1W1."),
        ({0: GOOD[0], 1: steps("1F0 1B0 1F1 1B1 1F0")}, "steps that are there twice: 1F0."),
        ({0: GOOD[0], 1: steps("1F0 1B0 1F1 1B1 1W1")}, "1B1 and 1W1 are the same backward: the whole and its halves."),
        ({0: (*GOOD[0], *steps("1F0")), 1: GOOD[1]}, "rank 0: 1F0 is a step of rank 1, where its stage is."),
        (
            {0: GOOD[0], 1: (*GOOD[1], *steps("2F0"))},
            "rank 1: 2F0 names a stage that is not one of the 2 there are.",
        ),
        ({0: GOOD[0], 1: (*GOOD[1], *steps("1F2"))}, "rank 1: 1F2 is outside of 2 micro-batches of 1 slices."),
        ({0: GOOD[0]}, "the order names the ranks [0], the placement has 2 from 0."),
        ({0: GOOD[0], 1: steps("1B0 1F0 1F1 1B1")}, "rank 1: 1B0 needs 1F0, which comes later on the same rank."),
        (
            {0: steps("0F0 0B0 0F1 0B1"), 1: steps("1F0 1F1 1B0 1B1")},
            "a deadlock: rank 0 is at 0B0 and needs 1B0 of rank 1; rank 1 is at 1F1 and needs 0F1 of rank 0. Let one of"
            " these ranks run what another needs before what it is at (0F1 is stage 0, forward, micro-batch 1).",
        ),
    ],
)
def test_broken_orders(order, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        check(order, PAIR)
    if text.startswith("a deadlock"):
        with pytest.raises(ValueError, match=r"does not run to its end; check\(order, pipeline\) says why"):
            simulate(order, PAIR)
        check({0: order[0], 1: steps("1F0 1B0 1F1 1B1")}, PAIR)
        check({0: steps("0F0 0F1 0B0 0B1"), 1: order[1]}, PAIR)


def test_sends_and_receives_that_do_not_meet():
    good = lower(GOOD, PAIR)
    lost = {**good, 1: tuple(each for each in good[1] if str(each) != "1FR1")}
    with pytest.raises(ValueError, match=r"rank 1: sends or receives missing: 1FR1\."):
        check(lost, PAIR)
    with pytest.raises(ValueError, match=r"rank 1: sends or receives too many: 1BS1\."):
        check({**good, 1: (*good[1], MetaStep.of("1BS1"))}, PAIR)
    crossed = {**good, 0: steps("0F0 0F1 0FS1 0FS0 0BR0 0B0 0BR1 0B1")}
    with pytest.raises(ValueError, match="from rank 0 to rank 1, of stage 0 to stage 1, is for 1FR1, but .* is 1FR0"):
        check(crossed, PAIR)


def test_messages_are_received_in_the_order_in_which_they_are_made():
    order = {0: steps("0F1 0F0 0B0 0B1"), 1: steps("1F0 1F1 1B1 1B0")}
    lowered = lower(order, PAIR)
    check(lowered, PAIR)
    assert lowered[0] == steps("0F1 0FS1 0F0 0FS0 0BR1 0BR0 0B0 0B1")
    assert lowered[1] == steps("1FR1 1FR0 1F0 1F1 1B1 1BS1 1B0 1BS0")
    join = Pipeline((0, 1, 2), 2, boundaries=((0, 2), (1, 2)))
    crossed = {0: steps("0F0 0F1 0B0 0B1"), 1: steps("1F1 1F0 1B1 1B0"), 2: steps("2F0 2F1 2B0 2B1")}
    with pytest.raises(ValueError, match="from rank 1 to rank 2, of stage 1 to stage 2, is for 2FR1, but .* is 2FR0"):
        check(crossed, join)


def test_a_limit_of_memory():
    pipeline = Pipeline((0, 1), 2, cost=Costs(saved=3.0, static=(10.0, 1.0)))
    assert check(GOOD, pipeline) == (16, 4)
    with pytest.raises(ValueError, match="rank 0 holds 16 bytes at once, more than the limit of 12"):
        check(GOOD, pipeline, memory=12)


def test_swapped_stages_hold_less():
    pipeline = Pipeline((0, 1), 8)
    order = lower(schedules.gpipe(pipeline), pipeline, swapped=[0])
    assert check(order, pipeline) == (3, 8), "one that computes, one that leaves, one that comes back"
    texts = [str(each) for each in order[0] if each.micro_index == 2 and "S" in str(each)[1] or str(each) == "0F3"]
    assert texts[:3] == ["0SO2", "0F3", "0SW2"]
    last = lower(schedules.one_f_one_b(pipeline), pipeline, swapped=[1])[1]
    assert not any(each.step_type is MetaStepType.OFFLOAD for each in last), "its backwards follow at once"


def test_sharded_stages_are_gathered_for_each_run_of_their_steps_and_reduced_once():
    pipeline = Pipeline(placed("v", 1), 2)
    order = lower({0: steps("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")}, pipeline, sharded=[0, 1])
    texts = list(map(str, order[0]))
    assert texts[:4] == ["0FU", "0F0", "0FRS", "1FU"]
    assert [text for text in texts if text.endswith("FG")] == ["1FG", "0FG"]
    assert texts[-3:] == ["0B1", "0FG", "0FRS"]


def test_steps_of_sharded_stages_that_do_not_fit():
    for text, error in [
        ("0F0 1F0 1B0 0FG 0B0", "rank 0: 0B0 comes after 0FG, which reduces gradients"),
        ("0F0 1F0 1B0 0B0 0FG 0FG", "steps that are there twice: 0FG"),
        ("0FU 0FU 0F0 1F0 1B0 0B0 0FG", "rank 0: 0FU, but stage 0 is gathered already"),
        ("0F0 0FRS 1F0 1B0 0B0 0FG", "rank 0: 0FRS, but stage 0 is not gathered"),
        ("0FU 0F0 1F0 1B0 0B0 0FG", r"rank 0: the stages \[0\] are gathered at the end; add RESHARD"),
    ]:
        with pytest.raises(ValueError, match=error):
            check({0: steps(text)}, Pipeline(placed("v", 1), 1))
    check({0: steps("0FU 0F0 1F0 1B0 0B0 0FG 0FRS")}, Pipeline(placed("v", 1), 1))


def test_chains_that_join():
    # An encoder on ranks 0 and 1 and a language model's first stage on rank 2 both lead to rank 3.
    pipeline = Pipeline((0, 1, 2, 3), 3, boundaries=((0, 1), (1, 3), (2, 3)))
    order = schedules.one_f_one_b(pipeline)
    check(order, pipeline)
    assert simulate(order, pipeline).spans[2][0].start == 0
    received = [str(each) for each in lower(order, pipeline)[3] if each.step_type is MetaStepType.FWD_RECV]
    assert received == ["3FR0", "3FR1", "3FR2"]


def test_mutated_orders_are_found_or_run():
    chance = random.Random(0)
    sizes: list[Any] = [
        ("line", schedules.one_f_one_b),
        ("line", schedules.zb1p),
        ("v", schedules.zbv),
        ("loop", schedules.gpipe),
    ]
    broken = whole = 0
    for number in range(1000):
        shape, schedule = sizes[number % len(sizes)]
        pipeline = Pipeline(placed(shape, chance.randint(1, 3)), chance.randint(1, 4))
        order = {rank: list(each) for rank, each in schedule(pipeline).items()}
        mutated = order[chance.randrange(pipeline.ranks)]
        place = chance.randrange(len(mutated))
        kind = chance.choice(["swap", "drop", "double"])
        if kind == "swap":
            other = chance.randrange(len(mutated))
            mutated[place], mutated[other] = mutated[other], mutated[place]
        elif kind == "drop":
            del mutated[place]
        else:
            mutated.insert(chance.randrange(len(mutated)), mutated[place])
        final = {rank: tuple(each) for rank, each in order.items()}
        try:
            check(final, pipeline)
        except ValueError:
            assert kind != "swap" or not ends(final, pipeline)
            broken += 1
        else:
            assert kind == "swap" and ends(final, pipeline)
            whole += 1
    assert broken > 600 and whole > 50


def ends(order, pipeline):
    """Run an order with a rank at a time that takes one step where everything it needs is done, by brute force."""
    done, places = set(), dict.fromkeys(order, 0)
    moved = True
    while moved:
        moved = False
        for rank, own in order.items():
            if places[rank] == len(own):
                continue
            each = own[places[rank]]
            micro, kind, stage = each.micro_index, each.step_type.value, each.stage_index
            needs = {
                "F": [f"{stage - 1}F{micro}"] if stage else [],
                "W": [f"{stage}I{micro}"],
            }.get(kind, [f"{stage}F{micro}"])
            if kind in "BI" and stage + 1 < len(pipeline.placement):
                after = {f"{stage + 1}{half}{micro}" for half in "BI"}
                if not after & done:
                    continue
            if all(need in done for need in needs):
                done.add(str(each))
                places[rank] += 1
                moved = True
    return all(places[rank] == len(own) for rank, own in order.items())
