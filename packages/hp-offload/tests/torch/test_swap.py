"""Saved tensors on the host: the bits of the plain program, what leaves and when, and what stays."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from offload_models import gradients, net, same_bits
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hp_offload import CheckpointPolicy, SwapManager, checkpoint, swap, swap_tensor_wrapper, swap_wrapper
from hp_offload.port import link
from hp_platform.torch.dry import dry_world

SAVE, SWAP = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP


@pytest.fixture(autouse=True)
def manager():
    gc.collect()
    manager = SwapManager()
    manager.release_host_memory()
    yield manager
    gc.collect()
    manager.release_host_memory()
    assert manager.host_bytes == 0, "every buffer came back"


def twice(function, x, **options):
    """Two groups of `function`: the last one of a forward stays on the device."""
    return swap(lambda x: x.cos(), swap(function, x, **options))


@pytest.mark.parametrize("group_swap", [False, True])
def test_swapped_blocks_have_the_same_bits(group_swap):
    same_bits(lambda block: swap_wrapper(block, group_swap=group_swap))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64])
def test_dtypes(dtype):
    x = torch.linspace(-1, 1, 7).to(dtype).requires_grad_()
    function = lambda x: (x[1:] * x[:-1]).exp() * x[::2].sum()  # noqa: E731
    (expected,) = torch.autograd.grad(function(x).cos().abs().sum(), x)
    assert torch.equal(torch.autograd.grad(twice(function, x).abs().sum(), x)[0], expected)


def test_views_expanded_and_transposed():
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()

    def function(x):
        h = x.exp()
        return (h.t() * h.t()[:, :1].expand(4, 3)).sin() @ h[:, 1:3]

    (expected,) = torch.autograd.grad(function(x).cos().sum(), x)
    assert torch.equal(torch.autograd.grad(twice(function, x).sum(), x)[0], expected)


def test_a_storage_is_copied_once(manager):
    x = torch.ones(100, dtype=torch.float64, requires_grad=True)

    def function(x):
        h = x.exp()  # saves h
        return h.sin() * h.view(10, 10).cos().view(-1) * h  # saves h four times, and two results

    out = twice(function, x)
    assert manager.host_bytes == 100 * 8 * 4  # h, its sin and cos, and their product; what the last group saves stays
    out.sum().backward()


def test_parameters_buffers_and_leaves_stay(manager):
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            return F.linear(x, self.weight) * self.scale

    x = torch.ones(2, 4, requires_grad=True)
    out = swap(nn.Identity(), swap(Linear(), x)).sum()
    assert manager.host_bytes == 0
    out.backward()


def test_the_order_of_copies(manager):
    model = net(4)
    for block in model.blocks:
        swap_wrapper(block)
    gradients(model, 1)
    with manager.record() as events:
        gradients(model, 1)
    names = list(dict.fromkeys(name for _, name in events))
    first, second, third = names
    assert events == [
        ("launch_offload", first),
        ("wait_offload", first),
        ("launch_offload", second),
        ("wait_offload", second),
        ("launch_offload", third),
        ("wait_offload", third),
        ("launch_load", third),  # begins while the last block, which never left, is in its backward
        ("wait_load", third),
        ("launch_load", second),
        ("wait_load", second),
        ("launch_load", first),
        ("wait_load", first),
    ]


def test_host_memory_is_that_of_one_step(manager):
    model = net(3)
    for block in model.blocks:
        swap_wrapper(block)
    gradients(model, 1)
    once = manager.host_bytes
    gradients(model, 5)
    assert once == manager.host_bytes > 0


@pytest.mark.parametrize("where", ["between the groups", "after"])
def test_a_write_to_what_was_saved_raises(where):
    x = torch.full((3,), 1.0, requires_grad=True)
    h = x * 1

    def function(x):
        y = x.exp()
        kept.append(y)
        return y * 2

    kept = []
    out = swap(function, h)
    if where == "after":
        out = swap(torch.cos, out)
    kept.pop().detach().mul_(3)
    out = swap(torch.cos, out)
    with pytest.raises(
        RuntimeError, match=r"A swapped tensor of shape \(3,\) .* was modified in place 1 time .* Write to a copy"
    ):
        out.sum().backward()
    out = swap(torch.cos, swap(function, h))
    kept.append(kept.pop() * 3)
    swap(torch.cos, out).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x.exp() * 2).cos().cos().sum(), x)[0])


def test_a_view_that_the_user_keeps_has_its_values():
    kept = []

    def function(x):
        y = x.exp()
        kept.append(y[1:])
        return y * y

    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    out = twice(function, x)
    assert torch.equal(kept[0], x.exp()[1:])
    out.sum().backward()
    assert torch.equal(kept[0], x.exp()[1:])


def test_a_policy_chooses_tensors(manager):
    x = torch.ones(64, dtype=torch.float64, requires_grad=True)
    shapes = []

    def policy(tensor):
        shapes.append(tuple(tensor.shape))
        return SWAP if tensor.dim() == 2 else SAVE

    out = twice(lambda x: x.exp().view(8, 8).sin().sum(0), x, policy_fn=policy)
    assert manager.host_bytes == 64 * 8 and set(shapes) == {(64,), (8, 8)}
    out.sum().backward()


def test_a_second_derivative_is_refused_by_name():
    x = torch.ones(3, requires_grad=True)
    function = lambda x: x.exp().sin()  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"\(create_graph=True\) .* run this forward without swap, or answer"):
        torch.autograd.grad(twice(function, x).sum(), x, create_graph=True)
    seconds = []
    for out in (function(x), swap(function, x, policy_fn=lambda tensor: SAVE)):
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        seconds += torch.autograd.grad(first.sum(), x)
    assert torch.equal(*seconds)


def test_a_retained_graph_comes_back_again():
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    out = twice(lambda x: x.exp().sin(), x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, x)[0], first)


def test_an_exception_in_forward_frees_the_buffers(manager):
    def function(x):
        x = x.exp().exp()
        if fail:
            raise LookupError("no such row")
        return x

    x, fail = torch.ones(100, requires_grad=True), False
    twice(function, x).sum().backward()
    once, fail = manager.host_bytes, True
    for _ in range(3):
        with pytest.raises(LookupError):
            swap(function, swap(torch.cos, x))
    fail = False
    twice(function, x).sum().backward()
    assert manager.host_bytes <= 2 * once


def test_a_graph_that_is_dropped_frees_its_buffers(manager):
    x = torch.ones(100, requires_grad=True)
    for _ in range(5):
        twice(lambda x: x.exp().exp(), x)
        if _ == 0:
            once = manager.host_bytes
    assert manager.host_bytes == once


def test_evaluation_between_steps():
    model = net(3, dropout=0.0)
    for block in model.blocks:
        swap_wrapper(block)
    expected = gradients(net(3, dropout=0.0), 2)
    x = torch.ones(4, 8, dtype=torch.float64)
    with torch.no_grad():
        model(x)
    model(x)  # with a graph that nobody uses
    assert all(map(torch.equal, gradients(model, 2), expected))


def test_two_micro_batches_in_flight():
    model, plain = net(3, dropout=0.0), net(3, dropout=0.0)
    for block in model.blocks:
        swap_wrapper(block)
    batches = [torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8) * scale for scale in (1, 2)]
    for each in (model, plain):
        first, second = (each(batch) for batch in batches)
        first.backward()
        second.backward()
    for got, expected in zip(model.parameters(), plain.parameters()):
        assert torch.equal(got.grad, expected.grad)


def test_the_order_that_the_user_chooses(manager):
    with pytest.raises(ValueError, match="takes two groups, got 'a' twice"):
        manager.set_forward_prefetch_layer("a", "a")


def test_tensors_without_memory_of_their_own():
    x = torch.ones(4, requires_grad=True)
    sparse = torch.eye(4).to_sparse()
    out = twice(lambda x: torch.sparse.mm(sparse, x.exp()[:, None]).squeeze(1), x)
    out.sum().backward()
    empty = torch.ones(0, 3, requires_grad=True)
    twice(lambda x: x.exp(), empty).sum().backward()
    assert empty.grad.shape == (0, 3)
    meta = torch.ones(3, device="meta", requires_grad=True)
    twice(lambda x: x.exp().sin(), meta).sum().backward()
    with FakeTensorMode():
        fake = torch.ones(3, requires_grad=True)
        twice(lambda x: x.exp().sin(), fake).sum().backward()


def test_tensors_of_a_dry_world_are_swapped(manager):
    with dry_world(2, 0):
        x = torch.ones(64, 8, device="meta", requires_grad=True)
        first, second = (torch.tanh(x.detach() + number) for number in range(2))
        assert link().address(first.untyped_storage()) != link().address(second.untyped_storage()) != 0
        assert link().address(first[1:].untyped_storage()) == link().address(first.untyped_storage())
        y = twice(lambda x: x.exp().sin(), x)
        assert manager.host_bytes == x.nbytes, "exp and sin save one storage"
        y.sum().backward()
        assert x.grad.shape == x.shape
        manager.release_host_memory()
    assert link().address(first.untyped_storage()) == 0


# ---- one tensor ----
@pytest.mark.parametrize("run", [checkpoint, functools.partial(swap, policy_fn=lambda tensor: SAVE)])
def test_a_tagged_tensor_is_swapped(run, manager):
    def function(x):
        return swap_tensor_wrapper(x.exp(), tag="exp").sin()

    x = torch.linspace(0, 1, 6, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(x.exp().sin().cos().sum(), x)
    out = swap(torch.cos, run(function, x))
    assert manager.host_bytes == 6 * 8
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_a_tag_outside_of_everything_is_refused():
    with pytest.raises(RuntimeError, match="swap_tensor_wrapper outside of checkpoint and swap: nothing here decides"):
        swap_tensor_wrapper(torch.ones(3))
    with pytest.raises(TypeError, match="swap_tensor_wrapper takes a tensor, got Linear; swap_wrapper takes modules"):
        swap_tensor_wrapper(nn.Linear(2, 2))
    swap_wrapper(nn.Linear(2, 2))


# ---- storages of the caller ----
def test_storages_by_hand(manager):
    tensor = torch.arange(6.0).view(2, 3)
    view, other = tensor[1:], torch.ones(3)
    manager.protect_alias_tensors("group", [other[1:]])
    for each in (tensor, view, other, torch.empty(0)):
        manager.add_storage("group", each)
    manager.launch_offload("group")
    with pytest.raises(RuntimeError, match="add_storage: group 'group' is leaving; add storages before launch_offload"):
        manager.add_storage("group", torch.ones(2))
    manager.wait_offload("group")
    assert tensor.untyped_storage().nbytes() == 0 and other.untyped_storage().nbytes() == 12
    manager.launch_load("group")
    manager.wait_load("group")
    assert torch.equal(tensor, torch.arange(6.0).view(2, 3)) and torch.equal(view, tensor[1:])
    assert manager.host_bytes == 24
    with pytest.raises(
        ValueError, match="launch_load: no group is named 'group'; there are: none. add_storage opens one"
    ):
        manager.launch_load("group")
    manager.add_storage("group", tensor)
    manager.launch_offload("group")
    manager.launch_load("group")
    manager.wait_load("group")
    assert torch.equal(view[0], torch.arange(3.0, 6.0))


def test_bad_input():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match="swap: function is called, and None can't be"):
        swap(None, x)
    with pytest.raises(
        TypeError, match=r"policy_fn returned True for a torch.float32 tensor of shape \(3,\); of a swap"
    ):
        swap(lambda x: x.exp().exp(), x, policy_fn=lambda tensor: True)
    with pytest.raises(ValueError, match='swap_wrapper: offload_to is "cpu", the host\'s memory, got .disk.'):
        swap_wrapper(nn.Linear(2, 2), offload_to="disk")
    with pytest.raises(TypeError, match="swap_wrapper takes a module, got int"):
        swap_wrapper(3)
