"""Hooks see whole gradients, whenever they were registered, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]
R = Replicate()


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device_type())


def placed(whole: torch.Tensor, placement: Any) -> Any:
    return distribute_tensor(whole, init_device_mesh(device_type(), (2,)), [placement])


def close(got: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, expected, rtol=1e-12, atol=1e-12)


def double(seen: list[Any]) -> Any:
    def hook(grad: Any) -> Any:
        seen.append(grad.detach() * 1)
        return grad * 2

    return hook


def leaves() -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """A replicated leaf and rows that make its gradient partial, with the same on one device."""
    x, w = rand(5, 3), rand(3)
    return placed(x, Shard(0)), placed(w, R).requires_grad_(), x, w.clone().requires_grad_()


@on_ranks(2)
def test_a_hook_of_a_leaf_registered_after_the_forward() -> None:
    for a, w in (leaves()[:2], leaves()[2:]):
        seen: list[Any] = []
        loss = (a * w).square().sum()
        w.register_hook(double(seen))
        loss.backward()
        assert len(seen) == 1
        expected = 2 * rand(3) * rand(5, 3).square().sum(0)
        close(seen[0], expected)
        close(w.grad, 2 * expected)


@on_ranks(2)
def test_a_post_accumulate_hook_registered_after_the_forward() -> None:
    """As an optimizer whose step is in backward."""
    x, weight, plain, w = leaves()
    for a, leaf in ((x, weight), (plain, w)):
        calls: list[int] = []

        def step(leaf: Any, calls: list[int] = calls) -> None:
            with torch.no_grad():
                leaf.sub_(leaf.grad * 0.1)
            leaf.grad = None
            calls.append(1)

        loss = (a * leaf).square().sum()
        handle = leaf.register_post_accumulate_grad_hook(step)
        loss.backward()
        (a * leaf).square().sum().backward()
        assert len(calls) == 2 and leaf.grad is None
        handle.remove()
        (a * leaf).square().sum().backward()
        assert len(calls) == 2
    close(weight.detach(), w.detach())
    close(weight.grad, w.grad)


@on_ranks(2)
def test_two_forwards_around_a_change_of_the_leaf() -> None:
    """What older readers of a leaf collect is neither lost nor overwritten."""
    x, weight, plain, w = leaves()
    for a, leaf in ((x, weight), (plain, w)):
        first = (a * leaf).sum()
        leaf.data = leaf.data * 2
        (first + (a * leaf).square().sum()).backward()
    close(weight.grad, w.grad)
    for a, leaf in ((x, weight), (plain, w)):
        leaf.grad = None
        first = (a * leaf).sum()
        leaf.data = leaf.data * 2
        (found,) = torch.autograd.grad(first, leaf)
        close(found, rand(5, 3).sum(0))
        second = (a * leaf).sum()
        leaf.register_hook(double([]))
        (found,) = torch.autograd.grad(second, leaf, retain_graph=True)
        close(found, 2 * rand(5, 3).sum(0))
        second.backward(inputs=[leaf])
        close(leaf.grad, 2 * rand(5, 3).sum(0))


@on_ranks(2)
def test_a_gradient_in_two_parts_is_refused_to_a_late_hook() -> None:
    for late in ("register_hook", "register_post_accumulate_grad_hook"):
        x, weight, _, _ = leaves()
        loss = (x * weight).sum() + weight.square().sum()
        getattr(weight, late)(lambda _: None)
        with pytest.raises(RuntimeError, match="registered after an operation had read it.* in two parts"):
            loss.backward()
    x, weight, _, _ = leaves()
    loss = (x * weight).sum() + weight.square().sum()
    weight.register_hook(lambda _: None)
    with pytest.raises(RuntimeError, match="registered after an operation had read it.* in two parts"):
        torch.autograd.grad(loss, weight)
    weight.grad = None
    ((x * weight).sum() + weight.square().sum()).backward()  # of a forward after it, it sees the whole
    close(weight.grad, rand(5, 3).sum(0) + 2 * rand(3))


@on_ranks(2)
@pytest.mark.parametrize("watch", ["register_hook", "retain_grad", "both"])
@pytest.mark.parametrize("place", [Shard(0), Shard(1), R], ids=str)
def test_a_redistributed_value_that_is_watched(watch: str, place: Any) -> None:
    x, w = rand(4, 6), rand(8, 6)
    leaf, weight = placed(x, place).requires_grad_(), placed(w, Shard(0)).requires_grad_()
    plain, other = x.clone().requires_grad_(), w.clone().requires_grad_()
    seen: tuple[list[Any], list[Any]] = [], []
    for a, b, calls in ((leaf, weight, seen[0]), (plain, other, seen[1])):
        hidden = a * 1.0
        whole: Any = hidden.redistribute(placements=[R]) if isinstance(hidden, DTensor) else hidden * 1.0
        if watch != "register_hook":
            whole.retain_grad()
        if watch != "retain_grad":
            whole.register_hook(double(calls))
        (F.linear(whole, b).square().sum() + whole.sum()).backward()
        if watch != "register_hook":
            calls.append(whole.grad)
    close(leaf.grad, plain.grad)
    close(weight.grad, other.grad)
    assert len(seen[0]) == len(seen[1])
    for got, expected in zip(*seen, strict=True):
        close(got, expected)


@on_ranks(2)
def test_who_watches_a_redistributed_value_too_late_is_told() -> None:
    x, weight = placed(rand(4, 6), Shard(0)).requires_grad_(), placed(rand(8, 6), Shard(0))
    whole = (x * 1.0).redistribute(placements=[R])
    loss = F.linear(whole, weight).sum()
    calls: dict[str, Any] = {
        "register_hook": lambda: whole.register_hook(lambda grad: None),
        "retain_grad": whole.retain_grad,
        r"torch\.autograd\.grad": lambda: torch.autograd.grad(loss, whole, allow_unused=True),
        r"backward\(inputs=\)": lambda: loss.backward(inputs=[whole]),
    }
    for name, call in calls.items():
        with count_collectives() as counts, pytest.raises(RuntimeError, match=f"^{name}: .* and bypasses it"):
            call()
        assert not counts
    loss.backward()
    close(x.grad, rand(8, 6).sum(0).expand(4, 6))


@on_ranks(2)
def test_a_hook_of_a_view_whose_base_was_written_through_another() -> None:
    whole = rand(4)
    x = placed(whole, Shard(0)).requires_grad_()
    view = (x * 2).view_as(x)
    view[0].mul_(0.5)
    view.register_hook(lambda grad: grad * 3)  # on plain tensors torch itself dies of a segmentation fault here
    view.square().sum().backward()
    factors = torch.tensor([1.0, 2.0, 2.0, 2.0], dtype=whole.dtype, device=whole.device)
    close(x.grad, 3 * 2 * factors.square() * whole)


@on_ranks(2)
@pytest.mark.parametrize("doubling", [True, False])
def test_the_gradient_that_a_hook_of_a_partial_sees_has_a_gradient(doubling: bool) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    part = rand(4, 3) * (mesh.get_local_rank() + 1) / 3
    mine, whole = part.requires_grad_(), rand(4, 3).requires_grad_()
    for x in (DTensor.from_local(mine, mesh, [Partial()]), whole * 1):
        seen: list[Any] = []
        x.register_hook(lambda grad, seen=seen: seen.append(grad) or (grad * grad if doubling else None))
        [grad] = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (seen[0] * grad).sum().backward()
    close(mine.grad, whole.grad)


@on_ranks(2)
def test_what_a_hook_gives_is_moved_to_the_layout_of_the_gradient() -> None:
    whole, factor = rand(3), rand(3) + 1
    truth = whole.clone().requires_grad_()
    truth.register_hook(lambda grad: grad * factor)
    (truth * truth).sum().backward()
    for own in (Partial(), R, Shard(0)):
        for other in (Partial(), R, Shard(0)):
            x, by = placed(whole, own).requires_grad_(), placed(factor, other)
            x.register_hook(lambda grad, by=by: grad * by)
            (x * x).sum().backward()
            close(x.grad, truth.grad)  # type: ignore[arg-type]
    x = placed(whole, Shard(0)).requires_grad_()
    x.register_hook(lambda grad: grad[:2])
    with pytest.raises(RuntimeError, match=r"register_hook: a gradient of shape \(3,\) became \(2,\)"):
        x.sum().backward()
