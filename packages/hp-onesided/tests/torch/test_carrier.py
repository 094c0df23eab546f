"""Collectives of hp-platform over shared memory, on ranks that are processes."""

from __future__ import annotations

import gc
import logging
import os
import resource
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from hp_onesided import core_name, opening
from hp_onesided.carriers.carrier import SharedMemory
from hp_onesided.cores.segment import Place
from hp_platform import count_collectives, get_platform
from hp_platform.communication.carriers import carrier_of
from hp_platform.extend import SettingError
from hp_testing import on_ranks

pytestmark = pytest.mark.not_on("torch-cuda", "torch-npu", "torch-npu-sim", reason="tensors are on the host here")


def by_backend(group) -> int:
    """Count the collectives that the group's backend has done."""
    return group._get_sequence_number_for_group()


@on_ranks(2, 4)
@pytest.mark.smoke
def test_collectives_leave_the_backend_alone(ranks):
    groups, collectives = get_platform().groups, get_platform().collectives
    group = groups.default_group()
    assert isinstance(carrier_of(group), SharedMemory)
    assert core_name() in ("native", "python")
    rank, before = groups.rank(), by_backend(group)
    with count_collectives() as counts:
        total = torch.full((7,), rank + 1.0)
        collectives.all_reduce(total, group=group)
        mean = torch.full((7,), rank + 1.0)
        handle = collectives.all_reduce(mean, "avg", group=group, async_op=True)
        whole = torch.empty(ranks, 2, 3)
        collectives.all_gather(whole, torch.full((2, 3), float(rank)), group=group)
        piece = torch.empty(2, dtype=torch.int32)
        collectives.reduce_scatter(piece, torch.arange(2 * ranks, dtype=torch.int32), "max", group=group)
        swapped = torch.empty(ranks, dtype=torch.bool)
        collectives.all_to_all(swapped, torch.arange(ranks) == rank, group=group)
        told = torch.tensor(rank)
        collectives.broadcast(told, ranks - 1, group=group)
        collectives.barrier(group)
        assert handle is not None
        handle.wait()
    assert total.tolist() == [ranks * (ranks + 1) / 2] * 7
    assert mean.tolist() == [(ranks + 1) / 2] * 7
    assert whole[:, 1, 2].tolist() == list(range(ranks))
    assert piece.tolist() == [2 * rank, 2 * rank + 1]
    assert swapped.tolist() == [other == rank for other in range(ranks)]
    assert told.item() == ranks - 1
    assert counts == {"all_reduce": 2} | dict.fromkeys(
        ["all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"], 1
    )
    assert counts.bytes == 28 + 28 + 24 * ranks + 8 * ranks + ranks + 8
    assert by_backend(group) == before


@on_ranks(2)
def test_what_is_not_taken_goes_to_the_backend():
    group, collectives = get_platform().groups.default_group(), get_platform().collectives
    carrier = carrier_of(group)
    assert carrier is not None

    class Own(torch.Tensor):
        pass

    tensor = torch.ones(3).as_subclass(Own)
    assert not carrier.takes("all_reduce", tensor, "sum")
    assert not carrier.takes("all_reduce", torch.ones(3, dtype=torch.uint16), "sum")
    assert carrier.takes("all_gather", torch.ones(3, dtype=torch.uint16), "sum")
    assert not carrier.takes("all_gather", torch.ones(3, dtype=torch.complex64).conj(), "sum")
    assert not carrier.takes("all_gather", torch.ones(3, device="meta"), "sum")
    with FakeTensorMode():
        assert not carrier.takes("all_reduce", torch.ones(3), "sum")
    before = by_backend(group)
    collectives.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3 and by_backend(group) == before + 1


