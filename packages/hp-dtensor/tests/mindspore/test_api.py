from __future__ import annotations

import copy

import mindspore as ms
import mindspore.mint.nn.functional as F
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

import hp_dtensor
from hp_dtensor import (
    DFunction,
    DTensor,
    Partial,
    Replicate,
    Shard,
    SkipDTensorDispatch,
    custom_shard,
    distribute_module,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
    init_empty_weights,
    init_parameters,
    parallelize_value_and_grad,
)
from hp_dtensor.mindspore.api import distribute_parameter
from hp_dtensor.mindspore.backward.autograd import grad_enabled
from hp_platform import count_collectives
from hp_testing import on_ranks

X = np.arange(30, dtype=np.float32).reshape(5, 6) / 7


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up = mint.nn.Linear(6, 10)
        self.down = mint.nn.Linear(10, 6)

    def construct(self, x):
        return self.down(F.silu(self.up(x)))


def near(a, b, tolerance=1e-5):
    a = a.full_tensor() if isinstance(a, DTensor) else a
    np.testing.assert_allclose(a.asnumpy(), b.asnumpy() if isinstance(b, Tensor) else b, rtol=tolerance, atol=tolerance)


def loss_of(net):
    return lambda x: (net(x) ** 2).mean()


@on_ranks(2)
def test_a_dtensor_is_its_local_part_and_knows_the_whole():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(Tensor(X), mesh, [Shard(0)])
    assert isinstance(x, Tensor)
    assert (x.shape, x.ndim, x.size, len(x)) == ((5, 6), 2, 30, 5)
    assert x.local_shape == ((3, 6) if mesh.get_local_rank() == 0 else (2, 6))
    assert tuple(x.to_local().shape) == x.local_shape
    assert type(x.full_tensor()) is Tensor
    near(x, X)
    near(copy.deepcopy(x), X)
    assert "Shard(0)" in repr(x)
    assert x.sum().is_partial()
    assert x.sum().item() == pytest.approx(float(X.sum()), rel=1e-6)
    assert bool((x >= 0).all())
    with SkipDTensorDispatch():
        assert tuple(x.shape) == x.local_shape
        with SkipDTensorDispatch():
            assert type(x + 1) is Tensor
    assert x.shape == (5, 6)
    made = DTensor.from_local(x.to_local(), mesh, [Shard(0)], shape=(5, 6), run_check=True)
    near(made, X)


@on_ranks(2)
def test_plain_tensors_are_not_given_a_part_of_a_dtensor():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(Tensor(X), mesh, [Shard(0)])
    parameter, tensor, cell = Parameter(Tensor(X), name="w"), Tensor(X), nn.Dense(6, 5, has_bias=False)

    def index():
        tensor[:2] = distribute_tensor(Tensor(X[:2]), mesh, [Shard(0)])  # of which each rank has a row

    def attribute():
        cell.weight = x

    calls = [lambda: parameter.set_data(x), lambda: parameter.assign_value(x), lambda: parameter.copy_(x), index]
    for call in (*calls, lambda: tensor.copy_(x), attribute, lambda: cell.weight.set_data(x)):
        with pytest.raises(
            ValueError, match=r"a plain tensor of shape \(5, 6\) would get this rank's part of a DTensor"
        ):
            call()
    near(parameter, X)
    near(tensor, X)
    with pytest.raises(TypeError, match=r"make the Parameter first, and distribute it: distribute_tensor\(Parameter\("):
        Parameter(x, name="w")
    parameter.set_data(distribute_tensor(Tensor(X + 1), mesh, [Replicate()]))
    near(parameter, X + 1)


@on_ranks(2)
def test_local_map_of_uneven_shards():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(Tensor(X), mesh, [Shard(0)])
    for function in (
        hp_dtensor.local_map(lambda t: t * 2, [Shard(0)]),
        custom_shard(lambda t: t * 2, mesh, [Shard(0)]),
    ):
        result = function(x)
        assert tuple(result.shape) == X.shape
        near(result, X * 2)


