"""Cross entropy of logits whose classes are sharded."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from hp_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh, parallelize_value_and_grad
from hp_dtensor.debugging.debug import CommDebugMode
from hp_styles import loss_parallel
from hp_testing import on_ranks

ROWS, CLASSES = 6, 500


@on_ranks(2)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_sharded_classes(reduction):
    mesh, rng = init_device_mesh("cpu", (2,)), np.random.default_rng(2)
    logits = rng.standard_normal((ROWS, CLASSES))
    target = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    target[1] = -100

    def loss(x, t):
        return (ops.cross_entropy(x, t, reduction=reduction) * 1.5).sum()

    value, wanted = ms.value_and_grad(loss)(Tensor(logits), Tensor(target))
    given = distribute_tensor(Tensor(logits), mesh, [Shard(1)]), distribute_tensor(Tensor(target), mesh, [Replicate()])
    with loss_parallel(), CommDebugMode() as comm:
        got, gradient = parallelize_value_and_grad(loss)(*given)
    assert gradient.placements == (Shard(1),)
    np.testing.assert_allclose(got.asnumpy(), value.asnumpy(), rtol=1e-6)
    np.testing.assert_allclose(gradient.full_tensor().asnumpy(), wanted.asnumpy(), rtol=1e-5, atol=1e-9)
    sent = [event.bytes for event in comm.events]
    assert sent
    assert max(sent) <= ROWS * 8, sent


@on_ranks(2)
def test_what_is_refused():
    mesh = init_device_mesh("cpu", (2,))
    logits = distribute_tensor(Tensor(np.ones((2, 4))), mesh, [Shard(1)])
    target = distribute_tensor(Tensor(np.array([1, 4], np.int32)), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match=r"range \[-4, 4\), but got 4"):
        ops.cross_entropy(logits, target)
    with pytest.raises(NotImplementedError, match="z_loss=0.1.* is for PyTorch"), loss_parallel(z_loss=0.1):
        pass

    def added(logits):
        return 0.1 * (ops.logsumexp(logits, 1) ** 2).mean()

    value, wanted = ms.value_and_grad(added)(logits.full_tensor())
    got, gradient = parallelize_value_and_grad(added)(logits)
    np.testing.assert_allclose(got.asnumpy(), value.asnumpy(), rtol=1e-6)
    np.testing.assert_allclose(gradient.full_tensor().asnumpy(), wanted.asnumpy(), rtol=1e-6)


@on_ranks(2)
def test_the_largest_along_a_cut_dim_shares_its_gradient():
    mesh = init_device_mesh("cpu", (2,))
    x = np.array([[1.0, 3.0, 3.0, 3.0], [5.0, -np.inf, 2.0, 5.0], [0.0, 0.0, 0.0, 0.0]])
    for function in (ops.amax, ops.amin):

        def total(given, function=function):
            return (function(given, 1) * 2.0).sum() + (function(given, -1, keepdims=True) ** 2).sum()

        value, wanted = ms.value_and_grad(total)(Tensor(x[:, 2:] if function is ops.amin else x))
        given = distribute_tensor(Tensor(x[:, 2:] if function is ops.amin else x), mesh, [Shard(1)])
        got, gradient = parallelize_value_and_grad(total)(given)
        np.testing.assert_allclose(got.asnumpy(), value.asnumpy(), rtol=1e-12)
        np.testing.assert_allclose(gradient.full_tensor().asnumpy(), wanted.asnumpy(), rtol=1e-12)
