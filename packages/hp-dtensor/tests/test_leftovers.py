"""Nothing of a step on DTensors waits for Python's collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hp_dtensor import Replicate, Shard, distribute_tensor, implicit_replication, init_device_mesh
from hp_testing import device_type, on_ranks
from hp_testing.leftovers import leftovers

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2 + ctx.saved_tensors[0] * 0


def use(x: Any, w: Any, b: Any) -> Any:
    y = F.layer_norm(torch.cat([x, x * 2]) + torch.ones(6, device=device_type()), (6,), b, b)  # a list, a plain tensor
    y = F.linear(Double.apply(y), w, b.redistribute(placements=[Replicate()]))
    y[[0, 2, 0], 1:3] = y[1, 1:3] + 1  # written by positions
    z = torch.cov(y.T).sum() + torch.einsum("ij,kj->ik", y, y).mean()  # on whole tensors, and composed
    return z + y.view(-1)[:4].square().sum() + torch.stack(y.unbind(1)[:2]).sum() + y.max()


@on_ranks(2)
@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "hooks"])
def test_a_step_leaves_nothing_to_the_collector(again: bool, hooks: bool) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    given = [torch.randn(shape, device=device_type()) for shape in ((4, 6), (6, 6), (6,))]
    x, w, b = (
        distribute_tensor(value, mesh, [place]).requires_grad_()
        for value, place in zip(given, (Shard(0), Shard(1), Replicate()), strict=True)
    )

    def step() -> None:
        with implicit_replication():
            loss = checkpoint(use, x, w, b, use_reentrant=False) if again else use(x, w, b)
            handles = [leaf.register_hook(lambda grad: grad * 2) for leaf in (x, w, b) if hooks]
            loss.backward()
        for leaf in (x, w, b):
            leaf.grad = None
        for handle in handles:
            handle.remove()

    assert leftovers(step) == []


@on_ranks(2)
def test_no_plan_keeps_the_tensors_that_it_was_made_of() -> None:
    mesh = init_device_mesh(device_type(), (2,))

    def alive(join: Callable[[tuple[torch.Tensor, ...]], Any]) -> bool:
        tensors = tuple(distribute_tensor(torch.randn(4, 5, device=device_type()), mesh, [Shard(0)]) for _ in range(2))
        references = [weakref.ref(each) for each in tensors]
        join(tensors)
        del tensors
        gc.collect()
        return any(reference() is not None for reference in references)

    assert not alive(lambda tensors: torch.cat(tensors, dim=-1))
    assert not alive(lambda tensors: torch.cat(tensors, 1))
    assert not alive(lambda tensors: torch.stack(tensors, dim=1))
