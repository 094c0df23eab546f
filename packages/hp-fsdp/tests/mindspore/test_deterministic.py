"""deterministic=True: the same bits for any number of ranks."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import mindspore
import numpy as np
import pytest
from fsdp_cells import (
    Net,
    batch,
    close,
    data_mesh,
    differentiated,
    double,
    loss_of,
    pair,
    same_gradients,
    seeded,
    train,
    whole,
    world,
)
from mindspore import Tensor, mint, nn

from hp_dtensor import Shard, SkipDTensorDispatch, init_device_mesh
from hp_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    global_grad_norm,
)
from hp_testing import device_type, on_ranks, run_ranks

pytestmark = pytest.mark.framework("mindspore")

MICRO_BATCHES = 12
STEPS = 2


class Middle(nn.Cell):
    """Sizes that blocks of 1024 elements don't divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = mint.nn.Linear(37, 61), mint.nn.Linear(61, 37)

    def construct(self, x):
        return self.down(mint.sin(self.up(x)))


class Twice(nn.Cell):
    """Its first block is called twice, a part of it is seldom used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mint.nn.Linear(5, 37), mint.nn.Linear(37, 3)
        self.blocks = nn.CellList([Middle(), Middle()])
        self.seldom = mint.nn.Linear(37, 37)

    def construct(self, x, seldom):
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        if seldom:
            x = x + self.seldom(x)
        return self.last(x)


def shard(mesh: Any, **options: Any) -> Any:
    model = seeded(Twice)
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    return fully_shard(model, mesh, **options)


def micro_batch(step: int, number: int) -> tuple[Tensor, bool]:
    """One micro-batch, and whether it uses what is seldom used."""
    x = np.random.RandomState(1000 * step + number).randn(2, 5).astype(np.float32)
    return Tensor(x), number in (1, 7, 11) or step == 1


def loss_of_micro_batch(model: Any, x: Tensor, seldom: bool) -> Any:
    return ((model(x, seldom).astype(mindspore.float32) - 1) ** 2).mean() / MICRO_BATCHES


def by_rows(parameter: Any) -> Shard | None:
    return Shard(0) if len(parameter.shape) == 2 else None


def weights_after(
    *, replicas: int = 1, low: bool = False, rows: bool = False, deterministic: bool = True, **options: Any
) -> dict[str, Any]:
    """Trains on this rank's share of the micro-batches.

    Args:
        replicas: size of the axis to replicate over; 1 is a mesh of one axis.
        low: compute in float16, reduce in float32.
        rows: cut matrices between rows.
        deterministic: the mode to test.
        options: for `fully_shard`.

    Returns:
        ``hash`` of all weights, and ``norms`` of each step as floats.
    """
    rank, ranks = world()
    shape, names = ((replicas, ranks // replicas), ("r", "s")) if replicas > 1 else ((ranks,), ("s",))
    if low:
        options["mixed_precision"] = MixedPrecisionPolicy(mindspore.float16, mindspore.float32)
    if rows:
        options["shard_placement_fn"] = by_rows
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=names)
    model = shard(mesh, deterministic=deterministic, **options)
    model.set_reduce_op_type("sum")
    parameters = model.trainable_params()
    run = differentiated(model, lambda x, seldom: loss_of_micro_batch(model, x, seldom))
    with SkipDTensorDispatch():
        optimizer = mindspore.experimental.optim.AdamW(parameters, lr=0.01)
    count = MICRO_BATCHES // ranks
    norms = []
    for step in range(STEPS):
        gradients: Any = None
        for index in range(count):
            model.set_requires_gradient_sync(index == count - 1)
            _, gradients = run(*micro_batch(step, rank * count + index))
        norms.append(clip_grad_norm_(parameters, 0.01, gradients=gradients).item())
        with SkipDTensorDispatch():
            optimizer(gradients)
    digest = hashlib.sha256()
    for name, tensor in full_state_dict(model, cpu=True).items():
        digest.update(name.encode() + tensor.asnumpy().tobytes())
    return {"hash": digest.hexdigest(), "norms": norms}


JOBS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "accumulated": ({}, (3,)),
    "replicas": ({"replicas": 2}, (2, 4)),
    "mixed precision": ({"low": True}, (1, 3)),
    "by parameter": ({"comm_fusion": False}, (3,)),
    "whole rows": ({"rows": True}, (3,)),
    "on the host": ({"offload_policy": CPUOffloadPolicy()}, (2,)),
    "kept": ({"reshard_after_forward": False}, (2,)),
    "resharded to two": ({"reshard_after_forward": 2}, (4,)),
}

SLOW = ("replicas", "mixed precision", "by parameter", "whole rows", "kept")  # and on PyTorch in every run


@cache
def first() -> dict[str, Any]:
    return run_ranks(1, weights_after)[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in SLOW else name for name in JOBS]
)
def test_weights_and_norms_have_the_same_bits(name: str):
    options, sizes = JOBS[name]
    expected = None if name == "mixed precision" else first()
    for ranks in sizes:
        for result in run_ranks(ranks, weights_after, **options):
            expected = expected or result
            assert result == expected, f"{name} on {ranks} ranks"


@pytest.mark.thorough  # of the test above: it can fail
def test_without_it_they_differ():
    results = [run_ranks(ranks, weights_after, deterministic=False)[0]["hash"] for ranks in (1, 3)]
    assert results[0] != results[1]


@on_ranks(1, 3, 4)
def test_gradients_are_those_of_a_single_process(ranks: int):
    train(*pair(double(Net), deterministic=True), steps=2)
    if ranks == 4:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        train(*pair(double(Net), deterministic=True, mesh=mesh), steps=2)


@on_ranks(2)
def test_means_over_accumulated_micro_batches():
    reference, model = pair(double(Net), deterministic=True)
    one, many = differentiated(reference, dtensors=False), differentiated(model)
    batches = [batch(step, dtype=np.float64) for step in range(3)]
    expected = [sum(parts) for parts in zip(*(one(everything)[1] for everything, _ in batches))]
    gradients: Any = None
    for index, (_, own) in enumerate(batches):
        model.set_requires_gradient_sync(index == 2)
        _, gradients = many(own)
        if index < 2:
            assert not any(gradient.to_local().asnumpy().any() for gradient in gradients)
    same_gradients(model, gradients, reference, expected, 1e-12)
    for order in (1.0, 2.0, float("inf")):
        flat = np.concatenate([gradient.asnumpy().reshape(-1) for gradient in expected])
        norm = global_grad_norm(model.trainable_params(), order, gradients=gradients)
        close(norm.asnumpy(), np.linalg.norm(flat, order), f"norm {order}", 1e-12)
    # What waits can be dropped.
    model.set_requires_gradient_sync(False)
    many(batches[0][1])
    model.zero_grads()
    model.set_requires_gradient_sync(True)
    same_gradients(model, many(batches[1][1])[1], reference, one(batches[1][0])[1], 1e-12)


@on_ranks(4)
def test_accumulation_over_replicas():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    reference, model = pair(double(Net), deterministic=True, mesh=mesh)
    one, many = differentiated(reference, dtensors=False), differentiated(model)
    batches = [batch(step, dtype=np.float64) for step in range(3)]
    expected = [sum(parts) for parts in zip(*(one(everything)[1] for everything, _ in batches))]
    model.set_requires_all_reduce(False)
    many(batches[0][1])
    many(batches[1][1])
    model.set_requires_all_reduce(True)
    same_gradients(model, many(batches[2][1])[1], reference, expected, 1e-12)


class Recomputing(Net):
    reentrant = False

    def construct(self, x):
        x = self.first(x)
        for block in (*self.blocks, *(() if self.reentrant else self.blocks[:1])):
            x = mindspore.recompute(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class Reentrant(Recomputing):
    reentrant = True


class ReentrantTwice(Reentrant):
    def construct(self, x):
        return super().construct(mindspore.recompute(self.blocks[0], self.first(x), use_reentrant=True)[:, :5])


class RecomputingTwice(Recomputing):
    def construct(self, x):
        return super().construct(mindspore.recompute(self.blocks[0], self.first(x), use_reentrant=False)[:, :5])


@on_ranks(2)
def test_recomputation():
    for make in (Recomputing, Reentrant):
        train(*pair(double(make), deterministic=True), steps=2)
    _, model = pair(double(ReentrantTwice), deterministic=True)
    with pytest.raises(RuntimeError, match=r"got gradients after those of this backward pass were complete.*use_reent"):
        differentiated(model)(batch(dtype=np.float64)[1])
    train(*pair(double(RecomputingTwice), deterministic=True), steps=1)


class Rare(nn.Cell):
    """A block that some micro-batches skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = mint.nn.Linear(5, 4), mint.nn.Linear(2, 2)
        self.blocks = nn.CellList([mint.nn.Linear(4, 4), mint.nn.Linear(4, 4)])

    def construct(self, x, skip):
        x = self.first(x)
        return self.blocks[1](x if skip else self.blocks[0](x))


