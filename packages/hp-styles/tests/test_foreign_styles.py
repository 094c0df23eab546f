"""Styles that were written for torch's ParallelStyle, and modules that have no sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_styles import ColwiseParallel, ParallelStyle, SequenceParallel, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def mesh_of_two() -> Any:
    return init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device_type())


def linear(inside: int, outside: int) -> nn.Linear:
    made = nn.Linear(inside, outside, device=device_type(), dtype=torch.float64)
    made.weight.data, made.bias.data = rand(outside, inside), rand(outside)
    return made


class ByRows(ParallelStyle):
    """As torch's own are written."""

    def __init__(self, *, output_layouts: Any) -> None:
        self.output_layouts = output_layouts

    @staticmethod
    def _prepare_input_fn(mod: Any, inputs: Any, device_mesh: Any) -> Any:
        x = inputs[0]
        return x if isinstance(x, DTensor) else DTensor.from_local(x, device_mesh, [Replicate()])

    def _partition_linear_fn(self, name: str, module: Any, device_mesh: Any) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            placed = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(key, nn.Parameter(placed))

    def _prepare_output_fn(self, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        return outputs.redistribute(placements=[self.output_layouts]).to_local()

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        return distribute_module(
            module, device_mesh, self._partition_linear_fn, self._prepare_input_fn, self._prepare_output_fn
        )


@on_ranks(2)
def test_a_style_with_torchs_name_for_apply_shards_and_has_the_gradients_of_one_process() -> None:
    mesh, layer, whole = mesh_of_two(), linear(4, 6), linear(4, 6)
    assert parallelize_module(nn.Sequential(layer), mesh, {"0": ByRows(output_layouts=Replicate())})[0] is layer
    assert layer.weight.placements == (Shard(0),)
    x = rand(3, 4)
    want = whole(x)
    torch.testing.assert_close(layer(x), want, rtol=1e-12, atol=1e-12)
    layer(x).square().sum().backward()
    want.square().sum().backward()
    assert whole.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad.full_tensor(), whole.weight.grad, rtol=1e-12, atol=1e-12)


class Noted(ColwiseParallel):
    def _apply(self, module: Any, device_mesh: Any) -> Any:
        module.noted = True
        return super()._apply(module, device_mesh)


class NotedTwice(Noted):
    def apply(self, module: Any, device_mesh: Any) -> Any:
        module.twice = True
        return super().apply(module, device_mesh)


@on_ranks(2)
def test_both_names_call_each_others_overrides() -> None:
    mesh, layer = mesh_of_two(), linear(4, 6)
    parallelize_module(layer, mesh, NotedTwice())
    assert layer.noted and layer.twice and layer.weight.placements == (Shard(0),)
    other = linear(4, 6)
    assert Noted()._apply(other, mesh) is other and Noted().apply(linear(4, 6), mesh).noted
    assert other.weight.placements == (Shard(0),)


def test_a_step_of_torchs_styles_that_nobody_would_call_is_refused() -> None:
    text = (
        r"Late overrides _prepare_output_fn, which a style of torch calls in its _apply, and ColwiseParallel\.apply of"
        r" hp_styles does not; override apply\(self, module, device_mesh\)"
    )
    with pytest.raises(TypeError, match=text):
        type("Late", (ColwiseParallel,), {"_prepare_output_fn": lambda *args: None})
    type("Fine", (ByRows,), {"_prepare_output_fn": lambda *args: None})  # which calls it
    type("Part", (ParallelStyle,), {"_prepare_output_fn": lambda *args: None})  # whose subclass may


@on_ranks(2)
def test_what_derives_from_torchs_styles_is_told_what_to_derive_from() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel as Torchs
    from torch.distributed.tensor.parallel import ParallelStyle as Base

    for base, name in ((Torchs, "ColwiseParallel"), (Base, "ParallelStyle")):
        style = type("Mine", (base,), {"_apply": lambda self, module, mesh: module})()
        text = rf"has Mine, derived from torch's own .*\.{name}, .* from hp_styles import {name}; derive it from that"
        for plan in (style, {"": style}):
            with pytest.raises(TypeError, match=text):
                parallelize_module(linear(2, 2), mesh_of_two(), plan)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu()


@on_ranks(2)
@pytest.mark.parametrize(
    ("module", "shape", "size"),
    [
        (nn.BatchNorm2d(6), (2, 6, 4, 4), 6),
        (nn.BatchNorm1d(6, affine=False), (2, 6, 5), 6),
        (nn.GroupNorm(2, 6), (2, 6, 4, 4), 6),
        (nn.InstanceNorm2d(6), (2, 6, 4, 4), 6),
        (nn.Conv1d(4, 6, 3), (2, 4, 8), 4),
        (ConvNet(), (2, 4, 8, 8), 4),
        (nn.Sequential(nn.ReLU(), ConvNet()), (2, 4, 8, 8), 4),
        (nn.LayerNorm(6), (4, 6), 6),
        (nn.RMSNorm(6), (4, 6), 6),
        (nn.Linear(6, 3), (4, 6), 6),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("style", ["sequence", SequenceParallel()], ids=["name", "class"])
def test_sequence_on_what_has_no_sequence_is_refused_before_anything_is_sent(
    module: Any, shape: tuple[int, ...], size: int, style: Any
) -> None:
    module = copy.deepcopy(module).double().to(device_type())
    parallelize_module(module, mesh_of_two(), style)
    name = type(module).__name__
    text = rf"SequenceParallel on {name}: dim 1 of a plain input .* it has all {size} channels or features"
    with count_collectives() as counts, pytest.raises(ValueError, match=text):
        module(rand(*shape))
    assert not counts


@on_ranks(2)
def test_a_batch_norm_on_parts_of_the_samples_is_that_of_one_process() -> None:
    mesh, x = mesh_of_two(), rand(4, 6, 3, 3)
    norm, whole = nn.BatchNorm2d(6).double().to(device_type()), nn.BatchNorm2d(6).double().to(device_type())
    parallelize_module(norm, mesh, SequenceParallel(sequence_dim=0))
    got, want = norm(x.chunk(2)[mesh.get_local_rank()]), whole(x)
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norm.running_mean.full_tensor(), whole.running_mean, rtol=1e-10, atol=1e-10)
    got.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(norm.weight.grad.full_tensor(), whole.weight.grad, rtol=1e-10, atol=1e-10)
