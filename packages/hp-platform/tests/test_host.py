"""Waiting for a backend's threads at the end of a process."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
import time

import pytest

from hp_platform.platforms.launchers import wait_for_threads
from hp_testing import on_ranks

NAME, SET_NAME = "hp-testing-waits", 15  # PR_SET_NAME; Linux keeps 15 characters


def _named(work):
    def run():
        ctypes.CDLL(None).prctl(SET_NAME, NAME.encode())
        named.set()
        work()

    named = threading.Event()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    named.wait()
    return thread


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked at on Linux")
@on_ranks(1)
def test_threads_that_compute_are_waited_for():
    done = []

    def computes():  # without the interpreter
        hashlib.sha256(bytes(200_000_000))
        done.append(True)

    thread = _named(computes)
    wait_for_threads(NAME[:15], limit=60)
    assert done
    thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked at on Linux")
@on_ranks(1)
def test_threads_that_sleep_are_not_waited_for_nor_those_that_never_end_beyond_the_limit():
    ended = threading.Event()
    sleeps = _named(ended.wait)
    wait_for_threads(NAME[:15], limit=1e9)
    ended.set()
    sleeps.join()

    ended = threading.Event()

    def spins():
        while not ended.is_set():
            pass

    spinning, before = _named(spins), time.monotonic()
    wait_for_threads(NAME[:15], limit=0.2)
    assert spinning.is_alive() and time.monotonic() - before >= 0.2
    ended.set()
    spinning.join()
