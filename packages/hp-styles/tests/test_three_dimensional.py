"""A Linear whose input, weight and output are cut over all three axes of a mesh: values, gradients, sizes, bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.debugging.debug import CommDebugMode
from hp_styles import ThreeDimensionalParallel, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias, dtype=torch.float64, device=device_type())
        self.down = nn.Linear(hidden, dim, bias, dtype=torch.float64, device=device_type())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def equals_one_process(mesh: DeviceMesh, shape: tuple[int, ...], hidden: int, token_dim: int) -> None:
    """Run an Mlp whose two layers exchange the axes y and z, twice, and compare."""
    torch.set_num_threads(1)
    model = Mlp(shape[-1], hidden)
    reference = copy.deepcopy(model)
    plan = {
        "up": ThreeDimensionalParallel(input_axis="z", token_dim=token_dim, use_local_output=False),
        "down": ThreeDimensionalParallel(input_axis="y", token_dim=token_dim, use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    x = torch.randn(shape, dtype=torch.float64, device=device_type())
    plain = x.clone().requires_grad_()
    stream = (Shard(token_dim), Shard(token_dim), Shard(x.dim() - 1))
    part: Any = distribute_tensor(x, mesh, stream).requires_grad_()
    for _ in range(2):  # gradients accumulate
        want, got = reference(plain), model(part)
        assert got.placements == stream, "the layout of the residual stream"
        want.square().sum().backward()
        got.square().sum().backward()
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)
    p: Any
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-12, msg=name)


@on_ranks(8)
@pytest.mark.parametrize(
    ("shape", "hidden", "token_dim"),
    [((8, 8), 12, 0), ((7, 6), 10, 0), ((2, 9, 8), 6, 1), ((3, 1, 2), 2, 1)],
    ids=["even", "uneven", "sequence", "empty parts"],
)
def test_a_cube_equals_one_process(shape: tuple[int, ...], hidden: int, token_dim: int) -> None:
    equals_one_process(init_device_mesh(device_type(), (2, 2, 2), ("x", "y", "z")), shape, hidden, token_dim)


@on_ranks(4)
@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2), (2, 1, 2), (4, 1, 1), (1, 1, 4)], ids=str)
def test_any_block_equals_one_process(sizes: tuple[int, ...]) -> None:
    mesh = init_device_mesh(device_type(), sizes, ("x", "y", "z"))
    equals_one_process(mesh, (5, 8), 12, 0)
    equals_one_process(mesh, (3, 2, 4), 4, 1)


@on_ranks(8)
def test_a_rank_has_an_eighth_of_weights_and_of_what_is_kept_for_backward() -> None:
    mesh = init_device_mesh(device_type(), (2, 2, 2), ("x", "y", "z"))
    tokens, into, out = 8, 12, 16
    linear: Any = nn.Linear(into, out, dtype=torch.float64, device=device_type())
    parallelize_module(linear, mesh, ThreeDimensionalParallel())
    assert linear.weight.to_local().numel() == into * out // 8
    assert linear.bias.to_local().numel() == out // 4, "the same along the input axis"
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    x = torch.randn(tokens // 4, into // 2, dtype=torch.float64, device=device_type(), requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = linear(x)  # a plain input is this rank's part
    assert type(y) is torch.Tensor and y.numel() == tokens * out // 8
    assert sum(saved.values()) == tokens * into // 8 + into * out // 8
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert linear.weight.grad.to_local().numel() == into * out // 8


@on_ranks(8)
def test_bytes_are_those_of_the_docstring() -> None:
    mesh = init_device_mesh(device_type(), (2, 2, 2), ("x", "y", "z"))
    tokens, into, out = 16, 24, 40
    linear: Any = nn.Linear(into, out, bias=False, dtype=torch.float64, device=device_type())
    parallelize_module(linear, mesh, ThreeDimensionalParallel(use_local_output=False))
    x = torch.randn(tokens, into, dtype=torch.float64, device=device_type())
    part: Any = distribute_tensor(x, mesh, [Shard(0), Shard(0), Shard(1)]).requires_grad_()
    with CommDebugMode(mesh=mesh) as comm:
        linear(part).square().sum().backward()
    of_x, of_weight, of_y = 8 * tokens * into // 4, 8 * into * out // 4, 8 * tokens * out // 4  # gathered
    found = {key: total.bytes for key, total in comm.totals("phase", "kind", "axis").items()}
    assert found == {
        ("forward", "all_gather", "y"): of_x,
        ("forward", "all_gather", "x"): of_weight,
        ("forward", "reduce_scatter", "z"): of_y,
        ("backward", "all_gather", "z"): of_y,
        ("backward", "all_gather", "x"): of_weight,
        ("backward", "reduce_scatter", "y"): of_x,
        ("backward", "all_gather", "y"): of_x,
        ("backward", "reduce_scatter", "x"): of_weight,
    }


@on_ranks(4)
def test_weights_without_gradients_mixed_precision_and_one_step() -> None:
    mesh = init_device_mesh(device_type(), (2, 1, 2), ("x", "y", "z"))
    linear: Any = nn.Linear(8, 6, device=device_type())
    reference: Any = copy.deepcopy(linear)
    parallelize_module(linear, mesh, ThreeDimensionalParallel(use_local_output=False))
    x = torch.randn(4, 8, device=device_type())
    part: Any = distribute_tensor(x, mesh, [Shard(0), Shard(0), Shard(1)])
    with torch.autocast(device_type(), torch.bfloat16):
        got, want = linear(part), reference(x)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got.full_tensor(), want, rtol=2e-2, atol=2e-2)
    got.float().square().sum().backward()
    want.float().square().sum().backward()
    torch.testing.assert_close(linear.weight.grad.full_tensor(), reference.weight.grad, rtol=5e-2, atol=5e-2)
    for parameters in (linear.parameters(), reference.parameters()):
        torch.optim.AdamW(list(parameters)).step()
    linear.weight.requires_grad_(False)
    part.requires_grad_()
    linear(part).sum().backward()
    torch.testing.assert_close(part.grad.full_tensor(), linear.weight.full_tensor().sum(0).expand(4, 8))
    with pytest.raises(RuntimeError, match="ThreeDimensionalParallel: a backward that records a graph"):
        torch.autograd.grad(linear(part).square().sum(), [part], create_graph=True)


@on_ranks(4)
def test_what_is_refused() -> None:
    mesh = init_device_mesh(device_type(), (1, 2, 2), ("x", "y", "z"))
    style = ThreeDimensionalParallel()
    assert repr(style).startswith("ThreeDimensionalParallel(input_axis=-1, token_dim=0, input_layouts=None")
    with pytest.raises(ValueError, match="a mesh of 3 axes is needed for ThreeDimensionalParallel, got axes .'x', 'y'"):
        parallelize_module(nn.Linear(4, 4), mesh["x", "y"], style)
    with pytest.raises(ValueError, match="input_axis='x' is the first axis of a mesh with axes .*, which cuts tokens"):
        parallelize_module(nn.Linear(4, 4), mesh, ThreeDimensionalParallel(input_axis="x"))
    with pytest.raises(KeyError, match="no axis 'w' in a mesh with axes"):
        parallelize_module(nn.Linear(4, 4), mesh, ThreeDimensionalParallel(input_axis="w"))
    with pytest.raises(ValueError, match="the 2 ranks of axis 1 do not divide the 5 output features of Linear"):
        parallelize_module(nn.Linear(4, 5), mesh, style)
    with pytest.raises(NotImplementedError, match="ThreeDimensionalParallel shards Linear modules, got Embedding"):
        parallelize_module(nn.Embedding(4, 4), mesh, style)

    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    with pytest.raises(NotImplementedError, match="the product of Scaled is not that of torch.nn.Linear"):
        parallelize_module(Scaled(4, 4), mesh, style)
    linear = parallelize_module(nn.Linear(4, 4, device=device_type()), mesh, style)
    with pytest.raises(ValueError, match="an input of two dims or more is needed"):
        linear(torch.ones(2, device=device_type()))
