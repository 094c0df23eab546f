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
    whole, seen = (x * 1.0).redistribute(placements=[R]), []
    whole.retain_grad()  # before its first use
    whole.register_hook(seen.append)
    F.linear(whole, weight).sum().backward()
    close(whole.grad, rand(8, 6).sum(0).expand(4, 6))
    close(seen[0], rand(8, 6).sum(0).expand(4, 6))


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


# ---- each hook of a leaf, before and after the forward ----
def on_two_axes(distributed: bool) -> tuple[Any, Any, Any]:
    """An input, and leaves of which one is read where the result varies: partial over dp, sharded over tp."""
    x, w, b = rand(8, 6), rand(4, 6), rand(4)
    if not distributed:
        return x, w.requires_grad_(), b.requires_grad_()
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    given = [distribute_tensor(each, mesh, place) for each, place in ((x, [Shard(0), R]), (w, [R, Shard(0)]))]
    return given[0], given[1].requires_grad_(), distribute_tensor(b, mesh, [R, Shard(0)]).requires_grad_()


def node_of(leaf: Any, by: str) -> Any:
    """Hold and return the leaf's graph node."""
    if by == "edge":
        leaf.kept = torch.autograd.graph.get_gradient_edge(leaf).node
    else:
        leaf.kept = getattr(leaf, by)(leaf).grad_fn.next_functions[0][0]
    return leaf.kept


def step(leaf: Any, seen: list[Any]) -> None:
    """Clip the leaf's gradient by its norm, and take a step."""
    norm = leaf.grad.norm().item()
    seen.append(norm)
    with torch.no_grad():
        leaf.sub_(leaf.grad * (0.1 / norm))
    leaf.grad = None


def by_optimizer(leaf: Any) -> None:
    optimizer = torch.optim.SGD([leaf], lr=0.1, momentum=0.9)

    def hook(_: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    leaf.register_post_accumulate_grad_hook(hook)


HOOKS: dict[str, Any] = {
    "register_hook": lambda w, b, seen: w.register_hook(seen.append),
    "register_hook, replaced": lambda w, b, seen: w.register_hook(lambda grad: grad * grad.norm()),
    "register_hook, kept": lambda w, b, seen: w.register_hook(lambda grad: seen.append(grad * 2) or seen[-1]),
    "register_hook, removed": lambda w, b, seen: w.register_hook(seen.append).remove(),
    "multi, all": lambda w, b, seen: torch.autograd.graph.register_multi_grad_hook([w, b], seen.extend),
    "multi, any": lambda w, b, seen: torch.autograd.graph.register_multi_grad_hook([w], seen.append, mode="any"),
    "post accumulate": lambda w, b, seen: w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad * 1)),
    "post accumulate, a step": lambda w, b, seen: w.register_post_accumulate_grad_hook(lambda p: step(p, seen)),
    "post accumulate, an optimizer": lambda w, b, seen: (by_optimizer(w), by_optimizer(b)),
    "node, before": lambda w, b, seen: node_of(w, "edge").register_prehook(lambda grads: seen.append(grads[0] * 1)),
    "node, replaced": lambda w, b, seen: node_of(w, "view_as").register_prehook(lambda grads: (grads[0] * 3,)),
    "node, after": lambda w, b, seen: node_of(w, "expand_as").register_hook(
        lambda _, grads: seen.extend((grads[0] * 1, w.grad * 1))
    ),
}
REFUSED_AFTER = {
    "multi, all": "a hook of the graph node, of a DTensor leaf .* after an operation had read it.* before the forward",
    "multi, any": "^register_multi_grad_hook of a DTensor leaf .* after an operation had read it.* before the forward",
    **dict.fromkeys(
        ("node, before", "node, replaced", "node, after"),
        r"^the gradient edge, or a hook of the graph node, of a DTensor leaf of shape \(4, 6\).* before the forward",
    ),
}


