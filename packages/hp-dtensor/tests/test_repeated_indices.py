"""Indices that name a place more than once: every element of the value has its gradient, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hp_dtensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()
ROWS, COLUMNS = torch.tensor([4, 1, 4, 4, 0]), torch.tensor([2, 2, 0])
MASK = torch.tensor([True, False, True, True, False, False])


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def write(x: Any, index: Any, value: Any) -> Any:
    y = x * 1
    y[index] = value
    return y


def add(x: Any, index: Any, value: Any) -> Any:
    y = x * 1
    y[index] += value
    return y


def at(*index: torch.Tensor) -> list[torch.Tensor]:
    return [each.to(device_type()) for each in index]


# What is written to one place is equal, for which of several values stays is left open, but its gradient is not.
CASES: dict[str, tuple[torch.Tensor, Callable[[Any, Any], Any]]] = {
    "x[rows] = y": (rand(6, 4)[ROWS], lambda x, y: write(x, at(ROWS)[0], y)),
    "x[rows] += y": (rand(6, 4)[ROWS], lambda x, y: add(x, at(ROWS)[0], y)),
    "x[rows, columns] = y": (rand(6, 4)[ROWS[:3], COLUMNS], lambda x, y: write(x, tuple(at(ROWS[:3], COLUMNS)), y)),
    "x[:, columns] = y": (rand(6, 4)[:, COLUMNS], lambda x, y: write(x, (slice(None), at(COLUMNS)[0]), y)),
    "x[rows] = one row": (rand(4), lambda x, y: write(x, at(ROWS)[0], y)),
    "index_put": (rand(6, 4)[ROWS], lambda x, y: x.index_put(at(ROWS), y)),
    "index_put_": (rand(6, 4)[ROWS], lambda x, y: (x * 1).index_put_(at(ROWS), y)),
    "index_put, accumulated": (rand(5, 4), lambda x, y: x.index_put(at(ROWS), y, accumulate=True)),
    "index_put_, accumulated": (rand(5, 4), lambda x, y: (x * 1).index_put_(at(ROWS), y, accumulate=True)),
    "index_add": (rand(5, 4), lambda x, y: x.index_add(0, *at(ROWS), y)),
    "index_add_ of columns": (rand(6, 3), lambda x, y: (x * 1).index_add_(1, *at(COLUMNS), y)),
    "index_copy": (rand(6, 4)[ROWS], lambda x, y: x.index_copy(0, *at(ROWS), y)),
    "scatter_add": (rand(5, 4), lambda x, y: x.scatter_add(0, *at(ROWS[:, None].expand(5, 4)), y)),
    "scatter": (rand(6, 4)[ROWS], lambda x, y: x.scatter(0, *at(ROWS[:, None].expand(5, 4)), y)),
    "scatter_reduce": (rand(5, 4), lambda x, y: x.scatter_reduce(0, *at(ROWS[:, None].expand(5, 4)), y, "mean")),
    "put": (rand(24)[ROWS], lambda x, y: x.put(*at(ROWS), y)),
    "put, accumulated": (rand(5), lambda x, y: x.put(*at(ROWS), y, accumulate=True)),
    "take": (rand(5), lambda x, y: x.take(*at(ROWS)) * y),
    "index_select": (rand(5, 4), lambda x, y: x.index_select(0, *at(ROWS)) * y),
    "x[mask] = y": (rand(3, 4), lambda x, y: write(x, at(MASK)[0], y)),
    "masked_scatter": (rand(6, 4), lambda x, y: x.masked_scatter(at(MASK[:, None])[0], y)),
}


def told(mesh: Any, plain: torch.Tensor, placements: tuple[Placement, ...]) -> Any:
    return distribute_tensor(plain.to(device_type()), mesh, placements).requires_grad_()


def check(mesh: Any, name: str, x_placements: Any, y_placements: Any) -> None:
    value, run = CASES[name]
    x, y = rand(6, 4).to(device_type()).requires_grad_(), value.to(device_type()).clone().requires_grad_()
    want = run(x, y)
    factor = rand(*want.shape).to(device_type())
    (want * factor).sum().backward()
    with implicit_replication():
        a, b = told(mesh, rand(6, 4), x_placements), told(mesh, value, y_placements)
        got = run(a, b)
        assert isinstance(got, DTensor)
        (got * factor).sum().backward()
    for mine, truth in ((got, want), (a.grad, x.grad), (b.grad, y.grad)):
        torch.testing.assert_close(mine.full_tensor(), truth, rtol=1e-12, atol=1e-12)


@on_ranks(2, 3)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_repeated_places(name: str) -> None:
    mesh = init_device_mesh(device_type(), (torch.distributed.get_world_size(),))
    for x_placed in ((Shard(0),), (Shard(1),), (R,)):
        for y_placed in ((Shard(0),), (R,)):
            check(mesh, name, x_placed, y_placed)


@on_ranks(4)
def test_values_and_gradients_of_repeated_places_on_two_axes() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    for name in ("x[rows] = y", "x[rows, columns] = y", "x[rows] += y", "index_put"):
        for x_placed in ((Shard(0), Shard(1)), (R, Shard(0)), (Shard(0), Shard(0))):
            check(mesh, name, x_placed, (R, Shard(0)))