def rare(cell: nn.Cell, keep: Any = None) -> Any:
    def loss(x: Tensor, skip: bool) -> Any:
        if keep is not None:
            keep.append(cell(x, skip))
        return loss_of(cell(x, skip))

    return differentiated(cell, loss, dtensors=hasattr(cell, "_hsdp_group"))


@on_ranks(1, 2)
def test_a_group_that_some_micro_batches_skip():
    reference, model = pair(double(Rare), deterministic=True)
    one, many = rare(reference), rare(model)
    batches = [(*batch(step, dtype=np.float64), step != 3 and step != 1) for step in range(4)]
    expected = [sum(parts) for parts in zip(*(one(everything, skip)[1] for everything, _, skip in batches))]
    gradients: Any = None
    for index, (_, own, skip) in enumerate(batches):
        model.set_requires_gradient_sync(index == 3)
        _, gradients = many(own, skip)
    same_gradients(model, gradients, reference, expected, 1e-12)


@on_ranks(1, 2)
def test_sums_that_cannot_be_returned():
    reference, model = pair(double(Rare), deterministic=True)
    everything, own = batch(dtype=np.float64)
    run = rare(model)
    model.set_requires_gradient_sync(False)
    run(own, False)
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match=r"blocks.0 had gradients in earlier micro-batches of this step and none in"):
        run(own, True)
    one = rare(reference)
    expected = [sum(parts) for parts in zip(one(everything, True)[1], one(everything, False)[1])]
    model.set_requires_gradient_sync(False)
    run(own, True)
    model.set_requires_gradient_sync(True)
    same_gradients(model, run(own, False)[1], reference, expected, 1e-12)
    outputs: list[Any] = []
    with pytest.raises(RuntimeError, match=r"1 calls of Rare in forward got no gradient, so the backward pass is"):
        rare(model, outputs)(own, False)
    outputs.clear()
    same_gradients(model, run(own, False)[1], reference, one(everything, False)[1], 1e-12)
    outputs.append(model(own, False))  # outside of the differentiated function
    same_gradients(model, run(own, False)[1], reference, one(everything, False)[1], 1e-12)


