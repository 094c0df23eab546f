"""What the CPU's collectives do with MindSpore's tensors, and the native calls that Ascend gets instead."""

from __future__ import annotations

import inspect

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint
from mindspore.mint import distributed as dist

from hp_platform import get_platform
from hp_platform.mindspore import emulation, groups, native
from hp_testing import RankError, device_type, on_ranks, run_ranks

pytestmark = pytest.mark.skipif(device_type() != "cpu", reason="the emulation is the CPU's")


def test_an_array_shares_a_tensors_memory():
    tensor = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    emulation.host_array(tensor[1])[:] = 7
    assert tensor.asnumpy().tolist() == [[0, 1, 2], [7, 7, 7]]
    assert (tensor + 1).asnumpy()[1].tolist() == [8, 8, 8]
    product = mint.matmul(tensor, tensor.T.contiguous())  # still under way
    assert emulation.host_array(product)[1].tolist() == [21, 147]


@on_ranks(2)
def test_a_part_of_a_tensor_is_written_in_place():
    platform, group = get_platform(), groups.world()
    whole = Tensor(np.zeros((3, 2), np.float32))
    piece = Tensor(np.full(1, platform.groups.rank() + 1, np.float32))
    platform.collectives.all_gather(whole[1], piece, group=group)
    assert whole.asnumpy().tolist() == [[0, 0], [1, 2], [0, 0]]
    platform.collectives.all_reduce(mint.narrow(whole, 0, 1, 2), group=group)
    assert whole.asnumpy().tolist() == [[0, 0], [2, 4], [0, 0]]


@on_ranks(2)
def test_a_parameter_is_communicated_in_place():
    parameter = Parameter(Tensor(np.ones(2, np.float32)), name="weight")
    get_platform().collectives.all_reduce(parameter, group=groups.world())
    assert parameter.asnumpy().tolist() == [2, 2]
    assert isinstance(parameter, Parameter) and parameter.requires_grad


@on_ranks(4)
def test_many_exchanges_in_a_row_keep_their_order():
    platform, group = get_platform(), groups.world()
    rank = platform.groups.rank()
    for step in range(20):
        tensor = Tensor(np.arange(4 * (step + 1), dtype=np.int64) + 100 * rank)
        received = Tensor(np.zeros(4 * (step + 1), np.int64))
        platform.collectives.all_to_all(received, tensor, group=group)
        mine = np.arange(4 * (step + 1)).reshape(4, -1)[rank]
        assert received.asnumpy().reshape(4, -1).tolist() == [(mine + 100 * peer).tolist() for peer in range(4)]
        platform.collectives.all_reduce(received, "max", group=group)


@on_ranks(2)
def test_messages_of_groups_and_tags_are_told_apart_in_any_order_of_waiting():
    platform, group = get_platform(), groups.world()
    rank, other = platform.groups.rank(), platform.groups.second_group([0, 1])
    sent = [(group, 1, 1), (group, 2, 3), (other, 1, 5), (group, 1, 7), (other, 1, 0)]
    handles = []
    for where, tag, size in sent:
        message = Tensor(np.full(size, 100 * rank + size, np.float64))
        handles.append(platform.collectives.send(message, 1 - rank, group=where, tag=tag, async_op=True))
    received = [mint.empty((size,), dtype=mindspore.float64) for _, _, size in sent]
    into = [
        platform.collectives.recv(tensor, 1 - rank, group=where, tag=tag, async_op=True)
        for tensor, (where, tag, _) in zip(received, sent, strict=True)
    ]
    for handle in (*reversed(into), *handles):
        handle.wait()
    expected = [[100.0 * (1 - rank) + size] * size for *_, size in sent]
    assert [tensor.asnumpy().tolist() for tensor in received] == expected


@on_ranks(2)
def test_a_message_of_another_size_is_refused():
    platform, group = get_platform(), groups.world()
    if platform.groups.rank() == 0:
        platform.collectives.send(Tensor(np.ones(3, np.float32)), 1, group=group)
        return
    with pytest.raises(ValueError, match=r"rank 0 of 'mccl_world_group' sent 12 bytes with tag 0; the tensor of shape"
                       r" \(2,\) and float32 has 8"):  # fmt: skip
        platform.collectives.recv(Tensor(np.ones(2, np.float32)), 0, group=group)
    fitting = Tensor(np.zeros(3, np.float32))
    platform.collectives.recv(fitting, 0, group=group)
    assert fitting.asnumpy().tolist() == [1.0, 1.0, 1.0]


def fail_late() -> None:
    Tensor(np.ones(4, np.float32)).fill_(2.0)  # this kernel is not there, which shows when its result is waited for


def test_what_fails_late_fails_in_its_own_run():
    with pytest.raises(RankError, match="InplaceFillScalar unregistered"):
        run_ranks(1, fail_late)
    assert run_ranks(1, get_platform().groups.size) == [1]


def test_the_native_calls_fit_mindspores_signatures(monkeypatch):
    """Ascend is not here: the calls are recorded, with their arguments by MindSpore's own names."""
    calls = []

    def recorded(name):
        signature = inspect.signature(getattr(dist, name))
        return lambda *args: calls.append((name, signature.bind(*args).arguments))

    for name, value in vars(dist).items():
        if name in dist.__all__ and inspect.isfunction(value):
            monkeypatch.setattr(dist, name, recorded(name))
    monkeypatch.setattr(groups, "members", lambda group: [4, 7])
    tensor = mindspore.Tensor(np.ones((2, 2), np.float32))
    native.all_reduce(tensor, "product", "pair", True)
    native.all_gather(tensor, tensor, "pair", False)
    native.reduce_scatter(tensor, tensor, "avg", "pair", False)
    native.all_to_all(tensor, tensor, [1, 1], [], "pair", False)
    native.broadcast(tensor, 1, "pair", False)
    native.send(tensor, 0, "pair", 0, False)
    native.recv(tensor, 1, "pair", 0, False)
    native.send(tensor, 0, "pair", 0, True)
    native.recv(tensor, 1, "pair", 0, True)
    native.barrier("pair")
    names = [name for name, _ in calls]
    assert names == ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast",
                     "send", "recv", "isend", "irecv", "barrier"]  # fmt: skip
    assert all(arguments["group"] == "pair" for _, arguments in calls)
    by_name = dict(calls)
    assert by_name["all_reduce"]["op"] == "prod" and by_name["all_reduce"]["async_op"] is True
    assert by_name["reduce_scatter_tensor"]["op"] == "avg"
    assert by_name["all_gather_into_tensor"]["output_tensor"].shape == (4,)
    assert by_name["all_to_all_single"]["output_split_sizes"] == [1, 1]
    assert by_name["all_to_all_single"]["input_split_sizes"] is None
    assert by_name["broadcast"]["src"] == 7 and by_name["send"]["dst"] == 4 and by_name["recv"]["src"] == 7
    assert by_name["isend"]["dst"] == 4 and by_name["irecv"]["src"] == 7
