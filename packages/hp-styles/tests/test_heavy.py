"""Heavy operations in frames, in models under styles: DTensors all the way, plain parts between the layers, both."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform.frames import frame
from hp_platform.torch.heavy import DeferredGradients, KeptOutputs, linear, mark
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(self.up(x).tanh()))


def plain() -> tuple[Mlp, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Mlp().to(device_type(), torch.float64)
    x = torch.linspace(-1, 1, 4 * 6, dtype=torch.float64, device=device_type()).view(4, 6).requires_grad_()
    return model, x, model(x)


def compare(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient, expected[name].grad, rtol=1e-12, atol=1e-12, msg=name)


@on_ranks(2)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("kept", [None, ["up"], ["down", "out"]])
def test_put_off_and_handed_back(local: bool, kept: list[str] | None) -> None:
    reference, x, expected = plain()
    expected.square().sum().backward()
    model, input = copy.deepcopy(reference), x.detach().clone().requires_grad_()
    model.zero_grad()
    mesh = init_device_mesh(device_type(), (2,))
    plan = {
        "up": ColwiseParallel(use_local_output=local),
        "down": RowwiseParallel(use_local_output=local),
        "out": ColwiseParallel(output_layouts=Replicate(), use_local_output=True),
    }
    parallelize_module(model, mesh, plan)
    assert mark(model) == ["up", "down", "out"]
    deferred = DeferredGradients()
    with frame(weights=deferred):
        if kept is None:
            out = model(input)
        else:
            out = checkpoint(model, input, use_reentrant=False, context_fn=KeptOutputs(kept).contexts)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    torch.testing.assert_close(input.grad, x.grad, rtol=1e-12, atol=1e-12)
    assert len(deferred) == 3 and all(parameter.grad is None for parameter in model.parameters())
    deferred.run()
    compare(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("x_placement", [Replicate(), Shard(0), Shard(1)])
@pytest.mark.parametrize("w_placement", [Replicate(), Shard(0), Shard(1)])
def test_a_linear_map_of_dtensors(x_placement, w_placement) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    torch.manual_seed(0)
    leaves = [torch.randn(s, dtype=torch.float64, device=device_type()) for s in ((5, 6), (3, 6), (3,))]
    whole = [leaf.clone().requires_grad_() for leaf in leaves]
    expected = nn.functional.linear(*whole)
    expected.square().sum().backward()
    placements = [x_placement, w_placement, Shard(0) if w_placement == Shard(0) else Replicate()]
    for put_off in (False, True):
        x, weight, bias = (
            distribute_tensor(leaf, mesh, [placement]).requires_grad_()
            for leaf, placement in zip(leaves, placements, strict=True)
        )
        deferred = DeferredGradients()
        with frame(weights=deferred if put_off else None):
            out = linear(x, weight, bias)
        assert out.placements == nn.functional.linear(x, weight, bias).placements
        torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        out.square().sum().backward()
        assert (weight.grad is None) is put_off and (bias.grad is None) is put_off
        deferred.run()
        for own, leaf in zip((x, weight, bias), whole, strict=True):
            assert own.grad.placements == own.placements
            torch.testing.assert_close(own.grad.full_tensor(), leaf.grad, rtol=1e-12, atol=1e-12)
