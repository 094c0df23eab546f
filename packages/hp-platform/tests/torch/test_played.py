"""Collectives of a played world leave finite values of the right size, and peers say host numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_platform import get_platform
from hp_platform.extend import bytes_to_tensor, observers, reduce_numbers, share_numbers, tensor_to_bytes
from hp_platform.torch.dry import played_world
from hp_testing import device_type

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.skipif(device_type() != "cpu", reason="copies are made on this process's device"),
]


def test_others_hold_what_this_rank_holds() -> None:
    with played_world(4, 2):
        platform = get_platform()
        collectives, group = platform.collectives, platform.groups.default_group()
        whole, piece = torch.full((8,), torch.nan), torch.tensor([1.0, 2.0])
        collectives.all_gather(whole, piece, group=group)
        assert whole.tolist() == [1, 2] * 4
        collectives.all_reduce(whole, group=group)
        assert whole.tolist() == [4, 8] * 4
        collectives.all_reduce(whole, "avg", group=group)
        assert whole.tolist() == [4, 8] * 4, "gloo's average is a sum that is divided"
        collectives.all_reduce(whole, "max", group=group)
        assert whole.tolist() == [4, 8] * 4
        own, parts = torch.full((2,), torch.nan), torch.arange(8.0)
        collectives.reduce_scatter(own, parts, group=group)
        assert own.tolist() == [16, 20] and parts.tolist() == list(range(8))
        collectives.reduce_scatter(own, parts, "avg", group=group)
        assert own.tolist() == [4, 5]
        collectives.all_gather(parts, parts[4:6], group=group)
        assert parts.tolist() == [4, 5] * 4, "the piece may lie in the output"


def test_an_exchange_repeats_what_this_rank_keeps() -> None:
    with played_world(3, 1):
        platform = get_platform()
        group = platform.groups.default_group()
        sent = torch.arange(6.0).view(6, 1)
        got = torch.full((6, 1), torch.nan)
        platform.collectives.all_to_all(got, sent, group=group)
        assert got.flatten().tolist() == [2, 3] * 3
        got = torch.full((7, 1), torch.nan)
        platform.collectives.all_to_all(got, sent, [1, 2, 4], [1, 3, 2], group=group)
        assert got.flatten().tolist() == [1, 1, 2, 1, 2, 3, 1]
        platform.collectives.all_to_all(got, sent, [1, 2, 4], [2, 0, 4], group=group)
        assert got.flatten().tolist() == [0, 0, 0, 2, 3, 4, 5], "it keeps nothing, and sends the first two rows there"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_another_rank_alone_has_is_small(dtype: torch.dtype) -> None:
    with played_world(2, 1):
        platform = get_platform()
        group = platform.groups.default_group()
        for size in (0, 1, 4096, 10_000):
            first, second = (torch.full((size,), 77, dtype=dtype) for _ in range(2))
            handle = platform.collectives.recv(first, 0, group=group, async_op=True)
            assert handle is not None
            handle.wait()
            platform.collectives.broadcast(second, 0, group=group)
            assert first.equal(second) and (first.abs() if dtype is not torch.bool else first).double().lt(1).all()
            platform.collectives.broadcast(first, 1, group=group)
            assert first.equal(second), "this rank's own"


class Others:
    """The other rank is ten times this one, and sends what it is asked for."""

    def gather(self, payload: bytes, ranks: Sequence[int]) -> list[bytes]:
        (number,) = memoryview(payload).cast("q")
        return [payload, (10 * number).to_bytes(8, "little")]

    def send(self, payload: bytes, rank: int, tag: int) -> None:
        assert (payload, rank, tag) == (b"here", 1, 5)

    def receive(self, rank: int, tag: int) -> bytes:
        return b"there"


def test_peers_say_host_numbers() -> None:
    with played_world(2, 0, peers=Others()):
        platform = get_platform()
        group = platform.groups.default_group()
        assert share_numbers([7], group) == [[7], [70]]
        assert reduce_numbers([7], "sum", group) == [77]
        platform.collectives.send(bytes_to_tensor(b"here", group), 1, group=group, tag=5)
        message = bytes_to_tensor(bytes(5), group)
        platform.collectives.recv(message, 1, group=group, tag=5)
        assert tensor_to_bytes(message) == b"there"
        data = torch.tensor([7])
        platform.collectives.all_reduce(data, group=group)
        assert data.item() == 14, "a tensor of a program is no host number"


class Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Count one."""
        Operators.count += 1
        return func(*args, **(kwargs or {}))


def test_observers_see_messages_and_neither_modes_nor_autograd_see_copies() -> None:
    told: list[tuple[str, int]] = []

    def observe(kind: str, size: int, group: object) -> None:
        told.append((kind, size))

    with played_world(2, 0) as copies:
        group = get_platform().groups.default_group()
        weight = torch.ones(4, requires_grad=True)
        saved = weight * 2
        result = saved * saved
        observers.append(observe)
        try:
            with Operators():
                get_platform().collectives.all_reduce(saved.detach(), group=group)
        finally:
            observers.remove(observe)
        result.sum().backward()
        assert told == [("all_reduce", 16)] and Operators.count == 1, "the detach"
        seconds, cpu = copies.take()
        assert seconds > 0 and cpu >= 0 and copies.take() == (0, 0)
