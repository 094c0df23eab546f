"""What PyTorch's collectives offer beyond those of every platform."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.uint16])
def test_dtypes_that_only_move(dtype):
    collectives, group = get_platform().collectives, dist.group.WORLD
    tensor = (torch.tensor([0.0, 1.0], device=device_type()) * dist.get_rank()).to(dtype)
    output = torch.empty(4, dtype=dtype, device=device_type())
    collectives.all_gather(output, tensor, group=group)
    assert output.float().tolist() == [0, 0, 0, 1]
    collectives.broadcast(tensor, 1, group=group)
    assert tensor.float().tolist() == [0, 1]
    received = torch.empty_like(tensor)
    collectives.all_to_all(received, tensor, group=group)
    assert received.float().tolist() == [dist.get_rank()] * 2
    if dist.get_rank() == 0:
        collectives.send(received + received if dtype == torch.bool else received, 1, group=group)
    else:
        collectives.recv(received, 0, group=group)
        assert received.float().tolist() == [0, 0]


@on_ranks(2)
def test_a_parameter_is_communicated_without_its_graph():
    parameter = torch.nn.Parameter(torch.ones(2, device=device_type()))
    with torch.no_grad():
        get_platform().collectives.all_reduce(parameter, "avg", group=dist.group.WORLD)
    assert parameter.is_leaf
    assert parameter.tolist() == [1.0, 1.0]


@on_ranks(3)
def test_messages_larger_than_a_backends_buffers():
    collectives, group, rank = get_platform().collectives, dist.group.WORLD, dist.get_rank()
    numbers = torch.arange(3 << 18, device=device_type())  # 6 MiB
    mine = numbers * (rank + 1)
    total = mine.clone()
    collectives.all_reduce(total, group=group)
    assert torch.equal(total, numbers * 6)
    piece = torch.empty(1 << 18, dtype=torch.int64, device=device_type())
    collectives.reduce_scatter(piece, mine, group=group)
    assert torch.equal(piece, numbers.chunk(3)[rank] * 6)
    whole = torch.empty_like(mine)
    collectives.all_gather(whole, mine[: 1 << 18].contiguous(), group=group)
    assert torch.equal(whole, torch.cat([numbers[: 1 << 18] * scale for scale in (1, 2, 3)]))
    collectives.all_to_all(whole, mine, group=group)
    assert torch.equal(whole, torch.cat([numbers.chunk(3)[rank] * scale for scale in (1, 2, 3)]))
    collectives.broadcast(mine, 2, group=group)
    assert torch.equal(mine, numbers * 3)
    if rank == 0:
        collectives.send(total, 1, group=group)
    elif rank == 1:
        collectives.recv(mine, 0, group=group)
        assert torch.equal(mine, total)
