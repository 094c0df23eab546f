"""Writes by index, on every layout, with gradients; writes through views, which are refused."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from hp_dtensor import (
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    init_device_mesh,
    parallelize_value_and_grad,
)
from hp_platform import count_collectives
from hp_testing import on_ranks

X = np.arange(30, dtype=np.float64).reshape(5, 6)


def placed(mesh):
    one = [[Replicate()], [Shard(0)], [Shard(1)]]
    return [p * mesh.ndim for p in one] + ([[Shard(0), Shard(0)], [Shard(1), Shard(0)]] if mesh.ndim > 1 else [])


def write_all(x, make):
    """Ints, slices with steps, tensors of indices, masks."""
    x[1] = 7.0
    x[1:4, 2] = make(np.ones(3))
    x[::2] = make(np.arange(6.0))
    x[..., -1] = 3.0
    x[make(X > 20)] = 0.5
    x[make(np.array([0, 4]))] = -1.0
    x[:, make(np.array([5, 1]))] = make(np.array([[8.0, 9.0]]))


@on_ranks(2, 4)
def test_writes_into_cut_dims(ranks):
    mesh = init_device_mesh("cpu", (ranks,) if ranks < 4 else (2, 2))
    truth = X.copy()
    write_all(truth, np.asarray)
    for placements in placed(mesh):
        x = distribute_tensor(Tensor(X), mesh, placements)
        write_all(x, lambda v: distribute_tensor(Tensor(v), mesh, [Replicate()] * mesh.ndim))
        assert x.placements == tuple(placements)
        np.testing.assert_array_equal(x.full_tensor().asnumpy(), truth, err_msg=str(placements))


@on_ranks(2)
def test_writes_into_a_dim_that_is_cut_in_strides():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(Tensor(np.arange(24.0).reshape(8, 3)), mesh, [StridedShard(0, 2)])
    x[1:7] = 5.0
    truth = np.arange(24.0).reshape(8, 3)
    truth[1:7] = 5.0
    np.testing.assert_array_equal(x.full_tensor().asnumpy(), truth)


def written(x, v):
    y = x * 1.0
    y[1:3] = v * 2.0
    return (y * y * y).sum()


@on_ranks(2)
def test_gradients_of_what_is_written_and_of_what_is_left():
    mesh, v = init_device_mesh("cpu", (2,)), np.arange(12, dtype=np.float64).reshape(2, 6)
    _, wanted = ms.value_and_grad(written, (0, 1))(Tensor(X), Tensor(v))
    for placements in placed(mesh):
        for of_value in placed(mesh):
            given = distribute_tensor(Tensor(X), mesh, placements), distribute_tensor(Tensor(v), mesh, of_value)
            _, gradients = parallelize_value_and_grad(written, (0, 1))(*given)
            for gradient, expected in zip(gradients, wanted, strict=True):
                np.testing.assert_allclose(gradient.full_tensor().asnumpy(), expected.asnumpy(), rtol=1e-12)


@on_ranks(2)
def test_a_value_with_a_gradient_where_a_rank_has_nothing():
    mesh = init_device_mesh("cpu", (2,))
    x, v = (distribute_tensor(Tensor(np.ones((1, 3))), mesh, [p]) for p in (Shard(0), Replicate()))

    def write(x, v):
        y = x * 1.0
        y[0] = v[0] * 1.0
        return y.sum()

    with count_collectives() as counts, pytest.raises(NotImplementedError, match="leaves some rank without a part"):
        parallelize_value_and_grad(write, (0, 1))(x, v)
    assert not counts
    x = x.redistribute(placements=[Replicate()])
    _, (dx, dv) = parallelize_value_and_grad(write, (0, 1))(x, v)
    assert (dx.full_tensor().asnumpy().tolist(), dv.full_tensor().asnumpy().tolist()) == ([[0.0] * 3], [[1.0] * 3])


@on_ranks(2)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_writes_through_views_are_refused(placement):
    mesh = init_device_mesh("cpu", (2,))
    y = distribute_tensor(Tensor(X), mesh, [placement])
    zeros = distribute_tensor(Tensor(np.zeros(30)), mesh, [Replicate()])
    with pytest.raises(
        RuntimeError, match="is a view made by __getitem__, through which writes don't reach its source"
    ):
        y[1:3].mul_(2.0)
    with pytest.raises(RuntimeError, match="is a view made by Reshape"):
        y.view(30).copy_(zeros)
    with pytest.raises(RuntimeError, match="is a view made by __getitem__"):
        y[1:3][0] = 7.0
    own = y * 1.0
    own[1:3] = own[1:3] * 2.0
    np.testing.assert_array_equal(own.full_tensor().asnumpy()[1:3], X[1:3] * 2)
    np.testing.assert_array_equal(y.full_tensor().asnumpy(), X)
    copied = y[1:3].copy()
    copied.mul_(2.0)
    np.testing.assert_array_equal(copied.full_tensor().asnumpy(), X[1:3] * 2)


@on_ranks(2)
def test_a_source_with_a_gathered_view_is_not_written():
    mesh = init_device_mesh("cpu", (2,))
    y = distribute_tensor(Tensor(X), mesh, [Shard(0)])
    view = y[1]
    with pytest.raises(RuntimeError, match="has a view that was gathered from its shards"):
        y.add_(1.0)
    with pytest.raises(RuntimeError, match="has a view that was gathered from its shards"):
        y[0] = 1.0
    np.testing.assert_array_equal(view.full_tensor().asnumpy(), X[1])
    del view
    y.add_(1.0)
    assert y[:, 2:].shape == (5, 4)  # the rows stay cut: this view is one
    y.add_(1.0)
    np.testing.assert_array_equal(y.full_tensor().asnumpy(), X + 2)


@on_ranks(2)
def test_a_value_with_a_gradient_for_a_place_that_is_named_twice():
    mesh, rows = init_device_mesh("cpu", (2,)), Tensor([3, 1, 3])

    def loss(x, v):
        y = x * 1.0
        y[rows] = v
        return (y**2).sum()

    v = distribute_tensor(Tensor(np.ones((3, 6))), mesh, [Replicate()])
    step = parallelize_value_and_grad(loss, grad_position=(0, 1))
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(Tensor(X), mesh, [placement])
        if placement == Replicate():
            _, (dx, dv) = step(x, v)
            np.testing.assert_allclose(dv.full_tensor().asnumpy(), np.full((3, 6), 2.0))
            assert not dx.full_tensor().asnumpy()[[1, 3]].any()
            continue
        with (
            count_collectives() as counts,
            pytest.raises(NotImplementedError, match="names a place of x, .* than once"),
        ):
            step(x, v)
        assert not counts
