"""Symmetric memory and its signals, on ranks that are processes, by both cores."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from symmetric_ranks import shared_files

from hp_onesided import Signal, SymmetricMemory, core_name, opening
from hp_onesided.cores.segment import Place
from hp_onesided.memory import host
from hp_platform import get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.not_on("torch-cuda", "torch-npu", "torch-npu-sim", reason="tensors are on the host here")


def world():
    return get_platform().groups.default_group()


@pytest.fixture(params=["native", "python"])
def core(request):
    return request.param


def use(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give symmetric memory a core."""
    if core == "python":
        monkeypatch.setattr(host, "core_name", lambda: "python")
    elif core_name() != "native":
        pytest.skip("needs a C++ compiler")


@on_ranks(1, 2, 3, 4)
@pytest.mark.smoke
def test_ranks_read_and_write_each_others_memory(core, ranks, monkeypatch):
    use(core, monkeypatch)
    rank = get_platform().groups.rank()
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    with SymmetricMemory(world(), 4096) as memory:
        assert (memory.rank, memory.size, memory.nbytes) == (rank, ranks, 4096)
        own = memory.local((2, 3), torch.float64, 16)
        assert own.tolist() == [[0.0] * 3] * 2
        own.fill_(rank)
        memory.barrier()
        assert memory.peer(following, (2, 3), torch.float64, 16).unique().tolist() == [following]
        memory.barrier()
        signal = Signal(memory, 3)
        memory.put(following, torch.arange(6).view(2, 3).t() + rank, 256)  # of no order in memory
        signal.add(following)
        signal.wait(1, before)
        came = memory.local((3, 2), torch.int64, 256)
        assert came.tolist() == [[before + column, before + column + 3] for column in range(3)]
        found = torch.zeros(6, 2, dtype=torch.float64)[:, 0]
        assert memory.get(following, found, 16) is found and found.tolist() == [following] * 6
        with pytest.raises(ValueError, match="13 bytes"):
            memory.peer(rank, (13,), torch.bool, 4090)
        assert memory.local((0, 4), torch.float32, 4096).shape == (0, 4)
        assert memory.local((), torch.float32).item() == 0.0
        memory.barrier()


@on_ranks(2, 4)
def test_a_signal_orders_what_was_written(core, ranks, monkeypatch):
    """Each rank hands a block on many times; a value seen too early or overwritten too early shows."""
    use(core, monkeypatch)
    rank, turns = get_platform().groups.rank(), 300
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    with SymmetricMemory(world(), 1 << 16) as memory:
        filled, read = Signal(memory, 0), Signal(memory, 1)
        block = torch.empty(1000)
        for turn in range(turns):
            read.wait(turn, following)
            memory.put(following, torch.full((1000,), float(turn * ranks + rank)))
            filled.add(following)
            filled.wait(turn + 1, before)
            memory.get(rank, block)
            read.add(before)
            assert block.unique().tolist() == [turn * ranks + before]


@on_ranks(3)
def test_signals_of_all_ranks_are_counted_apart(core, monkeypatch):
    use(core, monkeypatch)
    rank = get_platform().groups.rank()
    with SymmetricMemory(world(), 64) as memory:
        signal = Signal(memory, 0)
        for peer in range(3):
            signal.add(peer, n=rank + 1)
        signal.wait(1)
        for peer in range(3):
            signal.wait(peer + 1, peer)
        assert [signal.count(peer) for peer in range(3)] == [1, 2, 3]
        memory.barrier()


@on_ranks(3)
def test_signals_of_overlapping_groups_never_meet(core, monkeypatch):
    """Ranks 0 and 1 are in three memories; what is added in one completes no wait in another, in the same slot."""
    use(core, monkeypatch)
    groups = get_platform().groups
    rank = groups.rank()
    pair = groups.second_group([0, 1]) if rank < 2 else None
    with SymmetricMemory(world(), 64) as whole:
        if pair is not None:
            with SymmetricMemory(pair, 64) as first, SymmetricMemory(pair, 64) as second:
                memories = [whole, first, second]
                signals = [Signal(memory, 0) for memory in memories]
                for at, signal in enumerate(signals):
                    if rank == 0:
                        memories[at].barrier() if at else None
                        signal.add(1, n=at + 1)
                        first.barrier()
                    else:
                        memories[at].barrier() if at else None
                        signal.wait(at + 1, 0)
                        counts = [each.count(0) for each in signals]
                        assert counts == [1, 2, 3][: at + 1] + [0] * (2 - at)
                        for later in signals[at + 1 :]:
                            with pytest.raises(TimeoutError, match="signal 0 of rank 0 did not come"):
                                later.wait(1, 0, limit=0.05)
                        first.barrier()
        whole.barrier()
    if pair is not None:
        groups.destroy(pair)


