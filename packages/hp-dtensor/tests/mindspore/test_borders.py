"""What is checked where tensors become DTensors; where Cells are built; rules of the user's own; dropout."""

from __future__ import annotations

import os
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hp_dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    init_on_device,
    init_parameters,
    local_map,
    parallelize_value_and_grad,
    register_sharding,
)
from hp_dtensor.mindspore.api import distribute_parameter
from hp_dtensor.mindspore.ops.dispatching.dispatch import BINDINGS, forget_plans
from hp_testing import device_type, on_ranks

X = np.arange(30, dtype=np.float32).reshape(5, 6) / 7


@on_ranks(2)
def test_parts_of_a_maximum_have_no_gradient():
    mesh = init_device_mesh("cpu", (2,))

    def loss(x):
        return DTensor.from_local(x * 1.0, mesh, [Partial("max")]).full_tensor().sum()

    with pytest.raises(NotImplementedError, match="backward cannot tell which rank's value counts"):
        parallelize_value_and_grad(loss)(Tensor(X))
    assert loss(Tensor(X)).item() == pytest.approx(float(X.sum()), rel=1e-6)

    def detached(x):
        whole = DTensor.from_local(ops.stop_gradient(x * 1.0), mesh, [Partial("max")]).full_tensor()
        return whole.sum() + x.sum()

    _, grad = parallelize_value_and_grad(detached)(Tensor(X))
    np.testing.assert_allclose(grad.asnumpy(), np.ones_like(X))


@on_ranks(2)
def test_a_local_map_and_the_layout_of_its_gradients():
    mesh = init_device_mesh("cpu", (2,))
    rows = local_map(lambda a, b: a * b, [Shard(0)], ([Shard(0)], [Replicate()]), redistribute_inputs=True)

    def loss(x, w):
        return rows(x, w).square().sum()

    w = np.arange(6, dtype=np.float32) / 3
    given = [distribute_tensor(Tensor(value), mesh, [Replicate()]) for value in (X, w)]
    _, (dx, dw) = parallelize_value_and_grad(loss, grad_position=(0, 1))(*given)
    np.testing.assert_allclose(dx.full_tensor().asnumpy(), 2 * X * w * w, rtol=1e-5)
    np.testing.assert_allclose(dw.full_tensor().asnumpy(), (2 * X * X * w).sum(0), rtol=1e-5)
    with pytest.raises(ValueError, match=r"argument 0 is placed \(Replicate\(\),\), but in_placements has"):
        local_map(lambda a: a, [Shard(0)], ([Shard(0)],))(given[0])
    moved = local_map(lambda a: a, [Shard(0)], ([Shard(0)],), redistribute_inputs=True)(given[0])
    np.testing.assert_array_equal(moved.full_tensor().asnumpy(), X)


@on_ranks(2)
def test_a_local_tensor_gets_its_gradient_in_parts():
    mesh = init_device_mesh("cpu", (2,))

    def loss(x):
        return DTensor.from_local(x * 1.0, mesh, [Replicate()], grad_placements=[Partial()]).square().sum()

    _, part = parallelize_value_and_grad(loss)(Tensor(X))
    whole = DTensor.from_local(part, mesh, [Partial()]).full_tensor()
    np.testing.assert_allclose(whole.asnumpy(), 2 * X, rtol=1e-5)
    with pytest.raises(ValueError, match=r"grad_placements\[0\] is Replicate\(\) for a local tensor placed Shard\(0\)"):
        DTensor.from_local(Tensor(X), mesh, [Shard(0)], grad_placements=[Replicate()])


@on_ranks(2)
def test_a_rank_outside_of_a_mesh_is_told():
    mesh = init_device_mesh("cpu", (1,))
    if mesh.get_coordinate() is None:
        for call in (
            lambda: distribute_tensor(Tensor(X), mesh, [Shard(0)]),
            lambda: DTensor.from_local(Tensor(X), mesh),
        ):
            with pytest.raises(NotImplementedError, match=r"rank 1 is not in .* call it only on the ranks of the mesh"):
                call()


@on_ranks(2)
def test_a_tensor_is_not_cut_off_from_its_gradients():
    mesh = init_device_mesh("cpu", (2,))

    def loss(x):
        return distribute_tensor(x * 2.0, mesh, [Shard(0)]).sum()

    with pytest.raises(ValueError, match=r"shape \(5, 6\) .* would be detached from their gradients"):
        parallelize_value_and_grad(loss)(Tensor(X))
    assert loss(Tensor(X)).item() == pytest.approx(2 * float(X.sum()), rel=1e-6)

    def moved(x):
        return DTensor.from_local(x * 2.0, mesh).redistribute(placements=[Shard(0)]).sum()

    _, grad = parallelize_value_and_grad(moved)(Tensor(X))
    np.testing.assert_allclose(grad.asnumpy(), np.full_like(X, 2.0))


@on_ranks(2)
def test_ranks_that_disagree_are_told():
    mesh = init_device_mesh("cpu", (2,))
    first = mesh.get_local_rank() == 0
    for local, text in (
        (ops.ones((3, 3), ms.float64 if first else ms.float32), "disagree on the dtype or requires_grad"),
        (ops.ones((3, 4) if first else (4, 3)), "disagree on the global shape"),
        (ops.ones((3,) if first else (3, 1)), "disagree on the global shape"),
        (ops.ones((3,)) * (1 + int(first)), "values differ between ranks along axis 0"),
    ):
        with pytest.raises(ValueError, match=text):
            DTensor.from_local(local, mesh, [Replicate()], run_check=True)


