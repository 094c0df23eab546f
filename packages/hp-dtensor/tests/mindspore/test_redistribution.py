"""Every placement to every other, on MindSpore's collectives, against numpy."""

from __future__ import annotations

import itertools
import random

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    init_device_mesh,
    parallelize_value_and_grad,
)
from hp_dtensor.layout.sharding import take
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mindspore.backward import autograd
from hp_dtensor.mindspore.backward.autograd import execute
from hp_dtensor.redistribution.executor import coordinates, reduce_arrays
from hp_testing import on_ranks

R = Replicate()


def parts(shape, placements, mesh_shape, seed):
    """The whole and every rank's part; parts of a reduction are random."""
    rng = np.random.default_rng(seed)
    held = {}
    for place in coordinates(mesh_shape):
        held[place] = rng.integers(-8, 8, shape).astype(np.float32)
    shared = rng.integers(-8, 8, shape).astype(np.float32)
    partial = [axis for axis, p in enumerate(placements) if p.is_partial()]
    by_part = {}
    for place in coordinates(mesh_shape):
        key = tuple(place[axis] for axis in partial)
        by_part.setdefault(key, held[place] if partial else shared)
    whole = shared
    if partial:
        (op,) = {placements[axis].op for axis in partial}
        whole = reduce_arrays([by_part[key] for key in sorted(by_part)], op)
    bare = [Replicate() if p.is_partial() else p for p in placements]
    local = {c: take(by_part[tuple(c[a] for a in partial)], bare, mesh_shape, c) for c in coordinates(mesh_shape)}
    return whole, local


def check(mesh, shape, source, target, seed):
    what = f"{source} to {target}, shape {shape} on {mesh.shape}"
    _, local = parts(shape, source, tuple(mesh.shape), seed)
    whole, _ = parts(shape, source, tuple(mesh.shape), seed)
    me = tuple(mesh.get_coordinate())
    spec = TensorSpec.of(mesh, source, shape)
    made = execute(Tensor(local[me]), spec, spec.with_placements(target))
    spec_to = spec.with_placements(target)
    assert tuple(made.shape) == spec_to.local_shape, what
    full = execute(made, spec_to, spec.with_placements([Replicate()] * mesh.ndim))
    np.testing.assert_allclose(full.asnumpy(), whole, rtol=1e-5, atol=1e-5, err_msg=what)


@on_ranks(2, 4)
@pytest.mark.parametrize("shape", [(5, 6), (1, 3), (0, 4)], ids=str)
def test_one_axis(shape, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    count = shape[0] * shape[1]
    kinds = [Replicate(), Shard(0), Shard(1)]
    if shape[1] % 3 == 0:
        kinds.append(StridedShard(1, 3))
    if count:
        kinds.append(RaggedShard((0, 1), (*([1] * (ranks - 1)), count - ranks + 1)) if count >= ranks else Shard(0))
    sources = [*kinds, Partial(), Partial("avg"), Partial("max")]
    for seed, (source, target) in enumerate(itertools.product(sources, [*kinds, Partial()])):
        check(mesh, shape, (source,), (target,), seed)


@on_ranks(4)
def test_two_axes():
    mesh = init_device_mesh("cpu", (2, 2))
    kinds = [Replicate(), Shard(0), Shard(1), Partial()]
    pairs = list(itertools.product(itertools.product(kinds, repeat=2), repeat=2))
    for seed, (source, target) in enumerate(random.Random(3).sample(pairs, 24)):
        check(mesh, (5, 3), source, target, seed)


@on_ranks(4)
@pytest.mark.parametrize("ranks_in_mesh", [[3, 1, 0, 2], [[1, 0], [2, 3]]], ids=str)
def test_ranks_in_any_order(ranks_in_mesh):
    mesh = DeviceMesh("cpu", ranks_in_mesh)
    kinds = [Replicate(), Shard(0), Shard(1), Partial()]
    placements = list(itertools.product(kinds, repeat=mesh.ndim))
    pairs = list(itertools.product(placements, repeat=2))
    for seed, (source, target) in enumerate(random.Random(4).sample(pairs, 12)):
        check(mesh, (4, 4) if seed % 2 else (5, 3), source, target, seed)
    x = distribute_tensor(Tensor(np.arange(8.0, dtype=np.float32) + mesh.get_rank()), mesh, [Shard(0)] * mesh.ndim)
    first = int(mesh.mesh.reshape(-1)[0])  # the mesh's first rank has the values that count
    np.testing.assert_array_equal(x.full_tensor().asnumpy(), np.arange(8.0, dtype=np.float32) + first)


@on_ranks(2)
@pytest.mark.parametrize("dtypes", [(ms.float16, None), (ms.float16, ms.float16), (None, ms.float16)], ids=str)
@pytest.mark.parametrize("way", [(Shard(0), R), (Shard(0), Shard(1)), (R, Shard(0)), (Partial(), R)], ids=repr)
def test_values_and_gradients_are_sent_in_dtypes_of_their_own(dtypes, way):
    forward, backward = dtypes
    mesh, sent = init_device_mesh("cpu", (2,)), []
    part = Tensor(np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32))

    def program(part, forward=None, backward=None):
        x = DTensor.from_local(part, mesh, [way[0]])
        made = x.redistribute(placements=[way[1]], forward_dtype=forward, backward_dtype=backward)
        assert made.dtype == (forward or ms.float32) and made.placements == (way[1],)
        return (made.to(ms.float32) ** 2).sum()

    run, execute = parallelize_value_and_grad(program, 0, None), autograd.execute
    wanted, want = run(part)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "execute", lambda x, *rest: sent.append(x.dtype) or execute(x, *rest))
        value, grad = run(part, forward, backward)
    assert sent[0] == (forward or ms.float32) and (backward or ms.float32) in sent
    assert grad.dtype == ms.float32
    np.testing.assert_allclose(grad.asnumpy(), want.asnumpy(), rtol=5e-3, atol=5e-3)
    np.testing.assert_allclose(value.asnumpy(), wanted.asnumpy(), rtol=5e-3)
    still = DTensor.from_local(part, mesh, [way[0]])
    assert still.redistribute(placements=[way[0]], forward_dtype=ms.float16).dtype == ms.float16
    assert still.redistribute(placements=[way[1]], forward_dtype=ms.float16).dtype == ms.float16
