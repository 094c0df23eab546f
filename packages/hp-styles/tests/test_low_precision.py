"""torchao's linear layers under styles: what each rank casts to eight bits is what one process does."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, init_device_mesh
from hp_styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from hp_testing import device_type, on_ranks

pytest.importorskip("torchao", reason="needs torchao: nox -s low_precision")

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
TOKENS = 48


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 96)
        self.down = nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def converted(model: nn.Module, recipe: str, *, emulate: bool = True) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(model, config=config)


def pair(recipe: str, styles: dict[str, ParallelStyle], **options: Any) -> tuple[nn.Module, nn.Module]:
    """One process's model, and the same over all ranks; whole numbers, whose sums are exact in float32."""
    torch.manual_seed(0)
    reference = Mlp().to(device_type())
    model = copy.deepcopy(reference)
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(converted(model, recipe, **options), mesh, styles)
    return converted(reference, recipe, **options), model


def run(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: Any = net(x)
    output = output.full_tensor() if isinstance(output, DTensor) else output
    output.square().mean().backward()
    return output.detach()


def largest(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of a gradient, over its largest element."""
    differences = []
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters()):
        gradient: Any = parameter.grad
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        assert gradient is not None and expected.grad is not None, name
        differences.append(((gradient - expected.grad).abs().max() / expected.grad.abs().max()).item())
    return max(differences)


PLANS = {
    "colwise-rowwise": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    },
    "gathered": {
        "up": ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
        "down": RowwiseParallel(input_layouts=Replicate()),
    },
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2, 4)
def test_a_run_is_that_of_one_process(recipe: str, plan: str):
    """Each operand is cast to the same bits; sums over ranks round in another order, by float32's figure."""
    reference, model = pair(recipe, PLANS[plan])
    x = torch.randn(TOKENS, 32, device=device_type())
    own = x.chunk(dist.get_world_size())[dist.get_rank()] if plan == "sequence" else x
    output, expected = run(model, own), run(reference, x)
    assert (output - expected).abs().max() <= 4e-6 * expected.abs().max()
    assert largest(model, reference) <= 4e-6


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2, 3)
def test_no_bit_differs_where_nothing_is_summed_over_ranks(recipe: str):
    """Output features are cut, and each output is one rank's product."""
    styles = {"up": ColwiseParallel(output_layouts=Replicate())}
    reference, model = pair(recipe, styles)
    x = torch.randn(TOKENS, 32, device=device_type())
    for net in (reference, model):
        net.down = nn.Identity()
    assert torch.equal(run(model, x), run(reference, x))
    weight: Any = model.up.weight.grad
    assert torch.equal(weight.full_tensor(), reference.up.weight.grad)


@on_ranks(2)
def test_the_devices_kernel():
    """Its products are rounded to bfloat16 where scales are of rows."""
    for recipe, limit in (("tensorwise", 4e-6), ("rowwise", 2e-2)):
        reference, model = pair(recipe, PLANS["colwise-rowwise"], emulate=False)
        x = torch.randn(TOKENS, 32, device=device_type())
        output, expected = run(model, x), run(reference, x)
        assert (output - expected).abs().max() <= limit * expected.abs().max()


@on_ranks(2)
def test_a_replicated_layer_of_a_sequence_in_parts():
    """Its weight is whole on each rank; the scales of what is multiplied are of the whole sequence."""
    names = {"down": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))}
    reference, model = pair("tensorwise", {"up": SequenceParallel(sequence_dim=0), **names})
    x = torch.randn(TOKENS, 32, device=device_type())
    up = DTensor.from_local(x.chunk(2)[dist.get_rank()], model.up.weight.device_mesh, [Shard(0)])
    output, expected = model.up(up), reference.up(x)
    assert torch.equal(output.full_tensor(), expected)
    output.full_tensor().square().mean().backward()
    expected.square().mean().backward()
    gradient = model.up.weight.grad.full_tensor()
    assert (gradient - reference.up.weight.grad).abs().max() <= 4e-6 * reference.up.weight.grad.abs().max()


@on_ranks(2)
def test_what_is_not_supported_is_refused():
    styles = {"down": RowwiseParallel(output_layouts=Shard(0), async_tensor_parallel="auto")}
    with pytest.raises(NotImplementedError, match="Float8Linear.*a forward of its own.*async_tensor_parallel"):
        pair("rowwise", styles)
    _, model = pair("rowwise", {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"Float8Linear: a plain tensor of shape \(4, 32\) meets a weight"):
        model.up.forward(torch.ones(4, 32, device=device_type()))
