"""The layouts of what styles take in and hand on: values and gradients of one device, of outputs in every form."""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import get_platform
from hp_styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from hp_testing import device_type, on_ranks

R, P = Replicate(), Partial()


def _linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, dtype=torch.float64, device=device_type())


def _mesh() -> Any:
    return init_device_mesh(device_type(), (torch.distributed.get_world_size(),), ("tp",))


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device_type())


@on_ranks(2, 3)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("out", [Shard(-1), R, Shard(0)], ids=str)
def test_column_outputs(out: Any, local: bool, ranks: int) -> None:
    mesh = _mesh()
    linear = _linear(6, 4)
    plain, x = copy.deepcopy(linear), _rand(6, 4)
    parallelize_module(linear, mesh, ColwiseParallel(output_layouts=out, use_local_output=local))
    x0, x1 = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, got = plain(x0), linear(x1)
    expected = want if out == R else want.chunk(ranks, out.dim)[mesh.get_local_rank()]
    assert type(got) is (torch.Tensor if local else DTensor)
    torch.testing.assert_close(got if local else got.to_local(), expected)
    want.square().sum().backward()
    loss = got.square().sum()
    if local and out != R:  # every rank has its own part of the loss
        loss = DTensor.from_local(loss, mesh, [P])
    loss.backward()
    torch.testing.assert_close(x1.grad, x0.grad)
    torch.testing.assert_close(linear.weight.grad.full_tensor(), plain.weight.grad)
    torch.testing.assert_close(linear.bias.grad.full_tensor(), plain.bias.grad)


@on_ranks(2, 3)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("given", [Shard(-1), R, "DTensor"], ids=str)
@pytest.mark.parametrize("out", [R, Shard(1)], ids=str)
def test_row_inputs_and_outputs(given: Any, out: Any, local: bool, ranks: int) -> None:
    mesh = _mesh()
    linear = _linear(4, 6)
    plain, x = copy.deepcopy(linear), _rand(2, 6, 6)
    layouts = {} if given == "DTensor" else {"input_layouts": given}
    parallelize_module(linear, mesh, RowwiseParallel(output_layouts=out, use_local_output=local, **layouts))
    x0 = x.clone().requires_grad_()
    if given == "DTensor":
        mine = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    else:
        mine = (x if given == R else x.chunk(ranks, -1)[mesh.get_local_rank()]).clone().requires_grad_()
    want, got = plain(x0), linear(mine)
    expected = want if out == R else want.chunk(ranks, 1)[mesh.get_local_rank()]
    assert type(got) is (torch.Tensor if local else DTensor)
    torch.testing.assert_close(got if local else got.to_local(), expected)
    want.square().sum().backward()
    loss = got.square().sum()
    (DTensor.from_local(loss, mesh, [P]) if local and out != R else loss).backward()
    torch.testing.assert_close(linear.weight.grad.full_tensor(), plain.weight.grad)
    torch.testing.assert_close(linear.bias.grad.full_tensor(), plain.bias.grad)
    grad = mine.grad.full_tensor() if given == "DTensor" else mine.grad
    torch.testing.assert_close(grad, x0.grad if given != Shard(-1) else x0.grad.chunk(ranks, -1)[mesh.get_local_rank()])


@pytest.mark.device
@on_ranks(2, 3)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_sequence_parallel_norms(dim: int, local: bool, ranks: int) -> None:
    mesh = _mesh()
    norm = nn.LayerNorm(4, dtype=torch.float64, device=device_type())
    plain, x = copy.deepcopy(norm), _rand(6, 6, 4)
    assert parallelize_module(norm, mesh, SequenceParallel(sequence_dim=dim, use_local_output=local)) is norm
    part = x.chunk(ranks, dim)[mesh.get_local_rank()]
    want, got = plain(x), norm(part)
    assert type(got) is (torch.Tensor if local else DTensor)
    torch.testing.assert_close(got if local else got.to_local(), want.chunk(ranks, dim)[mesh.get_local_rank()])
    want.pow(3).sum().backward()
    loss = got.pow(3).sum()
    (DTensor.from_local(loss, mesh, [P]) if local else loss).backward()
    torch.testing.assert_close(norm.weight.grad.full_tensor(), plain.weight.grad)
    torch.testing.assert_close(norm.bias.grad.full_tensor(), plain.bias.grad)
    uneven = _rand(2, 5, 4) if dim else _rand(5, 2, 4)
    got = norm(distribute_tensor(uneven, mesh, [R]))
    whole = got if local else got.full_tensor()
    torch.testing.assert_close(
        whole, plain(uneven).chunk(ranks, dim)[mesh.get_local_rank()] if local else plain(uneven)
    )


@on_ranks(2)
def test_one_input_read_in_two_ways_is_two_values() -> None:
    mesh = _mesh()
    x = _rand(4, 6) + mesh.get_local_rank()
    styles = [PrepareModuleInput(input_layouts=(p,), desired_input_layouts=(R,)) for p in (P, R)]
    a, b = (parallelize_module(nn.Identity(), mesh, style) for style in styles)
    torch.testing.assert_close(a(x).to_local(), _summed(x))
    torch.testing.assert_close(b(x).to_local(), x)


def _summed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    get_platform().collectives.all_reduce(x, group=torch.distributed.group.WORLD)
    return x


Pair = namedtuple("Pair", "first second")


class Two(nn.Module):
    def forward(self, x: Any) -> Pair:
        return Pair(x * 2, x * 3)


@on_ranks(2)
def test_outputs_of_every_form() -> None:
    mesh, x = _mesh(), _rand(4, 3)
    style = PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=(Shard(0), None), use_local_output=False)
    made = parallelize_module(Two(), mesh, style)(x)
    assert type(made) is Pair and made.first.placements == (Shard(0),) and made.second.placements == (R,)
    style = PrepareModuleOutput(output_layouts=(R, None), desired_output_layouts=(Shard(0), None))
    made = parallelize_module(Two(), mesh, style)(x)
    assert type(made.first) is torch.Tensor and made.first.shape == (2, 3) and made.second.shape == (4, 3)
    style = PrepareModuleOutput(output_layouts=R, desired_output_layouts=Shard(1), use_local_output=False)
    assert parallelize_module(nn.Identity(), mesh, style)(x).placements == (Shard(1),)


@on_ranks(2)
def test_inputs_that_are_no_tensors() -> None:
    mesh = _mesh()
    linear = parallelize_module(_linear(4, 6), mesh, ColwiseParallel())
    with pytest.raises(TypeError, match=r"on Linear: the first input must be a tensor, got inputs \['str'\]"):
        linear("x")
    with pytest.raises(TypeError, match="got inputs \\[\\]"):
        linear()
    assert linear(input=_rand(2, 6)).shape == (2, 2)
    style = PrepareModuleInput(input_layouts=(R,), desired_input_layouts=(Shard(0),))
    with pytest.raises(TypeError, match=r"Replicate\(\) is for a tensor, got int"):
        parallelize_module(nn.Identity(), mesh, style)(3)
    other = distribute_tensor(_rand(2, 6), init_device_mesh(device_type(), (2,), ("x",)), [R])
    with pytest.raises(ValueError, match="the input is on DeviceMesh.*'x'.*, the module on DeviceMesh.*'tp'"):
        linear(other)
