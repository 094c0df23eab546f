"""Sharded Cells train as a single process does."""

from __future__ import annotations

import mindspore
import pytest
from fsdp_cells import (
    Net,
    batch,
    close,
    data_mesh,
    differentiated,
    loss_of,
    pair,
    same_gradients,
    same_weights,
    seeded,
    sgd,
    train,
    whole,
    world,
)
from mindspore import mint, nn
from mindspore.experimental.optim import AdamW

from hp_dtensor import DTensor, RaggedShard, SkipDTensorDispatch, init_device_mesh
from hp_fsdp import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard, hsdp_sync_stream
from hp_testing import device_type, on_ranks


@on_ranks(1, 2, 4)
def test_training_equals_a_single_process():
    reference, model = pair()
    before = list(model.trainable_params())
    train(reference, model)
    assert all(a is b for a, b in zip(before, model.trainable_params()))


@on_ranks(2, 4)
def test_five_rows_over_the_ranks():
    reference, model = seeded(lambda: mint.nn.Linear(5, 5)), seeded(lambda: mint.nn.Linear(5, 5))
    fully_shard(model, data_mesh())
    weight = model.weight
    assert isinstance(weight, DTensor) and tuple(weight.shape) == (5, 5)
    (placement,) = weight.placements
    assert isinstance(placement, RaggedShard) and sum(placement.units) == 25
    assert tuple(weight.to_local().shape) == (placement.units[world()[0]],)
    train(reference, model, steps=2)


@on_ranks(4)
def test_replicated_and_sharded():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    reference, model = pair(mesh=mesh)
    train(reference, model)


@on_ranks(2)
def test_named_axes_of_a_whole_mesh():
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp", "tp"))
    reference, model = pair(mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert model._hsdp_group.axes.shard_size == 2
    train(reference, model, steps=2)
    with pytest.raises(ValueError, match=r"dp_mesh_dims names \['no'\], the mesh has \('dp', 'tp'\)"):
        fully_shard(seeded(Net), mesh, dp_mesh_dims=DataParallelMeshDims(shard="no"))


@on_ranks(2)
def test_adamw_equals_a_single_process():
    def make(cell: nn.Cell):
        with SkipDTensorDispatch():
            optimizer = AdamW(cell.trainable_params(), lr=0.02)

        def step(gradients):
            with SkipDTensorDispatch():
                optimizer(gradients)

        return step

    reference, model = pair(lambda: Net(1))
    train(reference, model, make=make, steps=2)


@on_ranks(2)
def test_value_and_grad_of_mindspore_itself():
    reference, model = pair()
    everything, own = batch()
    loss, gradients = differentiated(model, dtensors=False)(own)
    _, expected = differentiated(reference, dtensors=False)(everything)
    for parameter, gradient, other in zip(model.trainable_params(), gradients, expected):
        assert type(gradient) is mindspore.Tensor
        local = DTensor.from_local(gradient, parameter.device_mesh, parameter.placements, shape=parameter.shape)
        close(whole(local), other.asnumpy(), parameter.name)
    # A Cell that is differentiated itself.
    output = mindspore.value_and_grad(model, None, model.trainable_params())
    assert output(own)[1][0].shape == gradients[0].shape
    close(output(own)[1][-1].asnumpy().sum(), 12.0 * tuple(output(own)[1][-1].shape)[0], "gradient of a sum")
    both = mindspore.value_and_grad(lambda x: loss_of(model(x)), 0, model.trainable_params())(own)
    assert both[0] == loss and both[1][0].shape == own.shape


@on_ranks(2)
@pytest.mark.parametrize("keep", [False, True])
def test_accumulation_without_communication(keep: bool):
    reference, model = pair()
    model.set_reshard_after_backward(not keep)
    one, many = differentiated(reference, dtensors=False), differentiated(model)
    batches = [batch(step) for step in range(3)]
    expected = [sum(parts) for parts in zip(*(one(everything)[1] for everything, _ in batches))]
    model.set_requires_gradient_sync(False)
    for _, own in batches[:2]:
        _, waiting = many(own)
        assert all(not whole(gradient).any() for gradient in waiting)
    model.set_requires_gradient_sync(True)
    _, gradients = many(batches[2][1])
    same_gradients(model, gradients, reference, expected)
    # What waits can be dropped.
    model.set_requires_gradient_sync(False)
    many(batches[0][1])
    model.zero_grads()
    model.set_requires_gradient_sync(True)
    same_gradients(model, many(batches[2][1])[1], reference, one(batches[2][0])[1])
    update = sgd(model)
    update(gradients)
    sgd(reference)(expected)
    same_weights(model, reference)


@on_ranks(4)
def test_accumulation_over_replicas():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    reference, model = pair(mesh=mesh)
    one, many = differentiated(reference, dtensors=False), differentiated(model)
    batches = [batch(step) for step in range(2)]
    expected = [sum(parts) for parts in zip(*(one(everything)[1] for everything, _ in batches))]
    model.set_requires_all_reduce(False)
    many(batches[0][1])
    model.set_requires_all_reduce(True)
    same_gradients(model, many(batches[1][1])[1], reference, expected)


@on_ranks(2)
def test_sum_instead_of_mean():
    reference, model = pair()
    model.set_reduce_op_type("sum")
    everything, own = batch()
    expected = [gradient * 2.0 for gradient in differentiated(reference, dtensors=False)(everything)[1]]
    same_gradients(model, differentiated(model)(own)[1], reference, expected)


@on_ranks(2)
def test_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=mindspore.float16, reduce_dtype=mindspore.float32)
    reference, model = pair(mp_policy=policy)
    everything, own = batch()
    seen = []
    model.first.register_forward_hook(lambda cell, inputs, output: seen.append(output.dtype))
    _, gradients = differentiated(model, lambda x: loss_of(model(x).astype(mindspore.float32)))(own)
    assert seen == [mindspore.float16]
    assert all(gradient.dtype == mindspore.float32 for gradient in gradients)
    same_gradients(model, gradients, reference, differentiated(reference, dtensors=False)(everything)[1], 1e-2)
    single = seeded(lambda: mint.nn.Linear(5, 5))
    fully_shard(single, data_mesh(), mp_policy=MixedPrecisionPolicy(mindspore.float16, output_dtype=mindspore.float32))
    assert single(own).dtype == mindspore.float32


@on_ranks(1, 2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_are_divided_by_a_factor(ranks: int, deterministic: bool):
    reference, model = pair(deterministic=deterministic)
    model.set_gradient_divide_factor(6.0, recurse=True)
    everything, own = batch()
    _, gradients = differentiated(model)(own)
    _, expected = mindspore.value_and_grad(
        lambda x: loss_of(reference(x)) * ranks / 6.0, None, reference.trainable_params()
    )(everything)
    same_gradients(model, gradients, reference, expected)
    hsdp_sync_stream()  # nothing is under way
