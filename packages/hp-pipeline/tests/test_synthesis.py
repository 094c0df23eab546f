"""The orders that ``synthesize`` finds."""

from __future__ import annotations

import random

import pytest

from hp_pipeline import Costs, Pipeline, check, placed, schedules, simulate, synthesize


def test_never_worse_than_the_formulas_within_the_same_memory():
    chance = random.Random(1)
    ratios = []
    for _ in range(4):
        cost = Costs(input=chance.uniform(0.6, 1.6), weight=chance.uniform(0.4, 1.4), send=chance.uniform(0, 0.2))
        pipeline = Pipeline(placed("v", 4), 8, cost=cost)
        formula = simulate(schedules.zbv(pipeline), pipeline)
        order = synthesize(pipeline, max(formula.peaks), moves=100)
        trace = simulate(order, pipeline)
        check(order, pipeline, memory=max(formula.peaks))
        ratios.append(trace.bubble / formula.bubble)
    assert max(ratios) <= 1 and sum(ratios) / len(ratios) < 0.98


def test_the_same_arguments_give_the_same_order():
    pipeline = Pipeline(placed("v", 2), 4, cost=Costs(input=1.3))
    assert synthesize(pipeline, 5, moves=50) == synthesize(pipeline, 5, moves=50)


def test_any_placement_and_uneven_costs():
    pipeline = Pipeline((0, 1, 0, 2, 1), 5, cost=Costs(forward=(1.0, 2.0, 1.0, 3.0, 0.5), send=0.1))
    order = synthesize(pipeline, moves=50)
    check(order, pipeline)
    assert simulate(order, pipeline).bubble_ratio < 0.3


@pytest.mark.parametrize(
    "boundaries", [((0, 1), (0, 2), (1, 3), (2, 3)), ((0, 3), (1, 3), (2, 3)), ((0, 2), (2, 3), (1, 3))]
)
def test_a_graph_placed_as_a_chain_has_fewer_orders(boundaries):
    pipeline = Pipeline(placed("v", 2), 4, boundaries=boundaries)
    check(synthesize(pipeline, moves=20), pipeline)


def test_less_memory_than_any_order_needs():
    pipeline = Pipeline(placed("v", 2), 4)
    with pytest.raises(ValueError, match="no order within 1 bytes a rank; the least found takes 2"):
        synthesize(pipeline, 1)
    check(synthesize(pipeline, 2), pipeline, memory=2)
    pipeline = Pipeline(placed("v", 2), 4, cost=Costs(saved=1234564.0))
    with pytest.raises(
        ValueError, match="no order within 1e\\+06 bytes a rank; the least found takes 2469128"
    ) as error:
        synthesize(pipeline, 1e6)
    least = float(str(error.value).rstrip(".").split()[-1])
    check(synthesize(pipeline, least), pipeline, memory=least)
