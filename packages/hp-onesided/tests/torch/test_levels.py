"""Collectives of ranks that name two hosts: memory on each of them, gloo between."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from faked_hosts import fake_hosts, group_of

from hp_onesided import opening
from hp_onesided.carriers.levels import TwoLevels
from hp_platform import count_collectives, get_platform
from hp_platform.communication.carriers import carrier_of
from hp_testing import on_ranks

pytestmark = pytest.mark.not_on("torch-cuda", "torch-npu", "torch-npu-sim", reason="tensors are on the host here")

HOSTS = {"one after the other": [0, 0, 1, 1], "in turns": [0, 1, 0, 1], "inside out": [0, 1, 1, 0]}
each_hosts = pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)


@contextlib.contextmanager
def two_hosts(monkeypatch, hosts, ranks=range(4)):
    """Make the group of some ranks, which name these hosts."""
    fake_hosts(monkeypatch, hosts)
    group = group_of(list(ranks))
    yield group
    if group is not None:
        get_platform().groups.destroy(group)


def draw(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 8
    return values.to(dtype)


@on_ranks(4)
@each_hosts
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.smoke
def test_results_are_those_of_one_level(hosts, async_op, monkeypatch):
    collectives, rank = get_platform().collectives, get_platform().groups.rank()
    with two_hosts(monkeypatch, hosts) as group:
        assert isinstance(carrier_of(group), TwoLevels)
        for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.5), (torch.int64, 0)):
            for count in (1, 7, 24, 1000):
                for op in ("sum", "max") if dtype is torch.int64 else ("sum", "avg", "min", "product"):
                    parts = torch.stack([draw(each, 4 * count, dtype).double() for each in range(4)])
                    exact = {"sum": parts.sum(0), "avg": parts.mean(0), "min": parts.amin(0), "max": parts.amax(0)}
                    exact["product"] = parts.prod(0)
                    own = draw(rank, 4 * count, dtype)
                    whole, piece = own[:count].clone(), torch.empty(count, dtype=dtype)
                    handles = [
                        collectives.all_reduce(whole, op, group=group, async_op=async_op),
                        collectives.reduce_scatter(piece, own, op, group=group, async_op=async_op),
                    ]
                    for handle in reversed(handles):
                        assert (handle is not None) == async_op
                        if handle is not None:
                            handle.wait()
                    size = exact[op].abs().max().clamp(min=1)
                    apart = (whole - exact[op][:count]).abs().max(), (piece - exact[op].view(4, -1)[rank]).abs().max()
                    assert max(apart) <= limit * size
                    assert torch.equal(own, draw(rank, 4 * count, dtype))
                gathered = torch.empty(4, count, dtype=dtype)
                handle = collectives.all_gather(gathered, draw(rank, count, dtype), group=group, async_op=async_op)
                if handle is not None:
                    handle.wait()
                assert all(torch.equal(gathered[each], draw(each, count, dtype)) for each in range(4))


@on_ranks(4)
def test_all_ranks_have_the_same_bits(monkeypatch):
    with two_hosts(monkeypatch, [0, 0, 1, 1]) as group:
        values = draw(get_platform().groups.rank(), 1001, torch.float32)
        get_platform().collectives.all_reduce(values, "avg", group=group)
        gathered = torch.empty(4, 1001)
        get_platform().collectives.all_gather(gathered, values, group=group)
        assert all(torch.equal(gathered[0], each) for each in gathered)


def received() -> dict[str, int]:
    """Count the bytes that have come to this process by TCP, for each connection."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is gone
            link = os.readlink(f"/proc/self/fd/{name}")
            if not link.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6):
                    information = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    found[link] = struct.unpack_from("Q", information, 128)[0]  # tcpi_bytes_received
    return found


