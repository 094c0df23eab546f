"""Messages between two ranks over shared memory: on threads, by both cores, and on ranks that are processes."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import failing_ranks
import pytest
import torch
from shared_teams import CORES, team

from hp_onesided.carriers import carrier as carrier_module
from hp_onesided.carriers import messages
from hp_onesided.carriers.carrier import SharedMemory
from hp_platform import get_platform
from hp_platform.communication.carriers import carrier_of
from hp_testing import on_ranks
from hp_testing.pools.processes import rank_processes

pytestmark = pytest.mark.not_on("torch-cuda", "torch-npu", "torch-npu-sim", reason="tensors are on the host here")


def send(carrier, tensor, peer, tag=0, async_op=False):
    return carrier.message(tensor, peer, "send", tag, async_op)


def receive(carrier, tensor, peer, tag=0, async_op=False):
    return carrier.message(tensor, peer, "recv", tag, async_op)


def barrier(carrier):
    carrier.start("barrier", None, None, "sum", (), (), 0, False)


@pytest.mark.parametrize("core", CORES)
def test_any_size_in_order(core):
    counts = [0, 1, 7, 1023, 1 << 18, 3, (1 << 20) + 1, 0, 5]

    def work(rank, carrier):
        if rank == 0:
            for number, count in enumerate(counts):
                send(carrier, torch.full((count,), float(number)), 1)
            return None
        found = []
        for count in counts:
            tensor = torch.empty(count)
            receive(carrier, tensor, 0)
            found.append(tensor)
        return found

    with team(2, core) as on_all:
        found = on_all(work)[1]
    for number, (count, tensor) in enumerate(zip(counts, found, strict=True)):
        assert torch.equal(tensor, torch.full((count,), float(number)))


@pytest.mark.parametrize("core", CORES)
def test_many_cross_each_other(core):
    """Each sends more to each other one than there are records for, before it waits for any."""
    size, count = 3, 40

    def work(rank, carrier):
        others = [peer for peer in range(size) if peer != rank]
        found = {peer: [torch.empty(5_000) for _ in range(count)] for peer in others}
        handles = [receive(carrier, tensor, peer, async_op=True) for peer in others for tensor in found[peer]]
        for peer in others:
            for n in range(count):
                send(carrier, torch.full((5_000,), 100.0 * rank + n), peer)
        for handle in reversed(handles):
            handle.wait()
        return {peer: [tensor.unique().tolist() for tensor in tensors] for peer, tensors in found.items()}

    with team(size, core) as on_all:
        for told in on_all(work):
            assert all(values == [[100.0 * peer + n] for n in range(count)] for peer, values in told.items())


@pytest.mark.parametrize("core", CORES)
def test_tags_in_any_order(core):
    def work(rank, carrier):
        if rank == 0:
            for tag in (5, -3, 5, 0, 2**40):
                send(carrier, torch.tensor([float(tag)]), 1, tag)
            return None
        found = []
        for tag in (2**40, 5, 0, 5, -3):
            tensor = torch.empty(1)
            receive(carrier, tensor, 0, tag)
            found.append(tensor.item())
        return found

    with team(2, core) as on_all:
        assert on_all(work)[1] == [float(2**40), 5.0, 0.0, 5.0, -3.0]


@pytest.mark.parametrize("core", CORES)
def test_files_are_used_again_and_those_of_a_burst_let_go(core):
    def open_files():
        return sum("hp_onesided" in str(each.resolve()) for each in Path("/proc/self/fd").iterdir())

    counts, meeting = [], threading.Barrier(2, timeout=240)

    def work(rank, carrier):
        for burst in (1, 300, 1, 1, 1):
            if rank == 0:
                for number in range(burst):
                    send(carrier, torch.full((100 + number,), 1.0), 1)
            meeting.wait()
            for number in range(burst if rank == 1 else 0):
                tensor = torch.empty(100 + number)
                receive(carrier, tensor, 0)
                assert tensor.min() == tensor.max() == 1.0
            if rank == 1:
                counts.append(open_files())
            meeting.wait()

    with team(2, core) as on_all:
        on_all(work)
    first, most, *_, last = counts
    # A file is open where it was made, mapped there, and mapped by the receiver: two for messages, and one for records.
    assert last <= first + 9 and most <= first + 18


def test_sends_and_collectives_in_any_order():
    """A rank that has sent goes into a collective, which the receiver comes to after all that was sent."""

    def work(rank, carrier):
        total = torch.ones(1)
        if rank == 0:
            for number in range(20):
                send(carrier, torch.full((10,), float(number)), 1)
            carrier.start("all_reduce", total, total, "sum", (), (), 0, False)
            return None
        found = [torch.empty(10) for _ in range(20)]
        handles = [receive(carrier, each, 0, async_op=True) for each in found[:10]]
        for handle in handles:
            handle.wait()
        for each in found[10:]:
            receive(carrier, each, 0)
        carrier.start("all_reduce", total, total, "sum", (), (), 0, False)
        return [each[0].item() for each in found]

    with team(2, "python") as on_all:
        assert on_all(work)[1] == list(range(20))


def test_what_was_sent_does_not_change():
    def work(rank, carrier):
        tensor = torch.ones(3)
        if rank == 0:
            handle = send(carrier, tensor, 1, async_op=True)
            assert handle.is_done()
            tensor.zero_()
            send(carrier, tensor, 1)
            return None
        found = [torch.empty(3), torch.empty(3)]
        for each in found:
            receive(carrier, each, 0)
        return [each.tolist() for each in found]

    with team(2, "python") as on_all:
        assert on_all(work)[1] == [[1.0] * 3, [0.0] * 3]


def test_other_sizes_and_dtypes_are_refused():
    def work(rank, carrier):
        if rank == 0:
            send(carrier, torch.ones(4), 1)
            send(carrier, torch.ones(4), 1)
            send(carrier, torch.ones(2), 1)
            return None
        texts = []
        for wrong in (torch.empty(5), torch.empty(4, dtype=torch.int32)):
            with pytest.raises(RuntimeError) as raised:
                receive(carrier, wrong, 0, 0)
            texts.append(str(raised.value))
        right = torch.empty(2)
        receive(carrier, right, 0)
        return texts, right.tolist()

    with team(2, "python") as on_all:
        texts, right = on_all(work)[1]
    assert texts[0] == "hp_onesided: rank 0 sent 16 bytes of float32, and 20 bytes of float32 were expected (tag 0)"
    assert texts[1] == "hp_onesided: rank 0 sent 16 bytes of float32, and 16 bytes of int32 were expected (tag 0)"
    assert right == [1.0, 1.0]


def test_a_rank_that_does_not_send_is_named():
    def work(rank, carrier):
        if rank == 0:
            return None
        with pytest.raises(RuntimeError) as raised:
            receive(carrier, torch.empty(1), 0)
        return str(raised.value)

    with team(2, "python", limit=0.2) as on_all:
        text = on_all(work)[1]
    assert text == "hp_onesided: rank 0 did not come to the recv over ranks [0, 1] within 0.2 s; its process lives"


def test_after_a_late_message_the_group_says_the_same_again():
    """Else the next one that is received would be the second, while the first lands in a tensor that was given up."""
    sent = threading.Event()

    def work(rank, carrier):
        if rank == 0:
            sent.wait(20.0)
            for value in (1.0, 2.0):
                send(carrier, torch.tensor([value]), 1)
            return None
        texts = []
        for call in (receive, receive, send):
            with pytest.raises(RuntimeError) as raised:
                call(carrier, torch.empty(1), 0)
            texts.append(str(raised.value))
            sent.set()
        assert carrier.is_broken()
        with pytest.raises(RuntimeError) as raised:
            barrier(carrier)
        return {*texts, str(raised.value)}

    with team(2, "python", limit=0.2) as on_all:
        text = "hp_onesided: rank 0 did not come to the recv over ranks [0, 1] within 0.2 s; its process lives"
        assert on_all(work)[1] == {text}


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("waits", ["send", "recv"])
def test_messages_go_on_while_their_rank_is_in_a_collective(core, waits):
    count = 20

    def work(rank, carrier):
        first, then = torch.arange(float(count)), torch.empty(count)
        call, tensor = (send, first) if rank == 0 else (receive, then)
        there = (rank == 0) == (waits == "send")
        handles = [call(carrier, tensor[n : n + 1], 1 - rank, async_op=there) for n in range(count)]
        barrier(carrier)
        if there:
            for handle in handles:
                handle.wait()
                assert handle.is_done()
        return then

    with team(2, core) as on_all:
        assert on_all(work)[1].tolist() == list(range(count))


@pytest.mark.parametrize("core", CORES)
def test_a_rank_that_gives_up_waits_no_more(core):
    def work(rank, carrier):
        if rank == 1:
            return None
        threading.Timer(0.2, carrier.abort).start()
        with pytest.raises(RuntimeError) as raised:
            receive(carrier, torch.empty(1), 1)
        return str(raised.value)

    with team(2, core) as on_all:
        text = "hp_onesided: the connections of rank 0 were broken, so the recv over ranks [0, 1] can't be done"
        assert on_all(work)[0] == text


def test_what_both_send_and_nobody_reads_holds_up_no_end(caplog):
    begun = time.monotonic()
    with team(2, "python", limit=60.0) as on_all:
        on_all(lambda rank, carrier: send(carrier, torch.ones(1), 1 - rank))
    assert time.monotonic() - begun < 60.0 and not caplog.records


def test_a_message_that_ended_with_its_sender_is_told(monkeypatch, caplog):
    ended = threading.Event()

    def work(rank, carrier):
        if rank == 0:
            send(carrier, torch.ones(1), 1)
            carrier.close()
            ended.set()
            return None
        ended.wait(20.0)
        with pytest.raises(RuntimeError) as raised:
            receive(carrier, torch.empty(1), 0)
        return str(raised.value)

    monkeypatch.setattr(carrier_module, "release", lambda pids: None)  # it is closed twice
    with team(2, "python", limit=0.1) as on_all:
        text = "hp_onesided: rank 0 has closed its connection to the group, so the recv over ranks [0, 1] can't be done"
        assert on_all(work)[1] == text
    assert [each.getMessage() for each in caplog.records] == [
        "hp_onesided: rank 0 has left with 1 messages that rank 1 had not read within 0.1 s: they are lost"
    ]


def test_a_sender_without_memory_says_so(monkeypatch):
    def allocate(nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(messages, "allocate", allocate)

    def work(rank, carrier):
        with pytest.raises(RuntimeError) as raised:
            (send if rank == 0 else receive)(carrier, torch.ones(1), 1 - rank)
        return str(raised.value)

    with team(2, "python") as on_all:
        own, other = on_all(work)
    assert own == "hp_onesided: rank 0 can't get memory for its send: [Errno 28] No space left on device"
    assert other.startswith("hp_onesided: rank 0 has closed its connection to the group, so the recv")


@on_ranks(2, 4)
def test_messages_of_ranks_leave_the_backend_alone(ranks):
    groups, collectives = get_platform().groups, get_platform().collectives
    group, rank = groups.default_group(), groups.rank()
    carrier = carrier_of(group)
    assert isinstance(carrier, SharedMemory)
    before, sequence = carrier.issued, group._get_sequence_number_for_group()
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64):
        told, heard = torch.tensor([rank, 1]).to(dtype), torch.empty(2, dtype=dtype)
        handle = collectives.recv(heard, previous, group=group, async_op=True)
        collectives.send(told, following, group=group)
        handle.wait()
        assert torch.equal(heard, torch.tensor([previous, 1]).to(dtype))
    assert carrier.issued - before == 10 and group._get_sequence_number_for_group() == sequence


@on_ranks(2)
def test_tensors_with_a_class_of_their_own_are_refused():
    class Own(torch.Tensor):
        pass

    group, collectives = get_platform().groups.default_group(), get_platform().collectives
    with pytest.raises(TypeError, match="send: takes a plain tensor, got Own"):
        collectives.send(torch.ones(2).as_subclass(Own), 1 - get_platform().groups.rank(), group=group)


def test_a_rank_that_is_killed_is_named(tmp_path):
    preload = ["hp_testing.torch.ranks", "hp_onesided.opening", "failing_ranks"]
    arguments = str(tmp_path / "store"), "messages", 600.0
    with rank_processes(failing_ranks.main, 3, *arguments, preload=preload) as (_, connections):
        pids = [connection.recv() for connection in connections]
        os.kill(pids[1], signal.SIGKILL)
        for rank in (0, 2):
            assert connections[rank].poll(240.0)
            kind, lost, text, _ = connections[rank].recv()
            assert (kind, lost) == ("LostRankError", (1,)), text
            assert text.startswith("rank 1 was lost: its process has ended")


def test_a_rank_that_ends_well_is_missed_by_nobody_else(tmp_path):
    """Rank 1 waits for a message, and has one that is not read yet, while rank 0 leaves and ends."""
    preload = ["hp_testing.torch.ranks", "hp_onesided.opening", "failing_ranks"]
    arguments = str(tmp_path / "store"), 600.0
    with rank_processes(failing_ranks.leave, 3, *arguments, preload=preload) as (processes, connections):
        assert all(connection.recv() == "there" for connection in connections)
        connections[0].send("end")
        processes[0].join()
        assert processes[0].exitcode == 0
        connections[1].send("wait")
        time.sleep(0.3)  # it waits, in which it looks at the others
        connections[2].send("send")
        assert connections[1].recv() == "came"
        time.sleep(0.3)  # it ends, in which it waits for its message to be read
        connections[2].send("receive")
        assert connections[2].recv() == [7.0] * 50_000
