"""``ms.jit`` and graph mode over DTensors are refused; checkpoints of MindSpore's own."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from hp_dtensor import Partial, Replicate, Shard, SkipDTensorDispatch, custom_shard, distribute_tensor, init_device_mesh
from hp_dtensor.mindspore.api import distribute_parameter
from hp_testing import on_ranks


def total(x):
    return x.sum()


def doubled(x):
    return x * 2


@on_ranks(2)
@pytest.mark.parametrize("mode", ["ast", "bytecode", "trace"])
def test_a_compiled_function_of_a_dtensor_is_refused(mode):
    x = distribute_tensor(Tensor(np.arange(24.0)), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(
        NotImplementedError, match=r"is compiled .*called with, or closes over, a DTensor of shape \(24,\)"
    ):
        ms.jit(total, capture_mode=mode)(x)
    assert x.sum().item() == 276
    if mode != "trace":  # which reads the sources of its callers: a rank of a test has none
        on_parts = custom_shard(ms.jit(total, capture_mode=mode), x.device_mesh, [Partial()])
        assert on_parts(x).full_tensor().item() == 276


@on_ranks(2)
def test_what_a_compiled_function_closes_over():
    mesh = init_device_mesh("cpu", (2,))
    x, plain = distribute_tensor(Tensor(np.arange(24.0)), mesh, [Shard(0)]), Tensor(np.ones((2, 4), np.float32))
    cell = nn.Dense(4, 4)
    distribute_parameter(cell.weight, mesh, [Shard(0)])

    def closed():
        return x.sum()

    def of_cell(given):
        return cell(given)

    for mode in ("ast", "bytecode"):
        with pytest.raises(NotImplementedError, match="closes over, a DTensor"):
            ms.jit(closed, capture_mode=mode)()
        with pytest.raises(NotImplementedError, match=r"weight of Dense is a DTensor of shape \(4, 4\)"):
            ms.jit(of_cell, capture_mode=mode)(plain)
    cell.construct = ms.jit(cell.construct)
    with pytest.raises(NotImplementedError, match="weight of Dense is a DTensor"):
        cell(plain)


@on_ranks(2)
def test_graph_mode_of_a_distributed_cell_is_refused():
    mesh = init_device_mesh("cpu", (2,))
    cell = nn.Dense(4, 4)
    distribute_parameter(cell.weight, mesh, [Shard(0)])
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(NotImplementedError, match="weight of Dense is a DTensor .* Run it in PyNative mode"):
            cell(Tensor(np.ones((2, 4), np.float32)))
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


@on_ranks(2)
def test_plain_functions_are_compiled_as_ever():
    x = distribute_tensor(Tensor(np.arange(4.0)), init_device_mesh("cpu", (2,)), [Shard(0)])
    np.testing.assert_array_equal(ms.jit(doubled)(Tensor(np.ones(3))).asnumpy(), 2 * np.ones(3))
    with SkipDTensorDispatch():
        assert tuple(ms.jit(doubled)(x).shape) == (2,)


@on_ranks(2)
def test_checkpoints_of_a_distributed_cell(tmp_path):
    mesh, path = init_device_mesh("cpu", (2,)), str(tmp_path / f"{ms.communication.get_rank()}.ckpt")
    cell, other = nn.Dense(4, 5), nn.Dense(4, 5)
    values = cell.weight.asnumpy().copy()
    for each in (cell, other):
        distribute_parameter(each.weight, mesh, [Shard(0)])
        distribute_parameter(each.bias, mesh, [Replicate()])
    with pytest.raises(NotImplementedError, match="'weight' is a DTensor .* save_checkpoint of a Cell would save"):
        ms.save_checkpoint(cell, path)
    state = {p.name: p.full_tensor() for p in cell.get_parameters()}
    ms.save_checkpoint([{"name": k, "data": v} for k, v in state.items()], path)
    ms.load_checkpoint(path, net=other)
    assert other.weight.placements == (Shard(0),)
    np.testing.assert_array_equal(other.weight.full_tensor().asnumpy(), values)
