"""A rank that was asked to stop ends when its work is done."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, threading
from hyper_parallel.supervision.run_end import Stop

stop = Stop(within={within})
stop.listen()
if {asked}:
    os.kill(os.getpid(), signal.SIGTERM)
if {done}:
    print("done")  # in a buffer: the output is a pipe
    stop.end()
threading.Event().wait({waits})  # as torch's wrapper, for a launcher that reads no more
"""


@pytest.mark.parametrize(
    ("within", "asked", "done", "waits", "status", "output"),
    [
        (1e6, True, True, None, 0, "done\n"),
        (0.1, True, False, None, 128 + signal.SIGTERM, ""),
        (1e6, False, True, 1.0, 0, "done\n"),  # it goes on, and ends as any program
    ],
)
def test_the_end_of_a_rank(within, asked, done, waits, status, output):
    program = PROGRAM.format(within=within, asked=asked, done=done, waits=waits)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert (ended.returncode, ended.stdout) == (status, output), ended.stderr
