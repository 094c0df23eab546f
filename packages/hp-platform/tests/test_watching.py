"""A watch over ranks that a launcher of somebody else's started."""

from __future__ import annotations

import contextlib
import hashlib
import io
import signal
import time

import numpy as np
import pytest

from hp_platform import get_platform, watch_hangs
from hp_platform.communication.agreement import share_bytes
from hp_platform.failures import flight
from hp_platform.failures.flight import Channel, read_flight
from hp_platform.groups import number_of
from hp_testing import as_tensor, on_ranks


def waiting(watch, rank):
    read = read_flight(watch._folder, rank)  # None of one that has not begun
    return None if read is None else read.waiting


def reported(watch, waits):
    """Wait until ranks wait in collectives, and somebody has written a report of it."""
    while any(waiting(watch, rank) != wait for rank, wait in waits.items()) or not written(watch):
        time.sleep(0.02)


def written(watch):
    state = hashlib.sha256(b"".join(watch._content(rank) for rank in watch._here)).hexdigest()
    told = watch._folder / f"told-{state}"
    return told.exists() and told.stat().st_size  # empty while the stacks are asked for


def does_something_else(watch, waits):
    reported(watch, waits)


def all_texts(output):
    """Return what the ranks wrote, on all of them."""
    return b"".join(share_bytes(output.getvalue().encode(), get_platform().groups.default_group())).decode()


@pytest.mark.smoke
@on_ranks(2)
def test_a_rank_that_does_not_come_is_named_with_its_stack():
    platform = get_platform()
    group, tensor = platform.groups.default_group(), as_tensor(np.ones(4, np.float32))
    with contextlib.redirect_stderr(io.StringIO()) as output, watch_hangs(0.5) as watch:
        platform.collectives.all_reduce(tensor, "max", group=group)
        if platform.groups.rank() == 1:
            does_something_else(watch, {0: (Channel((0, 1)), 2)})
        platform.collectives.all_reduce(tensor, "max", group=group)
        platform.collectives.barrier()  # it has been written
    text = all_texts(output)
    assert (
        text.count("s no rank went on (watch_hangs): rank 1 has not come to all_reduce number 2 over ranks [0, 1]") == 1
    )
    assert "\nrank 0 waits in all_reduce number 2 over ranks [0, 1] (16 bytes), at " in text
    assert (
        "\nrank 1 waits in no collective; the last that it began was all_reduce number 1 over ranks [0, 1] (16 b"
        in text
    )
    assert "in does_something_else" in text[text.index("\nStack of rank 1:\n") :]
    assert flight.recorder is None and not watch._folder.exists()


@on_ranks(3)
def test_ranks_in_different_groups_are_named_with_their_groups():
    platform = get_platform()
    rank, everyone = platform.groups.rank(), platform.groups.default_group()
    pair = platform.groups.new_group([0, 1]) if rank < 2 else None
    # Earlier tests of these processes may have made groups of the same ranks.
    number = share_bytes(b"" if pair is None else str(number_of(pair)).encode(), everyone)[0].decode()
    tensor = as_tensor(np.ones(4, np.float32))
    with contextlib.redirect_stderr(io.StringIO()) as output, watch_hangs(0.5) as watch:
        if rank == 1:
            reported(watch, {0: (Channel((0, 1), number=int(number)), 1), 2: (Channel((0, 1, 2)), 1)})
        if rank < 2:
            platform.collectives.all_reduce(tensor, "max", group=pair)
        platform.collectives.all_reduce(tensor, "max", group=everyone)
        platform.collectives.barrier()
    text = all_texts(output)
    among = "" if number == "0" else f"group {int(number) + 1} of these ranks, "
    named = f"all_reduce number 1 over ranks [0, 1] ({among}16 bytes)"
    assert f"rank 1 has not come to {named}" in text
    assert f"\nrank 0 waits in {named}" in text
    assert "\nrank 2 waits in all_reduce number 1 over ranks [0, 1, 2] (16 bytes)" in text


@on_ranks(2)
def test_wrong_arguments_are_refused_on_all_ranks():
    rank = get_platform().groups.rank()
    with pytest.raises(ValueError, match=r"seconds must be above 0, got -1\."):
        watch_hangs(-1)
    with pytest.raises(ValueError, match=r"then must be 'report' or 'end', got 'stop'\."):
        watch_hangs(1, then="stop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rank 0 watches for 60 s, then='report'; rank 1 for 61 s, then='report'\."):
        watch_hangs(60 + rank)
    kind, text = (
        (ValueError, "got 0") if rank else (RuntimeError, r"failed on rank 1: watch_hangs: seconds must be abo")
    )
    with pytest.raises(kind, match=text):
        watch_hangs(1 - rank)
    with watch_hangs(60), pytest.raises(RuntimeError, match="watched already"):
        watch_hangs(60)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with pytest.raises(RuntimeError, match="a handler of SIGUSR1, .* give it another signal, as SIGUSR2"):
            watch_hangs(60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        with watch_hangs(60):
            get_platform().collectives.barrier()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert flight.recorder is None