@on_ranks(2)
def test_ranks_with_different_numbers_of_micro_batches():
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    reference, model = pair(double(Net), deterministic=True, mesh=mesh)
    own = batch(dtype=np.float64)[1]
    everything = np.stack(np.split(batch(dtype=np.float64)[0].asnumpy(), 4))
    _, expected = differentiated(reference, dtensors=False)(Tensor(everything.reshape(-1, everything.shape[-1])))
    differentiated(model)(own)  # a step in which they ran as many
    if world()[0]:
        model.set_requires_gradient_sync(False)
        differentiated(model)(own)
    model.set_requires_gradient_sync(True)
    with pytest.raises(ValueError, match=r"this rank ran [12] micro-batches since the last step, others from 1 to 2"):
        differentiated(model)(own)
    for last, part in enumerate(np.split(everything, 2)[world()[0]]):  # two each, consecutive ones
        model.set_requires_gradient_sync(last == 1)
        _, gradients = differentiated(model, lambda x: loss_of(model(x)) / 2)(Tensor(part))
    same_gradients(model, gradients, reference, expected, 1e-12)


@on_ranks(2)
def test_norms():
    model = shard(data_mesh(), deterministic=True)
    parameters = model.trainable_params()
    _, gradients = differentiated(model, lambda x, s: loss_of_micro_batch(model, x, s))(*micro_batch(0, 2))
    with pytest.raises(NotImplementedError, match=r"norm_type=3.0 is not the same for any number of ranks"):
        global_grad_norm(parameters, 3, gradients=gradients)
    flat = np.concatenate([whole(gradient).reshape(-1) for gradient in gradients])
    for order in (1, 2, float("inf")):
        close(global_grad_norm(parameters, order, gradients=gradients).asnumpy(), np.linalg.norm(flat, order), "norm")
    other = fully_shard(seeded(Twice), data_mesh())
    with pytest.raises(ValueError, match="some parameters are sharded with deterministic=True, some are not"):
        clip_grad_norm_([*parameters, *other.trainable_params()], 1.0, gradients=[*gradients, *gradients])
    more = differentiated(other, lambda x, s: loss_of_micro_batch(other, x, s))(*micro_batch(0, 2))[1]
    for cell, found in ((model, gradients), (other, more)):  # once for each kind
        norm = clip_grad_norm_(cell.trainable_params(), 1e-3, gradients=found)
        assert norm > 1e-3 and abs(global_grad_norm(cell.trainable_params(), gradients=found).item() / 1e-3 - 1) < 1e-2
