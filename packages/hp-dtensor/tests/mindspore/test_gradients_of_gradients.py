"""Second derivatives: right where nothing is moved between ranks in between, refused elsewhere, never zeros."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops
from mindspore.graph.api import _pynative_executor

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, parallelize_value_and_grad
from hp_testing import device_type, on_ranks

X = np.random.default_rng(0).standard_normal((4, 6))
W = np.random.default_rng(1).standard_normal((6, 2))
TWICE = r"was differentiated twice: on MindSpore its gradient is a number .* ops\.stop_gradient\(\)"


def placed(value, placement):
    return distribute_tensor(Tensor(value), init_device_mesh(device_type(), (2,)), [placement])


def scalar(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def recorded():
    return _pynative_executor.grad_flag()


def loss(x, w):
    return scalar((mint.matmul(x, w) ** 3).sum())


def twice(position):
    return lambda x, w: (ms.grad(loss, position)(x, w) ** 2).sum()


def stopped(x, w):
    """Of the gradient only its values are used."""
    return loss(x, w) + scalar((ops.stop_gradient(ms.grad(loss)(x, w)) ** 2).sum())


@on_ranks(2)
@pytest.mark.parametrize("position", [0, 1])
def test_through_a_move_they_are_refused(position):
    for placements in ((Shard(1), Shard(0)), (Replicate(), Shard(1)), (Shard(0), Replicate())):
        if placements[position] == Replicate() or Replicate() not in placements:
            given = placed(X, placements[0]), placed(W, placements[1])
            for differentiate in (ms.grad, parallelize_value_and_grad):
                with pytest.raises(NotImplementedError, match=TWICE):
                    differentiate(twice(position), position)(*given)
                assert not recorded()
            _, (grad, _) = parallelize_value_and_grad(stopped, (0, 1))(*given)
            np.testing.assert_allclose(grad.full_tensor().asnumpy(), ms.grad(loss)(Tensor(X), Tensor(W)).asnumpy())


@on_ranks(2)
@pytest.mark.parametrize("position", [0, 1])
def test_of_what_stays_on_a_rank_they_are_right(position):
    placements = (Shard(0), Replicate()) if position == 0 else (Replicate(), Shard(1))
    given = placed(X, placements[0]), placed(W, placements[1])
    part = ms.grad(twice(position), position)(*given)
    whole = DTensor.from_local(part, given[0].device_mesh, [placements[position]]).full_tensor()
    expected = ms.grad(twice(position), position)(Tensor(X), Tensor(W))
    np.testing.assert_allclose(whole.asnumpy(), expected.asnumpy(), rtol=1e-12)


@on_ranks(2)
def test_a_gradient_as_numbers_inside_a_gradient():
    x, w = placed(X, Shard(1)), placed(W, Shard(0))

    def weighted(x, w):
        saliency = ops.stop_gradient(ms.grad(loss)(x, w))
        return loss(x, w) + scalar((x * (saliency if not isinstance(x, DTensor) else of(x, saliency))).sum())

    def of(x, local):
        return DTensor.from_local(local, x.device_mesh, x.placements)

    _, made = parallelize_value_and_grad(weighted)(x, w)
    _, expected = ms.value_and_grad(weighted)(Tensor(X), Tensor(W))
    np.testing.assert_allclose(made.full_tensor().asnumpy(), expected.asnumpy(), rtol=1e-12)


@on_ranks(2)
def test_an_error_in_a_function_ends_the_recording():
    x = placed(X, Shard(0))

    def fails(x):
        y = x * 2
        raise ValueError(f"on purpose, {y.shape}")

    weight = ms.Parameter(Tensor(X), name="weight")
    for function in (fails, lambda x: parallelize_value_and_grad(fails)(x)[1].sum()):
        with pytest.raises(ValueError, match="on purpose"):
            parallelize_value_and_grad(function)(x)
        assert not recorded()
        ms.grad(lambda x: (x * weight).sum(), None, [weight])(Tensor(X))
        assert not recorded()
