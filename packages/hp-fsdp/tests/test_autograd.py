"""What else is done with gradients: penalties, gradients of chosen tensors, scaled losses, closures."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fsdp_models import Net, batch, close, data_mesh, loss_of, pair, same_weights, seeded, train
from torch import nn

from hp_dtensor import init_device_mesh
from hp_fsdp import MixedPrecisionPolicy, clip_grad_norm_, full_state_dict, fully_shard
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device


def penalized(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    output = net(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return loss_of(output) + gradient.pow(2).sum(-1).mean()


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_gradient_penalty(reshard: bool):
    reference, model = pair(reshard_after_forward=reshard)
    train(reference, model, run=penalized, steps=2)


@on_ranks(2)
def test_saliency_leaves_no_gradients():
    reference, model = pair()
    whole, own = batch()
    found = []
    for net, x in ((reference, whole), (model, own)):
        x = x.clone().requires_grad_()
        found.append(torch.autograd.grad(net(x).sum(), x)[0])
    close(found[1], found[0].chunk(2)[torch.distributed.get_rank()], "saliency")
    assert all(parameter.grad is None for parameter in model.parameters())
    train(reference, model, steps=1)


@on_ranks(2)
def test_gradients_of_sharded_parameters():
    _, model = pair()
    loss = loss_of(model(batch()[1]))
    for options in ({}, {"allow_unused": True}):
        with pytest.raises(RuntimeError, match="is a parameter of fully_shard"):
            torch.autograd.grad(loss, list(model.parameters()), **options)
    for backward in (loss.backward, lambda inputs: torch.autograd.backward([loss], inputs=inputs)):
        with pytest.raises(RuntimeError, match=r"is a parameter of fully_shard.* Call backward\(\) without inputs"):
            backward(inputs=list(model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks(2)
def test_a_graph_of_reduced_gradients():
    """What the errors name is a gradient penalty: by inputs, and not of a deterministic model."""
    for options, text in (
        ({}, r"reduced gradients have no graph.*torch.autograd.grad\(outputs, inputs, create_graph=True\)"),
        ({"deterministic": True}, "second pass would count as a micro-batch.*Shard it without deterministic=True"),
    ):
        _, model = pair(**options)
        with pytest.raises(NotImplementedError, match=text):
            if options:
                penalized(model, batch()[1]).backward()
            else:
                loss_of(model(batch()[1])).backward(create_graph=True)
    train(*pair(), run=penalized, steps=1)


@on_ranks(2)
@pytest.mark.parametrize("waits", [True, False])
def test_a_scaled_loss(waits: bool):
    """Also where reductions are still under way when the scaler reads the gradients."""
    reference, model = pair()
    model.set_is_last_backward(waits)
    scalers = [torch.amp.GradScaler(device_type(), init_scale=2.0**4, growth_interval=2) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (reference, model)]
    for step in range(4):
        for net, x, scaler, optimizer in zip((reference, model), batch(step), scalers, optimizers, strict=True):
            loss = loss_of(net(x))
            if step == 1:  # infinite on the last rank alone
                loss = loss + net(x)[-1, -1] * (
                    float("inf") if torch.distributed.get_rank() == 1 or net is reference else 1
                )
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip = clip_grad_norm_ if net is model else torch.nn.utils.clip_grad_norm_
            clip(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale(), step
        same_weights(model, reference)


@on_ranks(2)
def test_a_loss_scaled_for_fp16() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = pair(mp_policy=policy)[1].float()
    scaler = torch.amp.GradScaler(device_type(), init_scale=2.0**10, growth_interval=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, moved = [], []
    for step in range(4):
        before = full_state_dict(model)
        x = batch(step)[1].half()
        if step == 1 and torch.distributed.get_rank() == 1:
            x = x * 6e4  # beyond fp16 in this rank's forward alone
        output = model(x)
        assert output.dtype is torch.float16
        scaler.scale(output.float().sin().mean() if step != 1 else output.float().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(value, before[name]) for name, value in full_state_dict(model).items()))
        assert all(value.isfinite().all() for value in full_state_dict(model).values())
    assert scales == [1024.0, 512.0, 512.0, 512.0] and moved == [True, False, True, True]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale


@on_ranks(1, 2)
def test_lbfgs_with_a_parameter_of_no_dims():
    reference, model = seeded(Scaled), fully_shard(seeded(Scaled), data_mesh())
    for net, x in zip((reference, model), batch(), strict=True):
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

        def closure(net: Any = net, x: Any = x, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net(x))
            loss.backward()
            if net is model:
                loss = loss.detach().clone()
                get_platform().collectives.all_reduce(loss, group=data_mesh().get_group(0))
                loss /= torch.distributed.get_world_size()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    same_weights(model, reference, 1e-8)


@on_ranks(2)
def test_ddp_around_sharded_modules():
    _, model = pair()
    for net in (model, nn.Sequential(model), nn.Sequential(nn.Linear(5, 5).to(device_type(), torch.float64), model)):
        with pytest.raises(TypeError, match="DistributedDataParallel around"):
            torch.nn.parallel.DistributedDataParallel(net)
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    train(*pair(mesh=mesh), steps=1)


@on_ranks(2)
def test_replicate_around_sharded_modules() -> None:
    _, model = pair()
    outer = torch.distributed._composable.replicate(nn.Sequential(model))
    with pytest.raises(TypeError, match="replicate around modules of fully_shard"):
        outer(batch()[1])  # before it broadcasts rank 0's shards over the others'


@on_ranks(2)
def test_weight_norm_after_wrapping():
    _, model = pair()
    with pytest.raises(RuntimeError, match="before fully_shard"):
        torch.nn.utils.parametrizations.weight_norm(model.first)
        model(batch()[1])
    reference = seeded(Net)
    torch.nn.utils.parametrizations.weight_norm(reference.first)
    model = fully_shard(copy.deepcopy(reference), data_mesh())
    train(reference, model, steps=2)
