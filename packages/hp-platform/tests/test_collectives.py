"""Each collective against numpy."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hp_platform import count_collectives, get_platform
from hp_platform.testing import device_type, on_ranks

REDUCE = {
    "sum": np.add.reduce,
    "avg": functools.partial(np.mean, axis=0),
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "product": np.multiply.reduce,
}
every_size = on_ranks(1, 2, 3, 4)
both_ways = pytest.mark.parametrize("async_op", [False, True])


def data(shape, ranks):
    """What each rank holds; the same on all."""
    return np.random.default_rng(1).normal(size=(ranks, *shape))


def mine(array):
    return torch.tensor(array[dist.get_rank()], device=device_type())


def finish(handle, async_op):
    if async_op:
        handle.wait()
    else:
        assert handle is None


def check(tensor, expected):
    np.testing.assert_allclose(tensor.cpu().numpy(), expected, rtol=1e-12)


@every_size
@both_ways
@pytest.mark.parametrize("op", REDUCE)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])
def test_all_reduce(op, shape, async_op, ranks):
    array = data(shape, ranks)
    tensor = mine(array)
    finish(get_platform().collectives.all_reduce(tensor, op, group=dist.group.WORLD, async_op=async_op), async_op)
    check(tensor, REDUCE[op](array))


@on_ranks(2)
def test_an_average_is_divided_once():
    tensor = torch.full((2,), 4.0, device=device_type())
    handle = get_platform().collectives.all_reduce(tensor, "avg", group=dist.group.WORLD, async_op=True)
    handle.wait()
    handle.wait()
    assert tensor.tolist() == [4.0, 4.0]


@every_size
@both_ways
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])
def test_all_gather(shape, async_op, ranks):
    array = data(shape, ranks)
    output = torch.empty((ranks * (shape or (1,))[0], *shape[1:]), dtype=torch.float64, device=device_type())
    finish(
        get_platform().collectives.all_gather(output, mine(array), group=dist.group.WORLD, async_op=async_op), async_op
    )
    check(output, array.reshape(output.shape))


@every_size
@both_ways
@pytest.mark.parametrize("op", REDUCE)
def test_reduce_scatter(op, async_op, ranks):
    array = data((2 * ranks, 3), ranks)
    tensor = mine(array)
    output = torch.empty(2, 3, dtype=torch.float64, device=device_type())
    collectives = get_platform().collectives
    finish(collectives.reduce_scatter(output, tensor, op, group=dist.group.WORLD, async_op=async_op), async_op)
    check(output, REDUCE[op](array)[2 * dist.get_rank() :][:2])
    check(tensor, array[dist.get_rank()])


@every_size
@both_ways
def test_all_to_all_in_equal_pieces(async_op, ranks):
    array = data((ranks * 2, 3), ranks)
    output = torch.empty(ranks * 2, 3, dtype=torch.float64, device=device_type())
    collectives = get_platform().collectives
    finish(collectives.all_to_all(output, mine(array), group=dist.group.WORLD, async_op=async_op), async_op)
    check(output, array.reshape(ranks, ranks, 2, 3)[:, dist.get_rank()].reshape(-1, 3))


@every_size
@both_ways
def test_all_to_all_in_uneven_pieces(async_op, ranks):
    rank = dist.get_rank()
    sizes = (np.arange(ranks)[:, None] + 2 * np.arange(ranks)) % 4  # from, to; some are zero
    blocks = [[np.full((size, 2), 10.0 * i + j) for j, size in enumerate(row)] for i, row in enumerate(sizes)]
    tensor = torch.tensor(np.concatenate(blocks[rank]), device=device_type())
    output = torch.empty(int(sizes[:, rank].sum()), 2, dtype=torch.float64, device=device_type())
    handle = get_platform().collectives.all_to_all(
        output, tensor, sizes[:, rank].tolist(), sizes[rank].tolist(), group=dist.group.WORLD, async_op=async_op
    )
    finish(handle, async_op)
    check(output, np.concatenate([row[rank] for row in blocks]))


@every_size
@both_ways
def test_broadcast(async_op, ranks):
    array = data((2, 3), ranks)
    for source in range(ranks):
        tensor = mine(array)
        handle = get_platform().collectives.broadcast(tensor, source, group=dist.group.WORLD, async_op=async_op)
        finish(handle, async_op)
        check(tensor, array[source])


@on_ranks(3)
def test_ranks_of_broadcast_send_and_recv_are_the_groups():
    platform = get_platform()
    rank = dist.get_rank()
    if rank == 0:
        return
    group = platform.groups.new_group([1, 2])
    tensor = torch.full((3,), float(rank), device=device_type())
    platform.collectives.broadcast(tensor, 0, group=group)
    assert tensor.tolist() == [1.0] * 3
    if rank == 1:
        platform.collectives.send(tensor * 5, 1, group=group)
    else:
        platform.collectives.recv(tensor, 0, group=group)
        assert tensor.tolist() == [5.0] * 3


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.int32])
def test_real_dtypes(dtype):
    collectives, group = get_platform().collectives, dist.group.WORLD
    tensor = torch.tensor([1, 2], device=device_type()).to(dtype) * (dist.get_rank() + 1)
    output = torch.empty(4, dtype=dtype, device=device_type())
    collectives.all_gather(output, tensor, group=group)
    assert output.tolist() == [1, 2, 2, 4]
    collectives.reduce_scatter(tensor, output, group=group)
    assert tensor.tolist() == ([2, 4] if dist.get_rank() == 0 else [4, 8])
    collectives.all_reduce(tensor, "max", group=group)
    assert tensor.tolist() == [4, 8]
    collectives.all_to_all(tensor, tensor.clone(), group=group)
    collectives.broadcast(tensor, 0, group=group)
    assert tensor.tolist() == [4, 4]


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
def test_complex_numbers():
    collectives, group = get_platform().collectives, dist.group.WORLD
    tensor = torch.tensor([1 + 2j, 3j], device=device_type()) * (dist.get_rank() + 1)
    output = torch.empty(4, dtype=tensor.dtype, device=device_type())
    collectives.all_gather(output, tensor, group=group)
    assert output.tolist() == [1 + 2j, 3j, 2 + 4j, 6j]
    collectives.reduce_scatter(tensor, output, "avg", group=group)
    assert tensor.tolist() == ([1 + 2j, 3j] if dist.get_rank() == 0 else [2 + 4j, 6j])
    collectives.all_reduce(tensor, group=group)
    assert tensor.tolist() == [3 + 6j, 9j]
    for call in (collectives.all_reduce, functools.partial(collectives.reduce_scatter, output[:2])):
        with pytest.raises(TypeError, match="op='max' is not defined on complex numbers: use sum or avg"):
            call(tensor if call is collectives.all_reduce else output, "max", group=group)


@on_ranks(2)
def test_a_parameter_is_communicated_without_its_graph():
    parameter = torch.nn.Parameter(torch.ones(2, device=device_type()))
    with torch.no_grad():
        get_platform().collectives.all_reduce(parameter, "avg", group=dist.group.WORLD)
    assert parameter.is_leaf
    assert parameter.tolist() == [1.0, 1.0]


@on_ranks(2)
def test_what_does_not_fit_is_refused_before_anything_is_sent():
    collectives, group = get_platform().collectives, dist.group.WORLD
    four, two = torch.ones(4, device=device_type()), torch.ones(2, device=device_type())
    strided = torch.ones(4, 2, device=device_type()).t()
    refused = [
        (ValueError, r"2 ranks with a piece of shape \(4,\) make 8 elements, output has 4 \(shape \(4,\)\)",
         lambda: collectives.all_gather(four, four, group=group)),
        (TypeError, "all_gather: output is torch.float32 and tensor torch.float64, they must be the same",
         lambda: collectives.all_gather(four, two.double(), group=group)),
        (ValueError, r"output must be contiguous, got shape \(2, 4\) with strides \(1, 2\)",
         lambda: collectives.all_gather(strided, four, group=group)),
        (ValueError, r"2 ranks with a piece of shape \(4,\) take 8 elements, tensor has 4",
         lambda: collectives.reduce_scatter(four, four, group=group)),
        (ValueError, r"tensor must be contiguous, got shape \(2, 4\) with strides \(1, 2\): pass tensor.contiguous",
         lambda: collectives.all_reduce(strided, group=group)),
        (ValueError, "tensor must be contiguous", lambda: collectives.broadcast(strided, 0, group=group)),
        (ValueError, "tensor must be contiguous", lambda: collectives.send(strided, 0, group=group)),
        (ValueError, "op='mean' is no reduction. Choose one of: sum, avg, min, max, product",
         lambda: collectives.all_reduce(two, "mean", group=group)),
        (ValueError, "op='mean' is no reduction", lambda: collectives.reduce_scatter(two, four, "mean", group=group)),
        (TypeError, "avg needs floating point, got torch.int64",
         lambda: collectives.all_reduce(four.long(), "avg", group=group)),
        (ValueError, r"dim 0 of the input of shape \(3,\) does not divide over 2 ranks: pass input_splits",
         lambda: collectives.all_to_all(four, torch.ones(3, device=device_type()), group=group)),
        (ValueError, r"output_splits must be 2 numbers \(one a rank\) whose sum is 4 .*, got \[1, 2\]",
         lambda: collectives.all_to_all(four, four, [1, 2], [2, 2], group=group)),
        (ValueError, "group_src is a rank inside the group, from 0 to 1, got 2",
         lambda: collectives.broadcast(two, 2, group=group)),
        (ValueError, "dst is a rank inside the group, from 0 to 1, got -1",
         lambda: collectives.send(two, -1, group=group)),
    ]  # fmt: skip
    for error, text, call in refused:
        with pytest.raises(error, match=text):
            call()
    collectives.all_reduce(two, group=group)  # the ranks are still in step
    assert two.tolist() == [2.0, 2.0]


@on_ranks(2)
def test_observers_see_each_collective_with_its_size():
    collectives, group = get_platform().collectives, dist.group.WORLD
    seen = []
    observer = lambda *call: seen.append(call)  # noqa: E731
    collectives.observers.append(observer)
    try:
        four, two = torch.ones(4, device=device_type()), torch.ones(2, device=device_type())
        collectives.all_gather(four, two, group=group)
        collectives.reduce_scatter(two, four, group=group)
        collectives.all_reduce(two, group=group)
        collectives.all_to_all(four, four.clone(), group=group)
        collectives.broadcast(two, 0, group=group)
        collectives.barrier(group)
    finally:
        collectives.observers.remove(observer)
    collectives.all_reduce(two, group=group)
    kinds = [("all_gather", 16), ("reduce_scatter", 16), ("all_reduce", 8), ("all_to_all", 16), ("broadcast", 8)]
    assert seen == [(*kind, group) for kind in [*kinds, ("barrier", 0)]]


@on_ranks(2)
def test_collectives_are_counted():
    collectives, group = get_platform().collectives, dist.group.WORLD
    tensor = torch.ones(8, device=device_type())
    with count_collectives() as outer:
        collectives.all_reduce(tensor, group=group)
        with count_collectives() as inner:
            collectives.all_reduce(tensor, group=group)
            collectives.broadcast(tensor, 0, group=group)
    collectives.all_reduce(tensor, group=group)
    assert outer == Counter(all_reduce=2, broadcast=1) and outer.bytes == 96
    assert inner == Counter(all_reduce=1, broadcast=1) and inner.bytes == 64
    assert collectives.observers == []
