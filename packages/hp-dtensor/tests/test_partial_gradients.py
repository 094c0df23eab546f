"""Partial gradients of leaves that are summed together: each over its own axes only, whatever lies on the others."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

R = Replicate()
WAYS: dict[str, tuple[Placement, Placement]] = {
    "rows": (Shard(0), R),  # the weight's gradient is partial
    "out": (R, Shard(0)),
    "in": (Shard(1), Shard(1)),
    "whole": (R, R),
    "terms": (R, Partial()),
    "means": (R, Partial("avg")),
}
"""Placements of the input and of the weight of a linear layer on one mesh axis."""


def _compare(layers: list[tuple[Any, ...]], *meshes: Any) -> None:
    """Run one backward through linear layers, on the meshes in turn; layers are ways by axis, sizes, and the dtype."""
    torch.set_num_threads(1)
    total: Any = 0.0
    reference: Any = 0.0
    pairs = []
    for (ways, (rows, into, out), dtype), mesh in zip(layers, itertools.cycle(meshes), strict=False):
        x = torch.randn(rows, into, dtype=torch.float64, device=device_type())
        w = torch.randn(out, into, dtype=torch.float64, device=device_type())
        alone = w.to(dtype).double().requires_grad_()
        given = distribute_tensor(x.to(dtype), mesh, [WAYS[way][0] for way in ways])
        leaf = distribute_tensor(w.to(dtype), mesh, [WAYS[way][1] for way in ways]).requires_grad_()
        for _ in range(2):  # two uses, one gradient
            total = total + F.linear(given, leaf).square().sum().double().full_tensor()
            reference = reference + F.linear(x.to(dtype).double(), alone).square().sum()
        pairs.append((ways, dtype, leaf, alone))
    total.backward()
    reference.backward()
    for ways, dtype, leaf, alone in pairs:
        tolerance = 1e-12 if dtype == torch.float64 else 1e-4
        assert leaf.grad.placements == tuple(R if p.is_partial() else p for p in leaf.placements)
        sizes = zip(leaf.device_mesh.shape, leaf.placements, strict=True)
        share = math.prod(n for n, placement in sizes if placement.is_partial("avg"))
        got, message = leaf.grad.full_tensor().double() * share, f"{ways} {dtype} among {[each[0] for each in pairs]}"
        torch.testing.assert_close(got, alone.grad, rtol=tolerance, atol=tolerance * 100, msg=message)


def _mesh(*shape: int) -> Any:
    return init_device_mesh(device_type(), shape)


@on_ranks(4)
@pytest.mark.parametrize("order", [1, -1])
def test_axis_0_axis_1_and_both_in_one_backward(order: int) -> None:
    kinds = [("rows", "whole"), ("whole", "rows"), ("rows", "rows"), ("rows", "out"), ("out", "rows"), ("rows", "in")]
    _compare([(ways, (4, 6, 8), torch.float64) for ways in kinds * 2][::order], _mesh(2, 2))


@on_ranks(8)
@pytest.mark.parametrize("shape", [(4, 2), (2, 2, 2)], ids=str)
def test_shards_on_another_axis_stay_apart(shape: tuple[int, ...]) -> None:
    """A sum over one axis may be cut over an axis where all ranks have the same, and over no other."""
    for axis, way in itertools.product(range(len(shape)), ("out", "in")):
        ways = tuple(way if each == axis else "rows" for each in range(len(shape)))
        _compare([(ways, (8, 8, 8), torch.float64), (ways, (8, 16, 24), torch.float64)], _mesh(*shape))


@on_ranks(4, 8)
@pytest.mark.parametrize("seed", range(3))
def test_random_layers_in_one_backward(seed: int) -> None:
    """On two meshes of the same ranks, of two dtypes, with leaves that are sums or means of the ranks' terms."""
    draw, world = random.Random(seed), torch.distributed.get_world_size()
    shapes = [(2, 2), (1, 4), (4, 1)] if world == 4 else [(4, 2), (2, 4), (8, 1)]
    meshes = [_mesh(*shape) for shape in draw.sample(shapes, 2)]
    layers = []
    for _ in range(10):
        ways = tuple(draw.choice(list(WAYS)) for _ in range(2))
        sizes = tuple(draw.choice([1, 3, 5, 8, 16]) for _ in range(3))
        layers.append((ways, sizes, draw.choice([torch.float64, torch.float64, torch.float32])))
    _compare(layers, *meshes)