@on_ranks(2)
def test_messages_and_collectives_of_several_groups():
    groups, collectives = get_platform().groups, get_platform().collectives
    rank = groups.rank()
    world, other = groups.default_group(), groups.second_group(range(2))
    tensors = [torch.full((100_000,), float(rank)) for _ in range(8)]
    order = range(8) if rank == 0 else [1, 0, 3, 2, 5, 4, 7, 6]
    handles = {}
    for index in order:  # two groups, each in its own order on both ranks
        group = world if index % 2 else other
        handles[index] = collectives.all_reduce(tensors[index], group=group, async_op=True)
    message = torch.full((4,), float(rank))
    if rank == 0:
        collectives.send(message, 1, group=world)
    else:
        collectives.recv(message, 0, group=world)
    for index in reversed(order):
        handles[index].wait()
    assert [tensor.unique().tolist() for tensor in tensors] == [[1.0]] * 8
    assert message.tolist() == [0.0] * 4
    groups.destroy(other)
    assert carrier_of(other) is None


@on_ranks(2)
def test_groups_leave_nothing():
    groups, collectives = get_platform().groups, get_platform().collectives

    def use() -> tuple[int, int, int]:
        group = groups.second_group(range(2))
        tensor = torch.ones(10)
        handles = [collectives.all_reduce(tensor, group=group, async_op=True) for _ in range(3)]
        collectives.barrier(group)
        groups.destroy(group)
        del group, handles
        gc.collect()
        mapped = Path("/proc/self/maps").read_text().count("memfd:hp_onesided")
        return len(os.listdir("/proc/self/fd")), threading.active_count(), mapped

    first = use()
    assert [use() for _ in range(4)] == [first] * 4


class Reason(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def made_with(change) -> tuple[bool, list[str]]:
    """Make groups after a change on this rank; whether they have carriers, and what was logged."""
    groups, collectives = get_platform().groups, get_platform().collectives
    handler = Reason()
    logging.getLogger("hp_onesided").addHandler(handler)
    opening._said.clear()
    found = set()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    change()
    try:
        for _ in range(2):
            group = groups.second_group(range(2))
            found.add(carrier_of(group) is not None)
            tensor = torch.ones(3)
            collectives.all_reduce(tensor, group=group)
            assert tensor.tolist() == [2.0] * 3
            groups.destroy(group)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        logging.getLogger("hp_onesided").removeHandler(handler)
    (carried,) = found
    return carried, handler.texts


def refuse(*_args):
    raise PermissionError(1, "Operation not permitted")


BYTES = "1052672 bytes of shared memory"
CHANGES = {
    "nothing": (lambda patch: None, None),
    "denied": (lambda patch: patch(os, "memfd_create", refuse), f"rank 1: {BYTES}: [Errno 1] Operation not permitted"),
    "full": (
        lambda patch: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY)),
        f"rank 1: {BYTES}: [Errno 27] File too large",
    ),
    "another namespace": (
        lambda patch: patch(opening, "place_of", lambda _: Place(os.getppid(), 0, 0, 0)),
        "rank 0: memory of rank 1 of the group: ",
    ),
    "no look": (
        lambda patch: patch(Place, "map", refuse),
        "rank 1: memory of rank 0 of the group: [Errno 1] Operation not permitted",
    ),
    "another host": (lambda patch: patch(opening, "own_network", lambda: "elsewhere"), None),
}


@on_ranks(2)
@pytest.mark.parametrize("case", CHANGES)
def test_what_can_not_be_shared_goes_through_the_backend(case, monkeypatch):
    """Where one of the ranks lacks something, none has a carrier, and the first one says once why."""
    change, expected = CHANGES[case]
    first = get_platform().groups.rank() == 0
    carried, texts = made_with(lambda: None if first else change(monkeypatch.setattr))
    assert carried == (case == "nothing")
    if expected is None or not first:
        assert texts == []
    else:
        (text,) = texts
        assert text.startswith("collectives of ranks on one host go through gloo, not through shared memory: ")
        assert expected in text