@on_ranks(2)
def test_init_on_device():
    mesh = init_device_mesh("cpu", (2,))
    ms.set_seed(5)
    whole = mint.nn.Linear(4, 6)
    with init_on_device("cpu"):
        assert not mint.nn.Linear(4, 6).weight.has_init
    ms.set_seed(5)
    with init_on_device("meta"):
        made = mint.nn.Linear(4, 6)
    assert made.weight.has_init
    distribute_parameter(made.weight, mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"'weight', a DTensor of shape \(6, 4\), has no values yet"):
        made.weight.init_data()
    init_parameters(made)
    np.testing.assert_array_equal(made.weight.full_tensor().asnumpy(), whole.weight.asnumpy())


def test_a_rule_registered_before_the_first_operation_stays():
    program = """
import mindspore
from hp_dtensor import register_sharding
register_sharding("Abs")(lambda x: [])
import hp_dtensor.mindspore.ops.functions  # the table of kernels
from hp_dtensor.mindspore.ops.dispatching.dispatch import BINDINGS
print(BINDINGS["Abs"].rule, BINDINGS["Exp"].rule)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["registered", "pointwise"], done.stderr


@on_ranks(2)
def test_register_sharding():
    mesh, before = init_device_mesh("cpu", (2,)), dict(BINDINGS)
    x = distribute_tensor(Tensor(X + 1), mesh, [Shard(1)])
    with pytest.raises(NotImplementedError, match=r"@hp_dtensor.register_sharding\('Lgamma'\)"):
        ops.lgamma(x)
    seen = []
    try:

        @register_sharding("Lgamma")
        def _(given):
            seen.append(given)
            kept = [Replicate(), *(Shard(dim) for dim in range(len(given.shape)))]
            return [([placement], [placement]) for placement in kept]

        for _ in range(2):
            made = ops.lgamma(x)
            assert made.placements == (Shard(1),)
            np.testing.assert_allclose(made.full_tensor().asnumpy(), ops.lgamma(Tensor(X + 1)).asnumpy(), rtol=1e-6)
        assert len(seen) == 1
        assert seen[0].shape == (5, 6)

        @register_sharding(ops.operations.math_ops.Lgamma)
        def _(given):
            return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(1)])]

        with pytest.raises(RuntimeError, match="The rule accepts placements for which the kernel is not right"):
            ops.lgamma(x)
        with pytest.raises(TypeError, match="is not a kernel"):
            register_sharding(ops.lgamma)
        with pytest.raises(NotImplementedError, match="writes to its arguments"):
            register_sharding("InplaceMul")
    finally:
        BINDINGS.clear()
        BINDINGS.update(before)
        forget_plans()


@on_ranks(2)
def test_dropout_of_shards_is_one_devices():
    mesh = init_device_mesh("cpu", (2,))
    whole = np.random.default_rng(3).standard_normal((40, 6)).astype(np.float32)

    def dropped(x):
        ms.set_seed(11)
        return ops.dropout(x, p=0.3), ops.dropout(x, p=0.3)

    def loss(x):
        first, second = dropped(x)
        return (first * second).sum()

    truth = [value.asnumpy() for value in dropped(Tensor(whole))]
    assert (truth[0] == 0).any()
    assert (truth[0] != truth[1]).any()
    _, wanted = ms.value_and_grad(loss)(Tensor(whole))
    for placement in (Replicate(), Shard(0), Shard(1)):
        x = distribute_tensor(Tensor(whole), mesh, [placement])
        for value, expected in zip(dropped(x), truth, strict=True):
            assert value.placements == (placement,)
            np.testing.assert_allclose(value.full_tensor().asnumpy(), expected, rtol=1e-6)
        _, gradient = parallelize_value_and_grad(loss)(x)
        np.testing.assert_allclose(gradient.full_tensor().asnumpy(), wanted.asnumpy(), rtol=1e-5)


class Gather(nn.Cell):
    def construct(self, x):
        return x.redistribute(placements=[Replicate()])


@on_ranks(2)
def test_redistribution_in_a_cell_of_mixed_precision():
    mesh, cell = init_device_mesh("cpu", (2,)), Gather()
    cell.to_float(ms.float16)
    for placement in (Shard(0), Shard(1)):  # uneven, and even
        made = cell(distribute_tensor(Tensor(X), mesh, [placement]))
        np.testing.assert_array_equal(made.asnumpy().astype(np.float16), X.astype(np.float16))


class Tripled(nn.Cell):
    """Has a gradient of its own making."""

    def construct(self, x):
        return x * x

    def bprop(self, x, out, dout):
        return (dout * 3 * x.sum(),)


@on_ranks(2)
def test_a_cell_with_a_bprop_of_its_own():
    x = distribute_tensor(Tensor(X), init_device_mesh(device_type(), (2,)), [Shard(0)])
    match = r"Tripled defines its own bprop and is called with a DTensor of shape \(5, 6\) placed \(Shard\(0\),\)"
    with pytest.raises(NotImplementedError, match=match):
        parallelize_value_and_grad(lambda x: Tripled()(x).sum())(x)
    parallelize_value_and_grad(lambda x: Tripled()(x.to_local()).sum())(x)
