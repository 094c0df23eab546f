"""What observers of collectives are told of the modules that these are for."""

from __future__ import annotations

import threading

import pytest

from hp_platform.observing import begin, communicate_for, communicating_for, observers


@pytest.fixture
def told():
    found = []
    observers.append(observer := lambda kind, size, group: found.append((kind, communicating_for())))
    yield found
    observers.remove(observer)


def test_what_communicates_for_a_module_says_so(told):
    def inner(kind, *, size):
        begin(kind, size, None)
        return size + 1

    def outer():
        communicate_for(("inner", "root"), inner, "second", size=1)
        begin("third", 1, None)

    begin("first", 1, None)
    communicate_for(("outer",), outer)
    assert communicate_for((), inner, "fourth", size=2) == 3
    assert told == [("first", ()), ("second", ("inner", "root")), ("third", ("outer",)), ("fourth", ())]


def test_an_error_and_another_thread_leave_nothing(told):
    def fails():
        thread = threading.Thread(target=begin, args=("elsewhere", 1, None))
        thread.start(), thread.join()
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        communicate_for(("module",), fails)
    assert communicating_for() == () and told == [("elsewhere", ())]


def test_where_nobody_observes_nothing_is_noted():
    assert communicate_for(("module",), communicating_for) == ()
