"""The pool of ranks: what goes in and comes out, and what happens to ranks that fail."""

from __future__ import annotations

import os
import time
import warnings

import numpy as np
import pytest

from hp_platform import get_platform, groups
from hp_testing import RankError, as_array, as_tensor, on_ranks, run_ranks


def reduce_once(value: float) -> tuple[int, float]:
    platform = get_platform()
    rank = platform.groups.rank()
    tensor = as_tensor(np.full(4, value * (rank + 1)), "float32")
    platform.collectives.all_reduce(tensor, group=platform.groups.new_group(range(platform.groups.size())))
    return rank, as_array(tensor)[0].item()


def test_results_come_back_in_rank_order():
    assert run_ranks(2, reduce_once, 1.5) == [(0, 4.5), (1, 4.5)]


def test_warm_pool_is_fast(record_property, capsys):
    run_ranks(2, reduce_once, 1.0)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        run_ranks(2, reduce_once, 1.0)
        times.append(time.perf_counter() - begin)
    milliseconds = sorted(times)[len(times) // 2] * 1e3
    record_property("two_rank_body_ms", milliseconds)
    with capsys.disabled():
        print(f"\na two-rank body on the warm pool: {milliseconds:.2f} ms (median of 20)")


def fail_on(rank: int) -> None:
    if get_platform().groups.rank() == rank:
        raise ValueError(f"no luck on rank {rank}")
    get_platform().collectives.barrier()


def test_a_rank_that_raises_is_shown_and_its_peers_are_freed():
    begin = time.monotonic()
    with pytest.raises(RankError, match="no luck on rank 1") as caught:
        run_ranks(2, fail_on, 1)
    assert time.monotonic() - begin < 20
    message = str(caught.value)
    assert "--- rank 1 ---" in message and "in fail_on" in message
    assert "--- rank 0 ---" in message and "a peer failed" in message
    assert run_ranks(2, reduce_once, 1.0) == [(0, 3.0), (1, 3.0)]


def die(code: int) -> None:
    if get_platform().groups.rank() == 0:
        os._exit(code)


def test_a_rank_that_dies_is_reported_with_its_exit_code():
    with pytest.raises(RankError, match="--- rank 0 ---\ndied with exit code 7"):
        run_ranks(2, die, 7)
    assert run_ranks(2, reduce_once, 1.0) == [(0, 3.0), (1, 3.0)]


def hang() -> None:
    time.sleep(600)


def test_a_hang_is_killed_with_each_ranks_stack():
    with pytest.raises(RankError, match="the time limit of 0.5 s") as caught:
        run_ranks(2, hang, timeout=0.5)
    message = str(caught.value)
    assert "--- rank 0, 1 ---" in message and "in hang" in message  # equal stacks are told once
    assert run_ranks(2, reduce_once, 1.0) == [(0, 3.0), (1, 3.0)]


def compute(seconds: float) -> float:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return seconds


def test_ranks_that_compute_have_longer():
    assert run_ranks(2, compute, 0.3, timeout=0.25) == [0.3, 0.3]
    with pytest.raises(RankError, match="the time limit of 0.25 s"):
        run_ranks(2, compute, 600.0, timeout=0.25)


def disconnect() -> None:
    if groups.can_disconnect():
        groups.disconnect()


def test_ranks_whose_connections_are_broken_are_no_longer_used():
    """As by a run that fails as its test wants, and saves its last step with the ranks that are left."""
    run_ranks(2, disconnect)
    assert run_ranks(2, reduce_once, 1.0) == [(0, 3.0), (1, 3.0)]


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_a_warning_in_a_rank_is_an_error():
    with pytest.raises(RankError, match="UserWarning: careful"):
        run_ranks(1, warn)


@pytest.mark.filterwarnings("ignore:careful")
def test_a_tests_own_filters_hold_in_its_ranks():
    run_ranks(1, warn)


@on_ranks(1, 2)
@pytest.mark.parametrize("shift", [0, 1])
def test_the_decorator_runs_the_body_on_every_rank(shift, ranks):
    assert get_platform().groups.size() == ranks
    assert shift in (0, 1)


@on_ranks(2)
def test_patches_hold_in_the_ranks(monkeypatch):
    monkeypatch.setattr(np, "pi", 3)
    monkeypatch.setenv("HP_TESTING_PATCHED", "yes")
    assert np.pi == 3 and os.environ["HP_TESTING_PATCHED"] == "yes"


@on_ranks(2)
def test_patches_of_the_test_before_are_undone():
    assert np.pi > 3 and "HP_TESTING_PATCHED" not in os.environ
