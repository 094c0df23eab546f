"""What observers of collectives are told of the modules that these are for."""

from __future__ import annotations

import threading

import pytest

from hp_platform.communication.checks import attribute_to, attributed_modules, begin, observers


@pytest.fixture
def told():
    found = []
    observers.append(observer := lambda kind, size, group: found.append((kind, attributed_modules())))
    yield found
    observers.remove(observer)


def test_what_communicates_for_a_module_says_so(told):
    def inner(kind, *, size):
        begin(kind, size, None)
        return size + 1

    def outer():
        attribute_to(("inner", "root"), inner, "second", size=1)
        begin("third", 1, None)

    begin("first", 1, None)
    attribute_to(("outer",), outer)
    assert attribute_to((), inner, "fourth", size=2) == 3
    assert told == [("first", ()), ("second", ("inner", "root")), ("third", ("outer",)), ("fourth", ())]


def test_an_error_and_another_thread_leave_nothing(told):
    def fails():
        thread = threading.Thread(target=begin, args=("elsewhere", 1, None))
        thread.start(), thread.join()
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        attribute_to(("module",), fails)
    assert attributed_modules() == () and told == [("elsewhere", ())]


def test_where_nobody_observes_nothing_is_noted():
    assert attribute_to(("module",), attributed_modules) == ()