@on_ranks(4)
def test_a_subgroup_meets_before_a_larger_group(core, monkeypatch):
    use(core, monkeypatch)
    groups = get_platform().groups
    rank = groups.rank()
    group = groups.second_group([0, 2] if rank in (0, 2) else [1, 3])
    with SymmetricMemory(group, 64) as part, SymmetricMemory(world(), 128) as whole:
        part.local((1,), torch.int32).fill_(10 + rank)
        whole.local((1,), torch.int32).fill_(20 + rank)
        whole.barrier()
        members = [0, 2] if rank in (0, 2) else [1, 3]
        assert [part.peer(peer, (1,), torch.int32).item() for peer in range(2)] == [10 + each for each in members]
        assert [whole.peer(peer, (1,), torch.int32).item() for peer in range(4)] == [20, 21, 22, 23]
        whole.barrier()
    groups.destroy(group)


@on_ranks(2)
def test_a_signal_that_is_never_sent_is_named(core, monkeypatch):
    use(core, monkeypatch)
    rank = get_platform().groups.rank()
    with SymmetricMemory(world(), 64) as memory:
        signal = Signal(memory, 5)
        signal.add(1 - rank)
        begun = time.monotonic()
        expected = rf"signal 5 of rank {1 - rank} did not come within 0.3 s; it has added 1 of 2; its process lives"
        with pytest.raises(TimeoutError, match=expected):
            signal.wait(2, limit=0.3)
        assert time.monotonic() - begun >= 0.3
        memory.barrier()
        signal.add(1 - rank)
        signal.wait(2)  # the wait is repeated, and succeeds


@on_ranks(2)
def test_what_can_not_be_is_refused():
    rank = get_platform().groups.rank()
    with SymmetricMemory(world(), 100, slots=2) as memory:
        signal = Signal(memory, 1)
        cases = [
            (lambda: memory.local((26,), torch.float32), r"\(26,\) of torch.float32 takes 104 bytes, from offset 0"),
            (lambda: memory.local((1,), torch.float32, 2), "offset 2 is no multiple of the 4 bytes of an element"),
            (lambda: memory.local((1,), torch.int8, -1), "from offset -1 on; the memory has 100"),
            (lambda: memory.local((-1,), torch.int8), r"a shape has numbers from 0, got \(-1,\)"),
            (lambda: memory.peer(2, (1,), torch.int8), "rank 2 is not in the group, whose 2 ranks count from 0"),
            (lambda: memory.put(-1, torch.ones(1)), "rank -1 is not in the group"),
            (lambda: memory.get(1, torch.ones(26)), "takes 104 bytes"),
            (lambda: signal.add(2), "rank 2 is not in the group"),
            (lambda: signal.add(0, 0), "a signal only grows: n has to be a number from 1, got 0"),
            (lambda: signal.wait(1, rank=7), "rank 7 is not in the group"),
            (lambda: Signal(memory, 2), "slot 2 is not in the memory, whose 2 slots count from 0"),
            (lambda: Signal(memory, 1), "slot 1 has a signal already"),
        ]
        for call, text in cases:
            with pytest.raises(ValueError, match=text):
                call()
    memory.close()  # once more, nothing
    calls = (
        memory.barrier,
        lambda: memory.local((1,), torch.int8),
        lambda: signal.add(rank),
        lambda: Signal(memory, 0),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="the symmetric memory is closed"):
            call()


def refuse(*_args):
    raise PermissionError(1, "Operation not permitted")