@on_ranks(2)
def test_bad_input_is_refused_with_its_reason():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(Tensor(X), mesh, [Shard(0)])
    plain = Tensor(X)
    with pytest.raises(ValueError, match=r"plain tensor of shape \(5, 6\) meets a DTensor"):
        x + plain
    with implicit_replication():
        near(x + plain, X + X)
    with pytest.raises(ValueError, match="full_tensor"):
        x.asnumpy()
    with pytest.raises(NotImplementedError, match="no sharding rule for MindSpore's kernel"):
        ops.lgamma(x)
    near(ops.lgamma(x.full_tensor()), ops.lgamma(plain))
    with pytest.raises(NotImplementedError, match="reduce_partial"):
        x.sum(0)[1] = 0.0
    total = x.sum(0).reduce_partial()
    total[1] = 0.0
    near(total, X.sum(0) * (np.arange(6) != 1), 1e-5)
    with pytest.raises(ValueError, match="full_tensor"):
        Tensor(x)
    near(Tensor(x.full_tensor()), X)
    with pytest.raises(ValueError, match="global shape"):
        DTensor.from_local(Tensor(X), mesh, [Shard(0)], shape=(7, 6))
    other = distribute_tensor(Tensor(X), init_device_mesh("cpu", (2, 1)), [Replicate(), Replicate()])
    with pytest.raises(ValueError, match="different meshes"):
        x + other
    near(x.full_tensor() + other.full_tensor(), 2 * X)
    with pytest.raises(ValueError, match=r"gather with full_tensor\(\) and distribute_tensor\(\) it anew"):
        other.redistribute(mesh, [Shard(0)])
    near(x + distribute_tensor(other.full_tensor(), mesh, [Shard(0)]), 2 * X)
    with pytest.raises(RuntimeError, match="written in place"):
        x.sum(0).clamp_(0.0, 1.0)
    with pytest.raises(ValueError, match="one device"), hp_dtensor.init_on_device("Ascend"):
        pass
    p = distribute_tensor(Parameter(Tensor(X), name="p"), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"shape \(5, 6\), got Tensor of shape \(6, 5\)"):
        p.set_data(Tensor(X.T))
    for data in (Tensor(X + 1), distribute_tensor(Tensor(X + 1), mesh, [Shard(0)])):
        p.set_data(data)
        near(p, X + 1)


@on_ranks(2)
def test_writes_by_index():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(Tensor(X), mesh, [Shard(1)])
    expected = X.copy()
    x[1] = 3.0
    expected[1] = 3.0
    near(x, expected)
    x[0:2] = distribute_tensor(Tensor(X[2:4]), mesh, [Replicate()])
    expected[0:2] = X[2:4]
    near(x, expected)
    x.mul_(2.0)
    near(x, expected * 2)


@on_ranks(2, 4)
def test_gradients_of_a_module(ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    ms.set_seed(1)
    net = Net()
    plain = copy.deepcopy(net)
    for a, b in zip(plain.trainable_params(), net.trainable_params(), strict=True):
        a.set_data(Tensor(b.asnumpy()))
    value, wanted = ms.value_and_grad(loss_of(plain), None, plain.trainable_params())(Tensor(X))
    layouts = [Shard(0), Shard(0), Shard(1), Replicate()]
    for parameter, placement in zip(net.trainable_params(), layouts, strict=True):
        distribute_parameter(parameter, mesh, [placement])
    x = distribute_tensor(Tensor(X), mesh, [Replicate()])
    step = parallelize_value_and_grad(loss_of(net), None, net.trainable_params())
    step(x)
    with count_collectives() as counts:
        loss, grads = step(x)
    assert counts["all_reduce"] == 1  # the row-parallel product's; the input needs no gradient, the mean is replicated
    near(loss, value)
    for grad, expected, placement in zip(grads, wanted, layouts, strict=True):
        assert grad.placements == (placement,)
        near(grad, expected)


@on_ranks(2)
def test_value_and_grad_of_inputs_and_more_results():
    mesh = init_device_mesh("cpu", (2,))
    w = Parameter(Tensor(X.T.copy()), name="w")
    x = Tensor(X)

    def fn(x, scale):
        y = mint.matmul(x, w)
        return (y * y).sum() * scale, y

    (value, aux), (by_x, by_w) = ms.value_and_grad(fn, 0, [w], True)(x, 0.5)
    distribute_parameter(w, mesh, [Shard(1)])
    d = distribute_tensor(x, mesh, [Replicate()])
    (loss, out), (dx, dw) = parallelize_value_and_grad(fn, 0, [w], True)(d, 0.5)
    near(loss, value)
    near(out, aux)
    near(dx, by_x, 1e-4)
    near(dw[0] if isinstance(dw, tuple) else dw, by_w[0] if isinstance(by_w, tuple) else by_w, 1e-4)
    assert dx.placements == (Replicate(),)
    with pytest.raises(ValueError, match="scalar"):
        parallelize_value_and_grad(lambda x: x * 2, 0)(d)
    assert not grad_enabled()


class Scaled(DFunction):
    _op_name = "mul"

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class Nameless(DFunction):
    pass


@on_ranks(2)
def test_functions_of_ones_own():
    mesh = init_device_mesh("cpu", (2,))
    x, y = Tensor(X), Tensor(X + 1)
    wanted = ms.grad(lambda x, y: (x * y * x).sum(), (0, 1))(x, y)
    for left, right in [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Partial(), Shard(1))]:
        start = Replicate() if left.is_partial() else left
        a = distribute_tensor(x, mesh, [start])
        b = distribute_tensor(y, mesh, [right])
        _, grads = parallelize_value_and_grad(lambda a, b: (Scaled.apply(a, b) * a).sum(), (0, 1))(a, b)
        for grad, expected in zip(grads, wanted, strict=True):
            near(grad, expected, 1e-4)
    with pytest.raises(ValueError, match="mixed"):
        Scaled.apply(distribute_tensor(x, mesh, [Shard(0)]), y)
    near(Scaled.apply(*(distribute_tensor(each, mesh, [Shard(0)]) for each in (x, y))), x * y)
    with pytest.raises(ValueError, match="Nameless is a DFunction without a rule: set its class attribute _op_name"):
        Nameless.apply(distribute_tensor(x, mesh, [Shard(0)]))


