"""What an operation reads is what its operands hold now, however they were written."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops

from hp_dtensor import Replicate, Shard, SkipDTensorDispatch, init_device_mesh, parallelize_value_and_grad
from hp_dtensor import distribute_tensor as distribute
from hp_dtensor.mindspore.api import distribute_parameter
from hp_testing import on_ranks

A, W = np.arange(48.0).reshape(16, 3) / 7, np.arange(15.0).reshape(3, 5) / 5


def assigned(weight: Parameter, factor: float) -> None:
    with SkipDTensorDispatch():
        ops.assign(weight, weight * factor)


def set_data(weight: Parameter, factor: float) -> None:
    weight.set_data((weight * factor).redistribute(weight.device_mesh, weight.placements))


@on_ranks(2)
@pytest.mark.parametrize("write", [assigned, set_data])
@pytest.mark.parametrize("place", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("watched", [False, True], ids=["a parameter", "with gradients"])
def test_a_weight_written_where_no_version_shows_it(write, place, watched):
    mesh = init_device_mesh("cpu", (2,))
    given = distribute(Tensor(A, ms.float64), mesh, [Shard(0)])
    weight = Parameter(Tensor(W, ms.float64), name="w")
    distribute_parameter(weight, mesh, [place])
    expected = W
    for _ in range(3):
        if watched:
            step = parallelize_value_and_grad(lambda x: mint.matmul(x, weight).square().sum(), None, [weight])
            value, (grad,) = step(given)
            np.testing.assert_allclose(float(value), np.square(A @ expected).sum(), rtol=1e-12)
            np.testing.assert_allclose(grad.full_tensor().asnumpy(), 2 * A.T @ A @ expected, rtol=1e-12)
        else:
            np.testing.assert_allclose(mint.matmul(given, weight).full_tensor().asnumpy(), A @ expected, rtol=1e-12)
        write(weight, 2.0)
        expected = expected * 2


@on_ranks(2)
def test_a_tensor_written_where_no_version_shows_it():
    mesh = init_device_mesh("cpu", (2,))
    given = distribute(Tensor(A, ms.float64), mesh, [Shard(0)])
    x = distribute(Tensor(W, ms.float64), mesh, [Shard(1)])
    for step in range(3):
        np.testing.assert_allclose(mint.matmul(given, x).full_tensor().asnumpy(), A @ W * 2**step, rtol=1e-12)
        with SkipDTensorDispatch():
            x.assign_value(x * 2)
    whole = distribute(Tensor(W, ms.float64), mesh, [Replicate()])
    np.testing.assert_allclose(mint.matmul(given, whole).full_tensor().asnumpy(), A @ W, rtol=1e-12)