NOT_ALIKE = {
    "size": (
        lambda rank, patch: {"nbytes": 64 * (1 + rank)},
        ValueError,
        "rank 0 asks for 64 bytes, rank 1 for 128",
    ),
    "slots": (lambda rank, patch: {"slots": 3 - rank}, ValueError, "rank 0 asks for 3 slots, rank 1 for 2"),
    "no size": (
        lambda rank, patch: {"nbytes": [64, -1][rank]},
        ValueError,
        "nbytes has to be a number from 1, rank 1 has -1",
    ),
    "host": (
        lambda rank, patch: patch(host, "own_network", lambda: f"host {rank}") or {},
        RuntimeError,
        r"they are on 2 hosts: \[0\], \[1\]. Make a group of the ranks of each host",
    ),
    "denied": (
        lambda rank, patch: (patch(os, "memfd_create", refuse) if rank else None) or {},
        RuntimeError,
        r"rank 1: \d+ bytes of shared memory: \[Errno 1\] Operation not permitted",
    ),
    "no processes": (
        lambda rank, patch: (patch(opening, "hold", refuse) if rank else None) or {},
        RuntimeError,
        r"rank 1: memory of rank 0 of the group: \[Errno 1\] Operation not permitted",
    ),
    "no look": (
        lambda rank, patch: (None if rank else patch(Place, "map", refuse)) or {},
        RuntimeError,
        r"rank 0: memory of rank 1 of the group: \[Errno 1\] Operation not permitted",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("case", NOT_ALIKE)
def test_what_one_rank_lacks_is_refused_on_all(case, monkeypatch):
    change, kind, text = NOT_ALIKE[case]
    group = get_platform().groups.second_group(range(2))
    gc.collect()
    before = left()
    with monkeypatch.context() as patch:
        changed = change(get_platform().groups.rank(), patch.setattr)
        with pytest.raises(kind, match=text):
            SymmetricMemory(group, **({"nbytes": 64} | changed))
    gc.collect()
    assert left() == before
    get_platform().groups.destroy(group)


def left() -> tuple[int, int, int]:
    """Count this process's open files of memory and of processes, its threads, and its mappings of shared memory."""
    mapped = Path("/proc/self/maps").read_text().count("memfd:hp_onesided")
    return shared_files(), threading.active_count(), mapped


@on_ranks(2)
def test_memories_leave_nothing():
    def allocate() -> tuple[int, int, int]:
        with SymmetricMemory(world(), 1 << 16) as memory:
            view = memory.peer(1 - memory.rank, (4,), torch.float32)
            Signal(memory, 0).add(0)
            memory.barrier()
        view.fill_(1.0)  # it keeps the memory
        del memory, view
        gc.collect()
        return left()

    first = allocate()
    assert [allocate() for _ in range(10)] == [first] * 10


@on_ranks(2)
def test_ranks_that_call_differently_are_refused_on_all():
    rank = get_platform().groups.rank()
    memory = SymmetricMemory(world(), 64)
    with pytest.raises(RuntimeError, match=r"rank 0 of the group calls barrier\(\), rank 1 close\(\)"):
        memory.close() if rank else memory.barrier()
    if not rank:
        with pytest.raises(RuntimeError, match="rank 1 has closed the memory, while the close of rank 1"):
            memory.close()


@on_ranks(2)
def test_a_rank_that_raises_does_not_keep_the_others_waiting():
    rank = get_platform().groups.rank()
    with pytest.raises((KeyError, RuntimeError)) as caught, SymmetricMemory(world(), 64) as memory:
        if rank:
            raise KeyError("of its own")
        Signal(memory, 0).wait(1, rank=1)
    told = "hp_onesided: rank 1 has closed the memory, while signal 0 of rank 1 was waited for"
    assert caught.value.args == (("of its own",) if rank else (told,))


@on_ranks(2)
def test_a_forked_child_has_no_part_in_the_memory():
    with SymmetricMemory(world(), 64) as memory:
        signal = Signal(memory, 0)
        pid = os.fork()
        if not pid:
            code = 1
            for call in (memory.barrier, lambda: memory.local((1,), torch.int8), lambda: signal.add(0)):
                try:
                    call()
                except RuntimeError as error:
                    code = 0 if "forked" in str(error) else 2
            memory.close()
            os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        memory.barrier()


@on_ranks(2)
def test_the_number_of_ranks_that_a_launcher_tells_says_nothing(monkeypatch):
    """The group is taken for what it is, whatever the launcher says of the host."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with SymmetricMemory(world(), 64) as memory:
        assert memory.size == 2
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        memory.barrier()


@on_ranks(2)
def test_a_thread_that_waits_hears_that_its_rank_has_left(core, monkeypatch):
    use(core, monkeypatch)
    waits = threading.Event()
    told = []
    memory = SymmetricMemory(world(), 64)
    signal = Signal(memory, 0)

    def wait():
        waits.set()
        try:
            signal.wait(1, rank=1 - memory.rank)
        except Exception as error:
            told.append((type(error), str(error)))

    thread = threading.Thread(target=wait)
    if memory.rank == 0:
        thread.start()
        waits.wait()
        time.sleep(0.2)
        with pytest.raises(KeyError), memory:
            raise KeyError
        thread.join()
    get_platform().collectives.barrier(world())
    if memory.rank == 0:
        text = "hp_onesided: the memory was closed here, while signal 0 of rank 1 was waited for"
        assert told == [(RuntimeError, text)]
    else:
        with pytest.raises(RuntimeError, match="rank 0 has closed the memory"):
            memory.close()