@on_ranks(2)
def test_the_setting_turns_it_off(monkeypatch):
    assert made_with(lambda: monkeypatch.setenv("HYPER_PARALLEL_TRANSPORT", "backend")) == (False, [])
    assert made_with(lambda: monkeypatch.setenv("HYPER_PARALLEL_TRANSPORT", "auto")) == (True, [])


@on_ranks(2)
def test_an_unknown_setting_is_refused(monkeypatch):
    monkeypatch.setenv("HYPER_PARALLEL_TRANSPORT", "shm")
    with pytest.raises(SettingError, match="TRANSPORT='shm' is unknown. Choose one of: auto, backend"):
        get_platform().groups.second_group(range(2))


def other_kind(collectives, group, rank):
    tensor = torch.ones(4)
    collectives.barrier(group) if rank == 1 else collectives.all_reduce(tensor, group=group)


def other_size(collectives, group, rank):
    collectives.all_reduce(torch.ones(5 if rank == 1 else 4), group=group)


def other_dtype(collectives, group, rank):
    collectives.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32), group=group)


def other_op(collectives, group, rank):
    handle = collectives.all_reduce(torch.ones(4), "max" if rank == 1 else "sum", group=group, async_op=True)
    handle.wait()


def other_root(collectives, group, rank):
    collectives.broadcast(torch.ones(4), 1 if rank == 1 else 0, group=group)


def other_counts(collectives, group, rank):
    sent = [1, 1, 2] if rank == 1 else [1, 1, 1]
    collectives.all_to_all(torch.ones(3), torch.ones(sum(sent)), [1, 1, 1], sent, group=group)


DIFFERENCES = [
    (other_kind, "rank 0 of the group calls all_reduce(16 bytes of float32, sum), rank 1 barrier()"),
    (other_size, "all_reduce(16 bytes of float32, sum), rank 1 all_reduce(20 bytes of float32, sum)"),
    (other_dtype, "all_reduce(16 bytes of float32, sum), rank 1 all_reduce(16 bytes of int32, sum)"),
    (other_op, "all_reduce(16 bytes of float32, sum), rank 1 all_reduce(16 bytes of float32, max)"),
    (other_root, "broadcast(16 bytes of float32, from rank 0 of the group), rank 1 broadcast(16 bytes"),
    (other_counts, "in an all_to_all rank 1 of the group sends 8 bytes to rank 2, which expects 4"),
]


@on_ranks(3)
@pytest.mark.parametrize(("call", "told"), DIFFERENCES, ids=[call.__name__ for call, _ in DIFFERENCES])
def test_what_ranks_call_differently_is_refused_on_all(call, told):
    groups, collectives = get_platform().groups, get_platform().collectives
    group = groups.second_group(range(3))
    texts = []
    for _ in range(2):  # the group is of no use any more, and says so again
        with pytest.raises(RuntimeError) as caught:
            call(collectives, group, groups.rank())
        texts.append(str(caught.value))
    assert told in texts[0] and texts[0] == texts[1]
    groups.destroy(group)


@on_ranks(2)
def test_a_forked_child_has_no_part_in_the_group():
    group = get_platform().groups.default_group()
    pid = os.fork()
    if not pid:
        os._exit(0 if carrier_of(group) is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    tensor = torch.ones(3)
    get_platform().collectives.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3


@on_ranks(2)
def test_gradients_do_not_see_a_collective():
    parameter = torch.nn.Parameter(torch.ones(3))
    product = (parameter * parameter).sum()
    get_platform().collectives.broadcast(parameter, 0, group=dist.group.WORLD)
    product.backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [2.0] * 3


@on_ranks(2)
def test_a_profiler_sees_a_collective():
    tensor = torch.ones(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        get_platform().collectives.all_reduce(tensor, group=get_platform().groups.default_group())
    assert [each.name for each in profile.events() if each.name.startswith("hp_onesided")] == ["hp_onesided:all_reduce"]
