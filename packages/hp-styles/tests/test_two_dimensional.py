"""A Linear over two axes of a mesh, and a depth: outputs and gradients of one process, and the bytes that are moved."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hp_dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.debugging.debug import CommDebugMode
from hp_platform import count_collectives
from hp_styles import ColwiseParallel, TwoDimensionalParallel, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, dtype=torch.float64, device=device_type())
        self.down = nn.Linear(hidden, dim, dtype=torch.float64, device=device_type())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def equals_one_process(mesh: DeviceMesh, shape: tuple[int, ...], hidden: int, token_dim: int) -> None:
    """An Mlp whose two layers exchange the axes x and y, over a depth where the mesh has one."""
    torch.set_num_threads(1)
    model = Mlp(shape[-1], hidden)
    reference = copy.deepcopy(model)
    deep = mesh.ndim == 3
    options = {"depth_axis": "depth" if deep else None, "token_dim": token_dim, "use_local_output": False}
    plan = {
        "up": TwoDimensionalParallel(input_axis="y", **options),  # type: ignore[arg-type]
        "down": TwoDimensionalParallel(input_axis="x", **options),  # type: ignore[arg-type]
    }
    parallelize_module(model, mesh, plan)
    depth, tokens = ((R,), (Shard(token_dim),)) if deep else ((), ())
    assert model.up.weight.placements == (*depth, Shard(0), Shard(1))
    assert model.up.bias.placements == (*depth, Shard(0), R)
    assert model.down.weight.placements == (*depth, Shard(1), Shard(0))
    assert model.down.bias.placements == (*depth, R, Shard(0))
    x = torch.randn(shape, dtype=torch.float64, device=device_type())
    plain = x.clone().requires_grad_()
    want = reference(plain)
    want.square().sum().backward()
    stream = (*tokens, Shard(token_dim), Shard(x.dim() - 1))
    part = distribute_tensor(x, mesh, stream).requires_grad_()
    got = model(part)
    assert got.placements == stream, "the layout of the residual stream"
    got.square().sum().backward()
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-12, msg=name)


@on_ranks(4)
@pytest.mark.parametrize(
    ("shape", "hidden", "token_dim"),
    [((4, 8), 12, 0), ((5, 7), 9, 0), ((2, 6, 8), 12, 1), ((3, 1, 5), 3, 1)],
    ids=["even", "uneven", "sequence", "empty parts"],
)
def test_two_layers_equal_one_process(shape: tuple[int, ...], hidden: int, token_dim: int) -> None:
    equals_one_process(init_device_mesh(device_type(), (2, 2), ("x", "y")), shape, hidden, token_dim)


@on_ranks(8)
@pytest.mark.parametrize(
    ("shape", "hidden", "token_dim"),
    [((8, 8), 12, 0), ((7, 5), 9, 0), ((2, 9, 8), 6, 1), ((3, 1, 5), 3, 1)],
    ids=["even", "uneven", "sequence", "empty parts"],
)
def test_a_depth_of_two_equals_one_process(shape: tuple[int, ...], hidden: int, token_dim: int) -> None:
    equals_one_process(init_device_mesh(device_type(), (2, 2, 2), ("depth", "x", "y")), shape, hidden, token_dim)


@on_ranks(4)
@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 1), (4, 1, 1), (1, 2, 2)], ids=str)
def test_any_depth_equals_one_process(sizes: tuple[int, ...]) -> None:
    mesh = init_device_mesh(device_type(), sizes, ("depth", "x", "y"))
    equals_one_process(mesh, (5, 7), 9, 0)
    equals_one_process(mesh, (8, 4), 4, 0)


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
    assert dict(forward) == {"all_gather": 1 + 2, "reduce_scatter": 1}, "the shapes of parts, over each axis"
    assert dict(backward) == {"all_gather": 1, "reduce_scatter": 1}
    assert backward.bytes == 8 * (tokens * into // 2 + tokens * out // 2)
    assert forward.bytes == backward.bytes + 8 * 8 * (2 + 4), "a shape is 8 numbers"


@on_ranks(8)
def test_of_a_depth_only_the_weights_gradients_are_summed_over_it() -> None:
    mesh = init_device_mesh(device_type(), (2, 2, 2), ("depth", "x", "y"))
    tokens, dim, hidden = 8, 6, 10
    model = Mlp(dim, hidden)
    plan = {name: TwoDimensionalParallel(input_axis=axis, depth_axis=0) for name, axis in (("up", "y"), ("down", "x"))}
    parallelize_module(model, mesh, plan)
    x = torch.randn(tokens // 4, dim // 2, dtype=torch.float64, device=device_type())  # this rank's part
    with CommDebugMode(mesh=mesh) as comm:
        got = model(x.requires_grad_())
        got.square().sum().backward()
    assert type(got) is torch.Tensor and got.shape == x.shape
    found = {key: (total.calls, total.bytes) for key, total in comm.totals("phase", "kind", "axis").items()}
    narrow, wide = 8 * tokens // 2 * dim // 2, 8 * tokens // 2 * hidden // 2  # of one layer of the depth, gathered
    moved = {
        ("all_gather", "x"): (1, narrow),  # up's input
        ("reduce_scatter", "y"): (1, wide),  # its output
        ("all_gather", "y"): (1, wide),  # down's input
        ("reduce_scatter", "x"): (1, narrow),  # its output
    }
    parameters = dim * hidden // 4 * 2 + hidden // 2 + dim // 2
    shapes = {("all_gather", "y"): 2, ("all_gather", "x"): 4, ("all_gather", "depth"): 8}  # as many are told each rank
    forward = {key: moved.get(key, (0, 0)) for key in moved | shapes}
    told = {key: (1, 8 * 8 * count) for key, count in shapes.items()}
    forward |= {key: (forward[key][0] + calls, forward[key][1] + size) for key, (calls, size) in told.items()}
    assert found == {
        **{("forward", *key): total for key, total in forward.items()},
        **{("backward", *key): total for key, total in moved.items()},
        ("backward", "all_reduce", "depth"): (1, 8 * parameters),
    }


@on_ranks(4)
def test_what_is_refused_of_a_depth() -> None:
    mesh = init_device_mesh(device_type(), (2, 1, 2), ("depth", "x", "y"))
    made = TwoDimensionalParallel(depth_axis="depth")
    assert "input_axis=-1, depth_axis='depth', token_dim=0" in repr(made)
    with pytest.raises(ValueError, match="a mesh of 3 axes is needed for TwoDimensionalParallel, got axes .'x', 'y'."):
        parallelize_module(nn.Linear(4, 4), mesh["x", "y"], made)
    with pytest.raises(ValueError, match="a mesh of 2 axes is needed for TwoDimensionalParallel, got axes .'depth', "):
        parallelize_module(nn.Linear(4, 4), mesh, TwoDimensionalParallel())
    with pytest.raises(ValueError, match="depth_axis='x' is axis 1 of .* make it the first axis of the mesh"):
        parallelize_module(nn.Linear(4, 4), mesh, TwoDimensionalParallel(depth_axis="x"))
    with pytest.raises(ValueError, match="input_axis='depth' is the depth, over which weights are replicated"):
        parallelize_module(nn.Linear(4, 4), mesh, TwoDimensionalParallel(input_axis="depth", depth_axis=0))
    with pytest.raises(KeyError, match="no axis 'deep' in a mesh with axes .* did you mean 'depth'"):
        parallelize_module(nn.Linear(4, 4), mesh, TwoDimensionalParallel(depth_axis="deep"))


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
    assert repr(style).startswith(
        "TwoDimensionalParallel(input_axis=-1, depth_axis=None, token_dim=0, input_layouts=None"
    )