@on_ranks(4)
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_bytes_between_hosts_are_as_the_formula_says(kind, monkeypatch):
    """Of B bytes each rank gets 2 B (H - 1) / (H L) of an all-reduce, half of that of the others, and no more."""
    collectives, count = get_platform().collectives, 2**18
    whole, piece = torch.ones(count), torch.ones(count // 4)
    calls = {
        "all_reduce": lambda group: collectives.all_reduce(whole, group=group),
        "reduce_scatter": lambda group: collectives.reduce_scatter(piece, whole, group=group),
        "all_gather": lambda group: collectives.all_gather(whole, piece, group=group),
    }
    with two_hosts(monkeypatch, [0, 0, 1, 1]) as group:
        calls[kind](group)  # connections are made
        collectives.barrier(group)
        before = received()
        for _ in range(3):
            calls[kind](group)
        came = sum(number - before.get(link, 0) for link, number in received().items()) / 3
        collectives.barrier()  # a peer that is done closes the connections that are counted
        expected = whole.nbytes * (2 if kind == "all_reduce" else 1) * (2 - 1) / (2 * 2)
        assert expected <= came <= 1.02 * expected + 4096


@on_ranks(4)
def test_a_program_sees_one_collective(monkeypatch):
    with two_hosts(monkeypatch, [0, 0, 1, 1]) as group, count_collectives() as counts:
        get_platform().collectives.all_reduce(torch.ones(8), group=group)
        assert counts == {"all_reduce": 1} and counts.bytes == 32


@on_ranks(4)
def test_calls_of_two_threads_run_one_after_the_other(monkeypatch):
    """The second thread calls while the first one's collective is under way."""
    collectives = get_platform().collectives
    with two_hosts(monkeypatch, [0, 0, 1, 1]) as group, ThreadPoolExecutor(1) as pool:
        carrier = carrier_of(group)
        assert isinstance(carrier, TwoLevels)
        for turn in range(30):
            before, many, few = carrier.issued, torch.ones(5000), torch.ones(3)
            first = pool.submit(collectives.all_reduce, many, group=group)
            while carrier.issued == before:
                time.sleep(0)
            handle = collectives.all_reduce(few, group=group, async_op=turn % 3 == 0)
            if handle is not None:
                handle.wait()
            first.result()
            assert many.unique().tolist() == few.unique().tolist() == [4.0]


@on_ranks(4)
def test_what_is_not_in_two_levels_goes_to_the_backend(monkeypatch):
    collectives, rank = get_platform().collectives, get_platform().groups.rank()
    with two_hosts(monkeypatch, [0, 0, 1, 1]) as group:
        swapped, told, flags = torch.empty(4), torch.tensor(float(rank)), torch.tensor([rank], dtype=torch.int32)
        collectives.all_to_all(swapped, torch.arange(4.0) * 10 + rank, group=group)
        collectives.broadcast(told, 2, group=group)
        collectives.all_reduce(flags, "max", group=group)
        empty = torch.empty(0)
        collectives.all_reduce(empty, group=group)
        collectives.barrier(group)
        assert swapped.tolist() == [10.0 * rank + each for each in range(4)]
        assert told.item() == 2.0 and flags.item() == 3


@on_ranks(4)
def test_gradients_do_not_see_a_collective(monkeypatch):
    with two_hosts(monkeypatch, [0, 0, 1, 1]) as group:
        parameter = torch.nn.Parameter(torch.ones(3))
        product = (parameter * parameter).sum()
        get_platform().collectives.all_reduce(parameter, "avg", group=group)
        product.backward()
        assert parameter.grad is not None and parameter.grad.tolist() == [2.0] * 3


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@on_ranks(3)
def test_hosts_of_different_numbers_of_ranks_use_the_backend(monkeypatch):
    opening._said.clear()
    said = Said()
    logging.getLogger("hp_onesided").addHandler(said)
    rank = get_platform().groups.rank()
    for _ in range(2):
        with two_hosts(monkeypatch, [0, 0, 1], range(3)) as group:
            assert carrier_of(group) is None
            tensor = torch.full((5,), rank + 1.0, dtype=torch.float64)
            get_platform().collectives.all_reduce(tensor, group=group)
            assert tensor.tolist() == [6.0] * 5
    logging.getLogger("hp_onesided").removeHandler(said)
    text = (
        "collectives of ranks on several hosts go through gloo, not through shared memory: ranks [0, 1, 2] are on hosts"
        " of [2, 1] ranks: two levels need ranks of equal place, so use as many of each host"
    )
    assert said.texts == ([text] if rank == 0 else [])


@on_ranks(4)
def test_groups_leave_nothing(monkeypatch):
    collectives = get_platform().collectives

    def use() -> tuple[int, int]:
        with two_hosts(monkeypatch, [0, 1, 0, 1]) as group:
            handles = [collectives.all_reduce(torch.ones(9), group=group, async_op=True) for _ in range(3)]
            collectives.barrier(group)
            del handles
        return threading.active_count(), Path("/proc/self/maps").read_text().count("memfd:hp_onesided")

    first = use()
    descriptors = len(os.listdir("/proc/self/fd"))
    assert [use() for _ in range(4)] == [first] * 4
    # gloo closes connections later; a group that stays has a dozen.
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 6