@on_ranks(4)
@pytest.mark.parametrize("late", [False, True], ids=["before forward", "after forward"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_a_leaf_see_the_gradient_of_one_process_or_are_refused(kind: str, late: bool) -> None:
    results: list[list[Any]] = []
    for distributed in (False, True):
        x, w, b = on_two_axes(distributed)
        seen: list[Any] = []
        for turn in range(2):
            if turn == 0 and not late:
                HOOKS[kind](w, b, seen)
            loss = F.linear(x, w, b).square().sum()
            if turn == 0 and late:
                if distributed and kind in REFUSED_AFTER:
                    with count_collectives() as counts, pytest.raises(RuntimeError, match=REFUSED_AFTER[kind]):
                        HOOKS[kind](w, b, seen)
                    assert not counts
                    return
                HOOKS[kind](w, b, seen)
            loss.backward()
        results.append([*seen, w.detach(), b.detach(), *(each.grad for each in (w, b) if each.grad is not None)])
    want, got = results
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        if isinstance(other, torch.Tensor):
            assert isinstance(one, DTensor)
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-10, atol=1e-10)
        else:
            assert one == pytest.approx(other, rel=1e-10)


# ---- hooks of modules ----
MODULE_HOOKS: dict[str, Any] = {
    "see": lambda module, seen: module.register_full_backward_hook(lambda _, into, out: seen.extend((*into, *out))),
    "see before": lambda module, seen: module.register_full_backward_pre_hook(lambda _, out: seen.extend(out)),
    "replace": lambda module, seen: module.register_full_backward_hook(
        lambda _, into, out: tuple(grad / grad.norm() for grad in into)
    ),
    "replace before": lambda module, seen: module.register_full_backward_pre_hook(
        lambda _, out: tuple(grad * out[0].sum() for grad in out)
    ),
    "both": lambda module, seen: (
        module.register_full_backward_pre_hook(lambda _, out: (out[0] * 2,)),
        module.register_full_backward_hook(lambda _, into, out: seen.extend((*into, *out)) or (into[0] * 3,)),
    ),
}


class Product(torch.nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: Any) -> Any:
        return F.linear(x, self.weight)


@on_ranks(2)
@pytest.mark.parametrize("kind", MODULE_HOOKS)
@pytest.mark.parametrize("place", [Shard(0), Shard(1), R], ids=str)
def test_backward_hooks_of_modules_see_whole_gradients(kind: str, place: Any) -> None:
    """Those of an output that is sharded by features, of one that is partial, and of a replicated one."""
    results: list[list[Any]] = []
    for distributed in (False, True):
        x, first, second = rand(5, 6), rand(8, 6), rand(4, 8)
        if distributed:
            x, first, second = placed(x, R), placed(first, place), placed(second, Shard(1))
        inner, outer, seen = Product(first), Product(second), []
        leaf = x.requires_grad_()
        MODULE_HOOKS[kind](inner, seen)
        MODULE_HOOKS[kind](outer, seen)
        outer(inner(leaf)).square().sum().backward()
        results.append([*seen, leaf.grad, inner.weight.grad, outer.weight.grad])
    want, got = results
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-10, atol=1e-10)


@on_ranks(2)
def test_what_a_backward_hook_of_a_module_returns_is_checked() -> None:
    module = Product(placed(rand(8, 6), Shard(0)))
    handle = module.register_full_backward_hook(lambda _, into, out: (into[0].to_local(),))
    x = placed(rand(5, 6), R).requires_grad_()
    text = r"hook of Product returned a plain tensor of shape \(5, 6\) for the gradient of a DTensor of shape \(5, 6\)"
    with pytest.raises(RuntimeError, match=text):
        module(x).sum().backward()
    handle.remove()
    module.register_full_backward_hook(lambda _, into, out: (into[0][:2],))
    with pytest.raises(RuntimeError, match=r"returned a DTensor of shape \(2, 6\)"):
        module(x).sum().backward()


@on_ranks(2)
def test_a_hook_of_an_activation_that_is_gone() -> None:
    x = placed(rand(4, 6), Shard(0)).requires_grad_()
    hidden, seen = x * 2, []
    hidden.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    loss = hidden.square().sum()
    del hidden
    loss.backward()
    assert seen == [(4, 6)]
    close(x.grad, 8 * rand(4, 6))


@on_ranks(2)
def test_gradients_of_gradients_through_a_leaf_whose_node_is_taken() -> None:
    for a, w in (leaves()[:2], leaves()[2:]):
        node_of(w, "edge")
        w.register_hook(lambda grad: grad * 2)
        [grad] = torch.autograd.grad((a * w).square().sum(), w, create_graph=True)
        grad.square().sum().backward()
        close(grad, 4 * rand(3) * rand(5, 3).square().sum(0))
        close(w.grad, 2 * 2 * 16 * rand(3) * rand(5, 3).square().sum(0).square())