@on_ranks(2)
def test_custom_shard_runs_on_local_parts():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(Tensor(X[:4]), mesh, [Shard(0)])
    rows = custom_shard(lambda local: local * 2, mesh, [Shard(0)], in_placements=([Shard(0)],))
    near(rows(x), X[:4] * 2)
    total = custom_shard(lambda local: local.sum(0), mesh, [Partial()])
    near(total(x), X[:4].sum(0), 1e-4)
    columns = custom_shard(lambda local: local, mesh, [Shard(1)], in_placements=([Shard(1)],))
    with pytest.raises(ValueError, match="redistribute_inputs"):
        columns(x)
    moved = custom_shard(lambda local: local, mesh, [Shard(1)], in_placements=([Shard(1)],), redistribute_inputs=True)
    near(moved(x), X[:4])


@on_ranks(2)
def test_weights_are_made_in_parts_with_the_bits_of_the_whole():
    mesh = init_device_mesh("cpu", (2,))
    ms.set_seed(7)
    whole = Net()
    ms.set_seed(7)
    with init_empty_weights():
        net = Net()
    for parameter, placement in zip(net.trainable_params(), [Shard(0), Shard(0), Shard(1), Replicate()], strict=True):
        distribute_parameter(parameter, mesh, [placement])
    init_parameters(net)
    for parameter, expected in zip(net.trainable_params(), whole.trainable_params(), strict=True):
        assert parameter.local_shape == parameter._spec.local_shape
        assert np.array_equal(parameter.full_tensor().asnumpy(), expected.asnumpy())
    near(net(distribute_tensor(Tensor(X), mesh, [Replicate()])), whole(Tensor(X)))


@on_ranks(2)
def test_an_optimizer_steps_on_local_parts():
    mesh = init_device_mesh("cpu", (2,))
    ms.set_seed(2)
    net, plain = Net(), Net()
    for a, b in zip(plain.trainable_params(), net.trainable_params(), strict=True):
        a.set_data(Tensor(b.asnumpy()))
    distribute_module(net, mesh, lambda name, cell, mesh: None)
    with pytest.raises(RuntimeError, match="distribute_module: this Net is distributed already"):
        distribute_module(net, mesh)
    for name in ("up.weight", "up.bias"):
        distribute_parameter(dict(net.parameters_and_names())[name], mesh, [Shard(0)])
    reference = ms.experimental.optim.AdamW(plain.trainable_params(), lr=0.01)
    with SkipDTensorDispatch():
        optimizer = ms.experimental.optim.AdamW(net.trainable_params(), lr=0.01)
    x = distribute_tensor(Tensor(X), mesh, [Replicate()])
    step = parallelize_value_and_grad(loss_of(net), None, net.trainable_params())
    step0 = ms.value_and_grad(loss_of(plain), None, plain.trainable_params())
    for _ in range(3):
        _, grads = step(x)
        with SkipDTensorDispatch():
            optimizer(grads)
        reference(step0(Tensor(X))[1])
    for a, b in zip(net.trainable_params(), plain.trainable_params(), strict=True):
        near(a, b, 1e-4)
