"""Sequence parallel linear layers whose collective goes on under their product: results, who does them, refusals."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_styles.torch import products
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
UP = ColwiseParallel(input_layouts=Shard(1), use_local_output=False, async_tensor_parallel="auto")
DOWN = RowwiseParallel(output_layouts=Shard(1), use_local_output=False, async_tensor_parallel="auto")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12, dtype=torch.float64, device=device_type())
        self.down = nn.Linear(12, 8, dtype=torch.float64, device=device_type())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


@contextmanager
def _chunks() -> Iterator[None]:
    """Choose chunks, as on devices without the operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "choose", lambda *args, **kwargs: ("chunks", "for the test"))
        yield


@on_ranks(2, 4)
@pytest.mark.parametrize("plain", [True, False], ids=["plain inputs", "DTensors"])
def test_chunks_equal_one_process(plain: bool) -> None:
    torch.set_num_threads(1)
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh(device_type(), (world,))
    model = Mlp()
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh, {"up": UP, "down": DOWN})
    x = torch.randn(2, 48 * world, 8, dtype=torch.float64, device=device_type())
    alone = x.clone().requires_grad_()
    want = reference(alone)
    want.square().sum().backward()
    part: Any = distribute_tensor(x, mesh, [Shard(1)])
    part = (part.to_local() if plain else part).detach().requires_grad_()
    with _chunks():
        got: Any = model(part)
        with count_collectives() as backward:
            got.square().sum().backward()
    assert got.placements == (Shard(1),)
    assert backward["all_gather"] > 1 and backward["reduce_scatter"] > 1, "in chunks"
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=1e-12)
    own = part.grad if plain else part.grad.to_local()
    expected = alone.grad.chunk(world, 1)[mesh.get_local_rank()]  # type: ignore[union-attr]
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
    p: Any
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-12, msg=name)


@on_ranks(2)
def test_on_a_cpu_nothing_changes() -> None:
    """There `choose` says "plain": the same collectives and bits as without the option."""
    mesh = init_device_mesh(device_type(), (2,))
    model, found = Mlp(), []
    x = torch.randn(2, 8, 8, dtype=torch.float64, device=device_type())
    for option in ("auto", "off"):
        layers: Any = copy.deepcopy(model)
        up = ColwiseParallel(input_layouts=Shard(1), use_local_output=False, async_tensor_parallel=option)
        down = RowwiseParallel(output_layouts=Shard(1), async_tensor_parallel=option)
        parallelize_module(layers, mesh, {"up": up, "down": down})
        with count_collectives() as calls:
            y = layers(x)
            y.sum().backward()
        found.append((dict(calls), y, layers.up.weight.grad.to_local()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][2], found[1][2])


@on_ranks(2)
def test_other_inputs_go_the_usual_way() -> None:
    """An odd sequence, an input that is whole already, mixed precision."""
    mesh = init_device_mesh(device_type(), (2,))
    model = Mlp()
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh, {"up": UP, "down": DOWN})
    with _chunks():
        for sizes, placement in (((2, 7, 8), Shard(1)), ((2, 8, 8), Shard(0)), ((2, 8, 8), Shard(2))):
            x = torch.randn(sizes, dtype=torch.float64, device=device_type())
            got: Any = model(distribute_tensor(x, mesh, [placement]))
            torch.testing.assert_close(got.full_tensor(), reference(x), rtol=1e-12, atol=1e-12)
        x = torch.randn(2, 80, 8, dtype=torch.float32, device=device_type())
        model.float()
        reference.float()
        with torch.autocast(device_type(), torch.bfloat16):
            got, want = model(distribute_tensor(x, mesh, [Shard(1)])), reference(x)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.full_tensor(), want, rtol=3e-2, atol=3e-2)


@on_ranks(2)
def test_what_is_refused() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    assert "async_tensor_parallel='auto'" in repr(UP) and "async_tensor_parallel='auto'" in repr(DOWN)
    with pytest.raises(ValueError, match=r'ColwiseParallel: async_tensor_parallel is "auto" or "off", got True'):
        ColwiseParallel(async_tensor_parallel=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"is for a sharded sequence, input_layouts=Shard\(dim\), got Replicate\(\)"):
        ColwiseParallel(async_tensor_parallel="auto")
    with pytest.raises(ValueError, match=r"is for a sharded sequence, output_layouts=Shard\(dim\), got Replicate\(\)"):
        RowwiseParallel(async_tensor_parallel="auto")
    with pytest.raises(NotImplementedError, match='async_tensor_parallel="auto" is for Linear modules'):
        parallelize_module(nn.Embedding(4, 4), mesh, UP)

    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    with pytest.raises(NotImplementedError, match='which async_tensor_parallel="auto" would leave out'):
        parallelize_module(Scaled(4, 4), mesh, DOWN)
