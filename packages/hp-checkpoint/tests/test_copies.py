"""Copies of a rank's state in memory that another process holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from hp_checkpoint.errors import Ranks
from hp_checkpoint.extend import Copies, hold
from hp_checkpoint.saving import copies as module
from hp_checkpoint.saving.copies import StaleEpochError


def state(step):
    weights = np.arange(12, dtype=np.float32).reshape(3, 4) + step
    return {
        "weights": weights,
        "odd": np.full(5, step, np.uint8),
        "none": np.empty(0),
        "options": {"betas": (0.9, 0.1)},
    }


class Held:
    """Slots of some holders, and copies over them."""

    def __init__(self, holders=1, slots=2):
        self.arenas = hold(holders, slots=slots)
        self.descriptors = [[arena.descriptor for arena in holder] for holder in self.arenas]

    def copies(self, epoch=0):
        return Copies(self.descriptors, rank=3, epoch=epoch)

    def flip(self, holder, slot):
        """Flip a bit of a slot's tensors."""
        memory = self.arenas[holder][slot].reserve(os.fstat(self.descriptors[holder][slot]).st_size)
        memory[-70] ^= 4


@pytest.fixture
def held():
    made: list[Held] = []

    def make(holders=1, slots=2):
        made.append(Held(holders, slots))
        return made[-1]

    yield make
    for each in made:
        for arena in (arena for holder in each.arenas for arena in holder):
            arena.close()


def newest(copies):
    return max(copies.steps(Ranks(alone=True))[0], default=None)


def test_a_state_comes_back_with_its_bytes_and_values(held):
    one = held()
    copies = one.copies()
    for step in (1, 2, 3):
        copies.keep(step, state(step))
    other = one.copies(epoch=1)
    assert newest(other) == 3
    for step in (3, 2):  # what is newer than what was restored is dropped
        got, expected = other.restore(step), state(step)
        assert got["options"] == expected["options"]
        for name in ("weights", "odd", "none"):
            assert got[name].tobytes() == expected[name].tobytes()
    assert newest(other) == 2
    assert other.refused == []


def test_what_is_restored_is_not_written_over_by_the_next_copy(held):
    one = held()
    copies = one.copies()
    copies.keep(1, state(1))
    copies.keep(2, state(2))
    other = one.copies(epoch=1)
    other.restore(1)
    other.keep(2, state(20))
    assert sorted(other._readable()) == [1, 2]
    assert newest(other) == 2 and other.restore(2)["odd"].tobytes() == b"\x14" * 5


def test_of_three_slots_one_stays_with_the_step_that_was_checked(held):
    one = held(slots=3)
    copies = one.copies()
    for step in range(1, 10):
        copies.keep(step, state(step), checked=1 if step < 5 else 5)
        assert {step, min(step, 1 if step < 5 else 5)} <= copies._readable().keys()
    other = one.copies(epoch=1)
    assert sorted(other._readable()) == [5, 8, 9]
    other.forget(8)
    assert sorted(other._readable()) == [5, 8]
    assert other.restore(5)["weights"].tobytes() == state(5)["weights"].tobytes()
    other.keep(6, state(6), checked=5)
    other.keep(7, state(7), checked=5)
    other.keep(8, state(8), checked=5)
    assert sorted(other._readable()) == [5, 7, 8]


def test_a_larger_state_takes_more_memory(held):
    copies = held().copies()
    copies.keep(1, state(1))
    copies.keep(2, {"weights": np.ones(300_000)})
    copies.keep(3, {"weights": np.ones(400_000)})
    assert newest(copies) == 3 and len(copies.restore(3)["weights"]) == 8 * 400_000


@pytest.mark.parametrize("calls", range(4))
def test_a_writer_that_is_stopped_anywhere_leaves_the_copy_before(held, monkeypatch, calls):
    one = held()
    copies = one.copies()
    copies.keep(1, state(1))
    copies.keep(2, state(2))
    left = [calls]
    copied = module._copied

    def stops(target, source):
        left[0] -= 1
        if left[0] < 0:
            target[: len(source) // 2] = source[: len(source) // 2]
            raise KeyboardInterrupt
        return copied(target, source)

    monkeypatch.setattr(module, "_copied", stops)
    with pytest.raises(KeyboardInterrupt):
        copies.keep(3, state(3))
    other = one.copies(epoch=1)
    assert newest(other) == 2 and other.restore(2)["weights"].tobytes() == state(2)["weights"].tobytes()
    assert other.refused == []


def test_a_copy_with_a_flipped_bit_is_refused_and_the_next_holder_used(held):
    one = held(holders=2)
    copies = one.copies()
    copies.keep(1, state(1))
    copies.keep(2, state(2))
    one.flip(0, 1)
    assert newest(copies) == 2 and copies.restore(2)["weights"].tobytes() == state(2)["weights"].tobytes()
    assert copies.refused == [
        "the copy of rank 3 of step 2 in holder 0 has other bits than were written: it is not used"
    ]
    one.flip(1, 1)
    assert newest(copies) == 1  # the older slot
    one.flip(0, 0)
    one.flip(1, 0)
    assert newest(copies) is None
    assert len(copies.refused) == 4


def test_a_process_of_an_older_epoch_is_refused(held):
    one = held()
    old = one.copies(epoch=0)
    old.keep(1, state(1))
    one.copies(epoch=1).keep(2, state(2))
    with pytest.raises(StaleEpochError, match="this process is of epoch 0, and its copies are of epoch 1"):
        old.keep(2, state(2))


def test_memory_that_lacks_is_an_error_and_leaves_what_was_there(held, monkeypatch):
    copies = held().copies()
    copies.keep(1, state(1))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        copies.keep(2, state(2))
    assert newest(copies) == 1


def test_a_copy_outlives_the_process_that_was_killed_while_it_wrote(held):
    one = held()
    paths = [[f"/proc/{os.getpid()}/fd/{each}" for each in holder] for holder in one.descriptors]
    program = f"""
import numpy as np, sys
from hp_checkpoint.extend import Copies
copies = Copies({paths}, rank=3, epoch=0)
for step in range(1, 10_000_000):
    copies.keep(step, {{"weights": np.full(100_000, step), "step": step}})
    print(step, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = 0
        while seen < 5:
            seen = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        seen = max([seen, *map(int, process.stdout.read().split())])
    copies = one.copies(epoch=1)
    step = newest(copies)
    assert step is not None and step >= seen
    got = copies.restore(step)
    assert got["step"] == step and (np.frombuffer(got["weights"].tobytes(), np.int64) == step).all()
