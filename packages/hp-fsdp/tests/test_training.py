"""Gradients and weights are those of a single process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_models import (
    Net,
    batch,
    close,
    data_mesh,
    groups_of,
    loss_of,
    pair,
    same_gradients,
    same_weights,
    seeded,
    train,
)
from torch import nn

from hp_dtensor import init_device_mesh
from hp_fsdp import clip_grad_norm_, fully_shard, hsdp_sync_stream
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


@pytest.mark.smoke
@on_ranks(1, 2, 3, 4, thorough=(8,))
@pytest.mark.parametrize("reshard", [True, False])
def test_a_group_for_each_block(reshard: bool):
    train(*pair(reshard_after_forward=reshard))


@on_ranks(1, 3)
def test_one_group_for_all():
    reference = seeded(Net)
    train(reference, fully_shard(seeded(Net), data_mesh()))


@on_ranks(2)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_torch_optimizers_work_on_the_sharded_parameters(name: str):
    train(*pair(), make=OPTIMIZERS[name], steps=2)


@on_ranks(2)
def test_the_default_mesh_is_all_ranks():
    reference, model = seeded(Net), fully_shard(seeded(Net))
    assert next(model.parameters()).device_mesh.shape == (2,)
    train(reference, model, steps=1)


@on_ranks(2, 4, thorough=(8,))
def test_a_second_axis_replicates(ranks: int):
    mesh = init_device_mesh(device_type(), (2, ranks // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    train(*pair(mesh=mesh))


@on_ranks(4)
def test_shards_accumulate_until_they_are_reduced_over_the_replicas():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    reference, model = pair(mesh=mesh)
    for step in range(2):
        whole, own = batch(step)
        loss_of(reference(whole)).backward()
        model.set_requires_all_reduce(step == 1)
        loss_of(model(own)).backward()
    same_gradients(model, reference)


@on_ranks(2, 3)
@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_accumulate_without_communication(reshard: bool):
    reference, model = pair()
    for step in range(3):
        whole, own = batch(step)
        loss_of(reference(whole)).backward()
        model.set_requires_gradient_sync(step == 2)
        model.set_reshard_after_backward(reshard or step == 2)
        loss_of(model(own)).backward()
        if step < 2:
            assert all(p.sharded.grad is None for group in groups_of(model) for p in group.parameters)
    same_gradients(model, reference)


@on_ranks(1, 2)
def test_gradients_accumulate_with_communication():
    reference, model = pair()
    for step in range(3):
        whole, own = batch(step)
        loss_of(reference(whole)).backward()
        model.set_is_last_backward(step == 2)
        loss_of(model(own)).backward()
    same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(to_none: bool):
    reference, model = pair()
    for step in range(2):
        for net in (reference, model):
            net.zero_grad(set_to_none=to_none)
        whole, own = batch(step)
        loss_of(reference(whole)).backward()
        loss_of(model(own)).backward()
    same_gradients(model, reference)


@on_ranks(2)
def test_gradients_can_be_summed_instead():
    reference, model = pair()
    model.set_reduce_op_type("sum")
    whole, own = batch()
    (2 * loss_of(reference(whole))).backward()
    loss_of(model(own)).backward()
    same_gradients(model, reference)


@on_ranks(2)
def test_inputs_that_need_gradients_get_them():
    reference, model = pair()
    whole, own = batch()
    whole.requires_grad_()
    own = own.detach().requires_grad_()
    loss_of(reference(whole)).backward()
    loss_of(model(own)).backward()
    rank = torch.distributed.get_rank()
    assert torch.allclose(whole.grad.chunk(2)[rank] * 2, own.grad, atol=1e-12)
    same_gradients(model, reference)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(5, 6, batch_first=True)])
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks[0](x[:, None])[0][:, 0])


@on_ranks(2)
def test_modules_that_keep_lists_of_their_parameters():
    train(*pair(Recurrent), steps=2)


@on_ranks(1, 2)
def test_an_optimizer_in_backward():
    reference, model = pair()
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for net in (reference, model):
        for parameter in net.parameters():
            optimizers[parameter] = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(step)
    for index in range(2):
        whole, own = batch(index)
        loss_of(reference(whole)).backward()
        loss_of(model(own)).backward()
    same_weights(model, reference)


@on_ranks(1, 3, 4)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["", "deterministic"])
def test_gradients_are_divided_by_a_factor(ranks: int, options: dict[str, Any]):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("r", "s")) if ranks == 4 else None
    reference, model = pair(mesh=mesh, **options)
    model.set_gradient_divide_factor(6.0, recurse=True)
    for step in range(2):  # two micro-batches
        whole, own = batch(step)
        model.set_requires_gradient_sync(step == 1)
        (loss_of(reference(whole)) * ranks / 6).backward()
        loss_of(model(own)).backward()
    same_gradients(model, reference)
    for net in (model, reference):
        net.zero_grad()
    model.set_reduce_op_type("avg")
    whole, own = batch(2)
    loss_of(reference(whole)).backward()
    loss_of(model(own)).backward()
    same_gradients(model, reference)
    with pytest.raises(ValueError, match="factor must be a finite number above 0, got 0"):
        model.set_gradient_divide_factor(0)


@on_ranks(4)
def test_gradients_under_way_of_several_models():
    """What is waited for may start collectives, so in an order that all ranks share."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("r", "s"))
    kept = [object() for _ in range(1000 * torch.distributed.get_rank())]  # other addresses on each rank
    pairs = [pair(mesh=mesh) for _ in range(3)]
    for scale, (reference, model) in enumerate(pairs, 1):
        whole, own = batch()
        (scale * loss_of(reference(whole))).backward()
        model.set_is_last_backward(False)
        (scale * loss_of(model(own))).backward()
        model.set_gradient_divide_factor(7.0, recurse=True)  # of later passes
    hsdp_sync_stream()
    for reference, model in pairs:
        same_gradients(model, reference)
    assert len(kept) == 1000 * torch.distributed.get_rank()


@on_ranks(2)
def test_the_norm_waits_for_gradients_under_way():
    reference, model = pair()
    whole, own = batch()
    loss_of(reference(whole)).backward()
    model.set_is_last_backward(False)
    loss_of(model(own)).backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1), "norm")
    same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("by", ["call", "read", "zero"])
def test_gradients_under_way_are_waited_for(by: str):
    reference, model = pair()
    whole, own = batch()
    loss_of(reference(whole)).backward()
    model.set_is_last_backward(False)
    loss_of(model(own)).backward()
    context = groups_of(model)[0].context
    assert context.reductions
    if by == "zero":  # else they would join the next step's
        for net, x in ((reference, whole), (model, own)):
            net.zero_grad()
            loss_of(net(2 * x)).backward()
    if by == "call":
        hsdp_sync_stream()
        assert not context.reductions
    same_gradients(model, reference)
