"""What the last pass says about the order of this one."""

from __future__ import annotations

from hp_fsdp.steps.order import ExecutionOrder


def visits(order: ExecutionOrder[str], names: str) -> list[str | None]:
    made = [order.visit(name) for name in names]
    order.start()
    return made


def test_the_second_pass_knows_what_comes_next():
    order: ExecutionOrder[str] = ExecutionOrder()
    assert visits(order, "abc") == [None, None, None]
    assert visits(order, "abc") == ["b", "c", None]


def test_one_item_several_times_is_followed_by_what_followed_it_there():
    order: ExecutionOrder[str] = ExecutionOrder()
    visits(order, "abac")
    assert visits(order, "abac") == ["b", "a", "c", None]


def test_a_skipped_item_costs_one_wrong_prediction():
    order: ExecutionOrder[str] = ExecutionOrder()
    visits(order, "abcd")
    assert visits(order, "acd") == ["b", "d", None]


def test_an_expected_order_predicts_the_first_pass():
    order: ExecutionOrder[str] = ExecutionOrder()
    assert not order.known
    order.start("cba")
    assert visits(order, "cba") == ["b", "a", None]


def test_an_empty_pass_is_not_remembered():
    order: ExecutionOrder[str] = ExecutionOrder()
    visits(order, "ab")
    order.start()
    assert visits(order, "ab") == ["b", None]
