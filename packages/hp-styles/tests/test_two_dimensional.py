"""A Linear over both axes of a mesh: outputs and gradients of one process, and the bytes that are moved."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_platform.testing import device_type, on_ranks
from hp_styles import ColwiseParallel, TwoDimensionalParallel, parallelize_module

pytestmark = pytest.mark.framework("torch")
R = Replicate()


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, dtype=torch.float64, device=device_type())
        self.down = nn.Linear(hidden, dim, dtype=torch.float64, device=device_type())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


@on_ranks(4)
@pytest.mark.parametrize(
    ("shape", "hidden", "token_dim"),
    [((4, 8), 12, 0), ((5, 7), 9, 0), ((2, 6, 8), 12, 1), ((3, 1, 5), 3, 1)],
    ids=["even", "uneven", "sequence", "empty parts"],
)
def test_two_layers_equal_one_process(shape: tuple[int, ...], hidden: int, token_dim: int) -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("x", "y"))
    model = Mlp(shape[-1], hidden)
    reference = copy.deepcopy(model)
    options = {"token_dim": token_dim, "use_local_output": False}
    plan = {
        "up": TwoDimensionalParallel(input_axis="y", **options),  # type: ignore[arg-type]
        "down": TwoDimensionalParallel(input_axis="x", **options),  # type: ignore[arg-type]
    }
    parallelize_module(model, mesh, plan)
    assert model.up.weight.placements == (Shard(0), Shard(1)) and model.up.bias.placements == (Shard(0), R)
    assert model.down.weight.placements == (Shard(1), Shard(0)) and model.down.bias.placements == (R, Shard(0))
    x = torch.randn(shape, dtype=torch.float64, device=device_type())
    plain = x.clone().requires_grad_()
    want = reference(plain)
    want.square().sum().backward()
    part = distribute_tensor(x, mesh, [Shard(token_dim), Shard(x.dim() - 1)]).requires_grad_()
    got = model(part)
    assert got.placements == part.placements, "the layout of the residual stream"
    got.square().sum().backward()
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-12, msg=name)


@on_ranks(4)
def test_activations_move_and_weights_do_not() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("x", "y"))
    tokens, into, out = 8, 6, 10
    linear = nn.Linear(into, out, bias=False, dtype=torch.float64, device=device_type())
    reference = copy.deepcopy(linear)
    parallelize_module(linear, mesh, TwoDimensionalParallel())
    x = torch.randn(tokens, into, dtype=torch.float64, device=device_type())
    row, column = mesh.get_coordinate() or (0, 0)
    part = x.chunk(2, 0)[row].chunk(2, 1)[column].clone().requires_grad_()  # a plain input is this rank's part
    with count_collectives() as forward:
        got = linear(part)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, reference(x).chunk(2, 1)[row].chunk(2, 0)[column])
    with count_collectives() as backward:
        got.square().sum().backward()
    assert dict(forward) == {"all_gather": 1, "reduce_scatter": 1}
    assert dict(backward) == {"all_gather": 1, "reduce_scatter": 1}
    assert forward.bytes == backward.bytes == 8 * (tokens * into // 2 + tokens * out // 2)


@on_ranks(4)
def test_what_is_refused() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("x", "y"))
    style = TwoDimensionalParallel()
    with pytest.raises(ValueError, match="a mesh of 2 axes is needed for TwoDimensionalParallel, got axes .'x',."):
        parallelize_module(nn.Linear(4, 4), mesh["x"], style)
    with pytest.raises(ValueError, match="a mesh of one axis is needed for ColwiseParallel, got axes .'x', 'y'."):
        parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
    with pytest.raises(NotImplementedError, match="TwoDimensionalParallel shards Linear modules, got Embedding"):
        parallelize_module(nn.Embedding(4, 4), mesh, style)
    with pytest.raises(KeyError, match="no axis 'z' in a mesh with axes"):
        parallelize_module(nn.Linear(4, 4), mesh, TwoDimensionalParallel(input_axis="z"))
    assert repr(style).startswith("TwoDimensionalParallel(input_axis=1, token_dim=0, input_layouts=None")
