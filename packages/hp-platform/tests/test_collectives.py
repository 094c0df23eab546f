"""Each collective against numpy."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest

import hp_platform
from hp_platform import count_collectives, get_platform
from hp_testing import as_array, as_tensor, on_ranks

pytestmark = pytest.mark.device

REDUCE = {
    "sum": np.add.reduce,
    "avg": functools.partial(np.mean, axis=0),
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "product": np.multiply.reduce,
}
FLOATS = ("float64", "float32", "float16", "bfloat16")
TAGS = ("gloo", "mccl")
INTEGERS = ("int8", "int32", "int64", "uint8")
every_size = on_ranks(1, 2, 3, 4)
both_ways = pytest.mark.parametrize("async_op", [False, True])
dtypes = pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
shapes = pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])


def world():
    groups = get_platform().groups
    return groups.new_group(range(groups.size()))


def rank():
    return get_platform().groups.rank()


def data(shape, ranks, dtype="float64"):
    """What each rank holds; the same on all. Sums and products of its numbers are exact in every dtype but float64."""
    generator = np.random.default_rng(1)
    if dtype == "float64":
        return generator.normal(size=(ranks, *shape))
    return generator.integers(0, 2 if dtype == "bool" else 3, size=(ranks, *shape)).astype(np.float64)


def finish(handle, async_op):
    if async_op:
        handle.wait()
    else:
        assert handle is None


def check(tensor, expected, dtype="float64"):
    rtol = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}.get(dtype, 1e-12)  # thirds are not exact in an average
    np.testing.assert_allclose(as_array(tensor).astype(np.float64), expected, rtol=rtol)


@pytest.mark.smoke
@every_size
@both_ways
@pytest.mark.parametrize("op", REDUCE)
@shapes
def test_all_reduce(op, shape, async_op, ranks):
    array = data(shape, ranks)
    tensor = as_tensor(array[rank()])
    finish(get_platform().collectives.all_reduce(tensor, op, group=world(), async_op=async_op), async_op)
    check(tensor, REDUCE[op](array))


@on_ranks(2, 4)
@pytest.mark.parametrize(("op", "dtype"), [(op, t) for op in REDUCE for t in (*FLOATS, *INTEGERS) if op != "avg"])
def test_reductions_of_every_dtype(op, dtype, ranks):
    collectives = get_platform().collectives
    array = data((ranks, 3), ranks, dtype)
    tensor = as_tensor(array[rank()], dtype)
    piece = as_tensor(np.zeros((1, 3)), dtype)
    collectives.reduce_scatter(piece, tensor, op, group=world())
    check(tensor, array[rank()], dtype)
    check(piece, REDUCE[op](array)[rank()][None], dtype)
    collectives.all_reduce(tensor, op, group=world())
    check(tensor, REDUCE[op](array), dtype)


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", FLOATS)
def test_averages_of_every_dtype(dtype, ranks):
    collectives = get_platform().collectives
    array = data((ranks, 3), ranks, dtype)
    tensor, piece = as_tensor(array[rank()], dtype), as_tensor(np.zeros((1, 3)), dtype)
    collectives.reduce_scatter(piece, tensor, "avg", group=world())
    check(piece, array.mean(0)[rank()][None], dtype)
    collectives.all_reduce(tensor, "avg", group=world())
    check(tensor, array.mean(0), dtype)


@on_ranks(2, 4)
@dtypes
def test_movements_of_every_dtype(dtype, ranks):
    collectives, group, mine = get_platform().collectives, world(), rank()
    array = data((2 * ranks, 3), ranks, dtype)
    tensor = as_tensor(array[mine], dtype)
    whole = as_tensor(np.zeros((2 * ranks * ranks, 3)), dtype)
    collectives.all_gather(whole, tensor, group=group)
    check(whole, array.reshape(whole.shape), dtype)
    exchanged = as_tensor(np.zeros((2 * ranks, 3)), dtype)
    collectives.all_to_all(exchanged, tensor, group=group)
    check(exchanged, array.reshape(ranks, ranks, 2, 3)[:, mine].reshape(-1, 3), dtype)
    collectives.broadcast(exchanged, ranks - 1, group=group)
    check(exchanged, array.reshape(ranks, ranks, 2, 3)[:, ranks - 1].reshape(-1, 3), dtype)
    if mine < 2:
        received = as_tensor(np.zeros((2 * ranks, 3)), dtype)
        steps = [lambda: collectives.send(tensor, 1 - mine, group=group)]
        steps.append(lambda: collectives.recv(received, 1 - mine, group=group))
        for step in steps if mine == 0 else reversed(steps):
            step()
        check(received, array[1 - mine], dtype)


@on_ranks(2)
def test_messages_in_both_directions_at_once():
    if hp_platform.get_backend() not in TAGS:
        pytest.skip("elsewhere all messages between two ranks of a group are in one order")
    collectives, group, mine = get_platform().collectives, world(), rank()
    received = [as_tensor(np.zeros(3)) for _ in range(2)]
    into = [collectives.recv(each, 1 - mine, group=group, tag=7, async_op=True) for each in received]
    values = [as_tensor(np.full(3, 10.0 * mine + number)) for number in range(2)]
    out = [collectives.send(each, 1 - mine, group=group, tag=7, async_op=True) for each in values]
    for handle in (*into, *out):
        handle.wait()
    assert [as_array(each).tolist() for each in received] == [[10.0 * (1 - mine) + number] * 3 for number in range(2)]


@on_ranks(2)
def test_what_messages_can_do_is_known():
    collectives, here = get_platform().collectives, get_platform().devices.current_device()
    backend = hp_platform.get_backend()
    assert collectives.has_tags(world(), here) == (backend in TAGS)
    assert collectives.receives_ahead(world(), here) == (backend != "hccl")


@on_ranks(2)
def test_tags_tell_messages_apart():
    collectives, group = get_platform().collectives, world()
    if hp_platform.get_backend() not in TAGS:
        pytest.skip("only gloo and mccl have tags")
    first, second = (as_tensor(np.full(3, value)) for value in (1.0, 2.0))
    if rank() == 0:
        sends = [
            collectives.send(each, 1, group=group, tag=tag + 1, async_op=True)
            for tag, each in enumerate((first, second))
        ]
        for handle in sends:
            handle.wait()
        return
    for tensor, tag in ((first, 2), (second, 1)):
        collectives.recv(tensor, 0, group=group, tag=tag)
    assert (as_array(first)[0], as_array(second)[0]) == (2.0, 1.0)


@on_ranks(4)
@pytest.mark.parametrize("members", [(0, 2), (1, 3), (0, 1, 3), (3, 1)])
def test_inside_a_group(members):
    if rank() not in members:
        return
    members = sorted(members)
    platform, size = get_platform(), len(members)
    group = platform.groups.new_group(members)
    index = platform.groups.rank(group)
    array = data((2 * size, 3), 4)
    tensor, mine = as_tensor(array[rank()]), array[members]
    whole = as_tensor(np.zeros((2 * size * size, 3)))
    platform.collectives.all_gather(whole, tensor, group=group)
    check(whole, mine.reshape(whole.shape))
    piece = as_tensor(np.zeros((2, 3)))
    platform.collectives.reduce_scatter(piece, tensor, "max", group=group)
    check(piece, mine.max(0)[2 * index :][:2])
    exchanged = as_tensor(np.zeros((2 * size, 3)))
    platform.collectives.all_to_all(exchanged, tensor, group=group)
    check(exchanged, mine.reshape(size, size, 2, 3)[:, index].reshape(-1, 3))
    platform.collectives.broadcast(exchanged, size - 1, group=group)
    check(exchanged, mine.reshape(size, size, 2, 3)[:, -1].reshape(-1, 3))
    platform.collectives.all_reduce(tensor, "avg", group=group)
    check(tensor, mine.mean(0))
    platform.collectives.barrier(group)


@on_ranks(2)
def test_an_average_is_divided_once():
    tensor = as_tensor([4.0, 4.0])
    handle = get_platform().collectives.all_reduce(tensor, "avg", group=world(), async_op=True)
    handle.wait()
    handle.wait()
    assert as_array(tensor).tolist() == [4.0, 4.0]


@every_size
@both_ways
@shapes
def test_all_gather(shape, async_op, ranks):
    array = data(shape, ranks)
    output = as_tensor(np.zeros((ranks * (shape or (1,))[0], *shape[1:])))
    tensor = as_tensor(array[rank()])
    finish(get_platform().collectives.all_gather(output, tensor, group=world(), async_op=async_op), async_op)
    check(output, array.reshape(output.shape))


@every_size
@both_ways
@pytest.mark.parametrize("op", REDUCE)
def test_reduce_scatter(op, async_op, ranks):
    array = data((2 * ranks, 3), ranks)
    tensor, output = as_tensor(array[rank()]), as_tensor(np.zeros((2, 3)))
    collectives = get_platform().collectives
    finish(collectives.reduce_scatter(output, tensor, op, group=world(), async_op=async_op), async_op)
    check(output, REDUCE[op](array)[2 * rank() :][:2])
    check(tensor, array[rank()])


@every_size
@both_ways
def test_all_to_all_in_equal_pieces(async_op, ranks):
    array = data((ranks * 2, 3), ranks)
    output = as_tensor(np.zeros((ranks * 2, 3)))
    collectives = get_platform().collectives
    finish(collectives.all_to_all(output, as_tensor(array[rank()]), group=world(), async_op=async_op), async_op)
    check(output, array.reshape(ranks, ranks, 2, 3)[:, rank()].reshape(-1, 3))


@every_size
@both_ways
def test_all_to_all_in_uneven_pieces(async_op, ranks):
    mine = rank()
    sizes = (np.arange(ranks)[:, None] + 2 * np.arange(ranks)) % 4  # from, to; some are zero
    blocks = [[np.full((size, 2), 10.0 * i + j) for j, size in enumerate(row)] for i, row in enumerate(sizes)]
    tensor = as_tensor(np.concatenate(blocks[mine]))
    output = as_tensor(np.zeros((int(sizes[:, mine].sum()), 2)))
    handle = get_platform().collectives.all_to_all(
        output, tensor, sizes[:, mine].tolist(), sizes[mine].tolist(), group=world(), async_op=async_op
    )
    finish(handle, async_op)
    check(output, np.concatenate([row[mine] for row in blocks]))


@every_size
@both_ways
def test_broadcast(async_op, ranks):
    array = data((2, 3), ranks)
    for source in range(ranks):
        tensor = as_tensor(array[rank()])
        handle = get_platform().collectives.broadcast(tensor, source, group=world(), async_op=async_op)
        finish(handle, async_op)
        check(tensor, array[source])


@on_ranks(3)
def test_ranks_of_broadcast_send_and_recv_are_the_groups():
    platform = get_platform()
    if rank() == 0:
        return
    group = platform.groups.new_group([1, 2])
    tensor = as_tensor(np.full(3, float(rank())))
    platform.collectives.broadcast(tensor, 0, group=group)
    assert as_array(tensor).tolist() == [1.0] * 3
    if rank() == 1:
        platform.collectives.send(as_tensor(as_array(tensor) * 5), 1, group=group)
    else:
        platform.collectives.recv(tensor, 0, group=group)
        assert as_array(tensor).tolist() == [5.0] * 3


@on_ranks(2)
def test_what_does_not_fit_is_refused_before_anything_is_sent():
    collectives, group = get_platform().collectives, world()
    four, two, three = (as_tensor(np.ones(size), "float32") for size in (4, 2, 3))
    doubles, integers = as_tensor(np.ones(2)), as_tensor(np.ones(4), "int64")
    strided = as_tensor(np.ones((4, 2)), "float32").T
    refused = [
        (ValueError, r"2 ranks with a tensor of shape \(4,\) have 8 elements, but output has 4 \(shape \(4,\)\)",
         lambda: collectives.all_gather(four, four, group=group)),
        (TypeError, "all_gather: output and tensor must have the same dtype, got .*loat32 and .*loat64",
         lambda: collectives.all_gather(four, doubles, group=group)),
        (ValueError, r"output must be contiguous, got shape \(2, 4\) with strides \(1, 2\)",
         lambda: collectives.all_gather(strided, four, group=group)),
        (ValueError, r"2 ranks with an output of shape \(4,\) need 8 elements, but tensor has 4",
         lambda: collectives.reduce_scatter(four, four, group=group)),
        (ValueError, r"tensor must be contiguous, got shape \(2, 4\) with strides \(1, 2\): pass tensor.contiguous",
         lambda: collectives.all_reduce(strided, group=group)),
        (ValueError, "tensor must be contiguous", lambda: collectives.broadcast(strided, 0, group=group)),
        (ValueError, "tensor must be contiguous", lambda: collectives.send(strided, 1 - rank(), group=group)),
        (ValueError, "Unknown reduction op 'mean'; expected one of: sum, avg, min, max, product",
         lambda: collectives.all_reduce(two, "mean", group=group)),
        (ValueError, "Unknown reduction op 'mean'", lambda: collectives.reduce_scatter(two, four, "mean", group=group)),
        (TypeError, "avg needs a floating-point dtype, got .*nt64",
         lambda: collectives.all_reduce(integers, "avg", group=group)),
        (ValueError, r"dim 0 of the input of shape \(3,\) is not divisible by 2 ranks: pass input_splits",
         lambda: collectives.all_to_all(four, three, group=group)),
        (ValueError, r"output_splits must be 2 numbers \(one per rank\) that sum to 4 .*, got \[1, 2\]",
         lambda: collectives.all_to_all(four, four, [1, 2], [2, 2], group=group)),
        (ValueError, "group_src must be a rank of the group, from 0 to 1, got 2",
         lambda: collectives.broadcast(two, 2, group=group)),
        (ValueError, "dst must be a rank of the group, from 0 to 1, got -1",
         lambda: collectives.send(two, -1, group=group)),
        (ValueError, "recv: src must be another rank of the group, got this rank's own, ",
         lambda: collectives.recv(two, rank(), group=group)),
    ]  # fmt: skip
    for error, text, call in refused:
        with pytest.raises(error, match=text):
            call()
    collectives.all_reduce(two, group=group)  # the ranks are still in step
    assert as_array(two).tolist() == [2.0, 2.0]
    # What the errors say to do: "pass tensor.contiguous()", "use sum, then divide and round", "pass input_splits".
    for tensor in (strided.contiguous(), integers):
        collectives.all_reduce(tensor, group=group)
        assert np.all(as_array(tensor) == 2)
    output = as_tensor(np.zeros(2 + 2 * rank()), "float32")
    collectives.all_to_all(output, three, input_splits=[1, 2], group=group)
    assert as_array(output).tolist() == [1.0] * (2 + 2 * rank())


@on_ranks(2)
def test_complex_numbers():
    collectives, group = get_platform().collectives, world()
    tensor = as_tensor((np.array([1 + 2j, 3j]) * (rank() + 1)).astype(np.complex64))
    output = as_tensor(np.zeros(4, np.complex64))
    collectives.all_gather(output, tensor, group=group)
    assert as_array(output).tolist() == [1 + 2j, 3j, 2 + 4j, 6j]
    collectives.reduce_scatter(tensor, output, "avg", group=group)
    assert as_array(tensor).tolist() == ([1 + 2j, 3j] if rank() == 0 else [2 + 4j, 6j])
    collectives.all_reduce(tensor, group=group)
    assert as_array(tensor).tolist() == [3 + 6j, 9j]
    for call in (collectives.all_reduce, functools.partial(collectives.reduce_scatter, tensor)):
        with pytest.raises(TypeError, match="op 'max' is not defined on complex numbers: use sum or avg"):
            call(tensor if call is collectives.all_reduce else output, "max", group=group)


@on_ranks(2)
def test_observers_see_each_collective_with_its_size():
    collectives, group = get_platform().collectives, world()
    seen = []
    observer = lambda *call: seen.append(call)  # noqa: E731
    collectives.observers.append(observer)
    try:
        four, two, other = (as_tensor(np.ones(size), "float32") for size in (4, 2, 4))
        collectives.all_gather(four, two, group=group)
        collectives.reduce_scatter(two, four, group=group)
        collectives.all_reduce(two, group=group)
        collectives.all_to_all(four, other, group=group)
        collectives.broadcast(two, 0, group=group)
        collectives.barrier(group)
    finally:
        collectives.observers.remove(observer)
    collectives.all_reduce(two, group=group)
    kinds = [("all_gather", 16), ("reduce_scatter", 16), ("all_reduce", 8), ("all_to_all", 16), ("broadcast", 8)]
    assert seen == [(*kind, group) for kind in [*kinds, ("barrier", 0)]]


@on_ranks(2)
def test_collectives_are_counted():
    collectives, group = get_platform().collectives, world()
    tensor = as_tensor(np.ones(8), "float32")
    with count_collectives() as outer:
        collectives.all_reduce(tensor, group=group)
        with count_collectives() as inner:
            collectives.all_reduce(tensor, group=group)
            collectives.broadcast(tensor, 0, group=group)
    collectives.all_reduce(tensor, group=group)
    assert outer == Counter(all_reduce=2, broadcast=1) and outer.bytes == 96
    assert inner == Counter(all_reduce=1, broadcast=1) and inner.bytes == 64
    assert collectives.observers == []


@on_ranks(2)
def test_observers_are_told_the_end_of_each_collective():
    collectives, group = get_platform().collectives, world()
    seen = []

    def observe(kind, size, group):
        seen.append(f"{kind} begins")
        return lambda: seen.append(f"{kind} ends")

    collectives.observers.append(observe)
    try:
        four, two, other = (as_tensor(np.ones(size), "float32") for size in (4, 2, 4))
        collectives.all_gather(four, two, group=group)
        collectives.reduce_scatter(two, four, "avg", group=group)
        collectives.all_to_all(four, other, group=group)
        collectives.broadcast(two, 0, group=group)
        if rank() == 0:
            collectives.send(two, 1, group=group)
        else:
            collectives.recv(two, 0, group=group)
        collectives.barrier(group)
        handle = collectives.all_reduce(two, group=group, async_op=True)
        assert seen[-1] == "all_reduce begins"
        handle.wait()
        handle.wait()
    finally:
        collectives.observers.remove(observe)
    sent = ("send", "recv")[rank()]
    kinds = ["all_gather", "reduce_scatter", "all_to_all", "broadcast", sent, "barrier", "all_reduce"]
    assert seen == [f"{kind} {what}" for kind in kinds for what in ("begins", "ends")]
    assert as_array(two).tolist() == [2.0, 2.0]
