"""What users put around a Cell before or after it is sharded: recomputation, mixed precision, jit, checkpoints."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from fsdp_cells import data_mesh
from mindspore import Tensor, nn, ops
from mindspore.train import ModelCheckpoint, RunContext
from mindspore.train.callback import _InternalCallbackParam

from hp_dtensor import parallelize_value_and_grad
from hp_fsdp import MixedPrecisionPolicy, full_state_dict, fully_shard
from hp_testing import on_ranks

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


class Pair(nn.Cell):
    """Two layers of MindSpore's older kind, which mixed precision knows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Dense(4, 5), nn.Dense(5, 3)

    def construct(self, x):
        return self.b(ops.relu(self.a(x)))


def made():
    ms.set_seed(3)
    return Pair()


def gradients(net, transform):
    parameters = list(net.trainable_params())
    _, found = transform(lambda x: (net(x) ** 2).sum(), None, parameters)(Tensor(X))
    return [g.full_tensor().asnumpy() if hasattr(g, "full_tensor") else g.asnumpy() for g in found]


def shard(net):
    fully_shard(net.a, data_mesh())
    return fully_shard(net, data_mesh())


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"use_reentrant": False}, {"output_recompute": True}])
@pytest.mark.parametrize("part", ["a", "root"])
def test_recompute_before_fully_shard(options, part):
    wanted, net, calls = gradients(made(), ms.value_and_grad), made(), []
    (net.a if part == "a" else net).recompute(**options)
    shard(net)
    net.b.register_forward_pre_hook(lambda cell, inputs: calls.append(cell))
    for got, expected in zip(gradients(net, parallelize_value_and_grad), wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert len(calls) == (2 if part == "root" else 1)


@on_ranks(2)
def test_recompute_of_a_part_that_is_not_sharded_itself():
    net = made()
    net.a.recompute()
    with pytest.raises(NotImplementedError, match=r"fully_shard: 'a', a \w+, is computed again by Cell.recompute"):
        fully_shard(net, data_mesh())
    wrapped, plain = made(), made()
    hp_offload = pytest.importorskip("hp_offload", reason="needs hp-offload")
    hp_offload.checkpoint_wrapper(wrapped.a)
    for model in (shard(net), fully_shard(wrapped, data_mesh())):  # what the error says
        for got, expected in zip(
            gradients(model, parallelize_value_and_grad), gradients(plain, ms.value_and_grad), strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("level", ["O2", "O3", "auto"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_auto_mixed_precision(level, when):
    wanted = gradients(ms.amp.auto_mixed_precision(made(), level), ms.value_and_grad)
    net = made()
    if when == "before":
        net = fully_shard(ms.amp.auto_mixed_precision(net, level), data_mesh())
    else:
        net = ms.amp.auto_mixed_precision(fully_shard(net, data_mesh()), level)
    for got, expected in zip(gradients(net, parallelize_value_and_grad), wanted, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_sharded_cell_is_not_rewritten_for_mixed_precision():
    inner = made()
    fully_shard(inner.a, data_mesh())
    for net, name in ((fully_shard(made(), data_mesh()), "Pair"), (inner, "Dense")):
        with pytest.raises(NotImplementedError, match=rf"{name} is sharded by fully_shard.* at \"O1\".* take level O2"):
            ms.amp.auto_mixed_precision(net, "O1")
    wanted = gradients(ms.amp.auto_mixed_precision(made(), "O1"), ms.value_and_grad)
    before = fully_shard(ms.amp.auto_mixed_precision(made(), "O1"), data_mesh())
    policy = fully_shard(made(), data_mesh(), mp_policy=MixedPrecisionPolicy(ms.float16, ms.float32))
    for net, limit in ((before, 1e-6), (policy, 2e-2)):
        for got, expected in zip(gradients(net, parallelize_value_and_grad), wanted, strict=True):
            np.testing.assert_allclose(got, expected, rtol=limit, atol=limit)


@on_ranks(2)
def test_compiled_cells_are_refused_by_name():
    for compiled in ("a", "root"):
        for before in (True, False):
            net = made()
            cell = net.a if compiled == "a" else net
            if before:
                cell.construct = ms.jit(cell.construct)
            shard(net)
            if not before:
                cell.construct = ms.jit(cell.construct)
            with pytest.raises(NotImplementedError, match="is compiled .* Run it in PyNative mode"):
                net(Tensor(X))
    net = fully_shard(made(), data_mesh())

    def loss(x):
        return net(x).sum()

    with pytest.raises(NotImplementedError, match="weight of Pair is a DTensor"):
        ms.jit(loss)(Tensor(X))
    inner = made()
    inner.a.construct = ms.jit(inner.a.construct)
    fully_shard(inner, data_mesh())
    with pytest.raises(NotImplementedError, match="weight of Dense is gathered by fully_shard for this forward only"):
        inner(Tensor(X))


@on_ranks(2)
def test_checkpoints_of_mindspore(tmp_path):
    path, net, whole = str(tmp_path / f"{ms.communication.get_rank()}.ckpt"), shard(made()), made()
    with pytest.raises(NotImplementedError, match=r"save_checkpoint of a Cell .* full_state_dict\(model\)"):
        ms.save_checkpoint(net, path)
    step = _InternalCallbackParam(train_network=net, cur_epoch_num=1, cur_step_num=1, batch_num=1)
    with pytest.raises(NotImplementedError, match=r"save_checkpoint of a Cell .* full_state_dict\(model\)"):
        ModelCheckpoint("net", str(tmp_path)).end(RunContext(step))
    ms.save_checkpoint([{"name": k, "data": v} for k, v in full_state_dict(net).items()], path)
    saved = ms.load_checkpoint(path)
    for name, parameter in whole.parameters_and_names():
        np.testing.assert_array_equal(saved[name].asnumpy(), parameter.asnumpy())
    ms.set_seed(8)
    other = shard(Pair())
    ms.load_checkpoint(path, net=other)
    for parameter, expected in zip(other.trainable_params(), whole.trainable_params(), strict=True):
        np.testing.assert_array_equal(parameter.full_tensor().asnumpy(), expected.asnumpy())
