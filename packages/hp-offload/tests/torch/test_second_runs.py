"""What a second run is compared by, and what it finds as the first run found it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_offload import (
    CheckpointPolicy,
    apply_memory_plan,
    checkpoint,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    plan_memory,
    trace_saved,
)

CALLS: dict[str, Callable[..., Any]] = {"plain": lambda module, x: module(x), "again": checkpoint}


def leaf(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape).requires_grad_()


# ---- another path ----
def test_another_operation_that_saves_the_same_shapes_raises():
    turns = []

    def function(x):
        turns.append(1)
        return (x.sin() if len(turns) == 1 else x.cos()).exp()

    with pytest.raises(RuntimeError, match=r"function.* computed CosBackward0 where its forward computed SinBackward0"):
        checkpoint(function, leaf(2)).sum().backward()


def test_an_operation_that_saves_nothing_counts():
    turns = []

    def function(x):
        turns.append(1)
        return ((x if len(turns) == 1 else -x) + 1).exp()

    with pytest.raises(RuntimeError, match="saved what 3 operations computed where its forward saved what 2 did"):
        checkpoint(function, leaf(2), early_stop=False).sum().backward()


def test_the_order_of_operations_counts():
    turns = []

    def function(x):
        turns.append(1)
        order = (torch.neg, torch.relu) if len(turns) == 1 else (torch.relu, torch.neg)
        for each in order:
            x = each(x * 1)
        return x.exp()

    with pytest.raises(RuntimeError, match="it took another path"):
        checkpoint(function, leaf(2)).sum().backward()


def test_an_attribute_that_changes_before_backward_raises():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).double()
    out = checkpoint(model, leaf(2, 4))
    model[1].approximate = "tanh"
    with pytest.raises(
        RuntimeError, match="of Sequential.* computed GeluBackward0 with 'tanh' where its forward .* with 'none'"
    ):
        out.sum().backward()


def test_an_operation_that_comes_last_may_be_another():
    """What it saves is the same, and backward runs the node of the forward."""
    turns = []

    def function(x):
        turns.append(1)
        h = x.exp()
        return h.sin() if len(turns) == 1 else h.cos()

    x = leaf(3)
    checkpoint(function, x).sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_tensor_of_the_graph_around_is_not_walked(early_stop):
    x = leaf(3)
    h = x
    for _ in range(20):
        h = h.sin()
    kept = h * 2
    checkpoint(lambda y: (y * kept).exp(), h, early_stop=early_stop).sum().backward()
    found, x.grad = x.grad, None
    y = x
    for _ in range(20):
        y = y.sin()
    ((y * (y * 2)).exp()).sum().backward()
    assert torch.equal(found, x.grad)


def test_what_wraps_a_module_in_the_forward_alone_is_passed_over():
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            return a.view_as(a), b.view_as(b)

        @staticmethod
        def backward(ctx, a, b):
            return a, b

    turns = []

    def function(x):
        turns.append(1)
        a, b = x.sin() + 1, x.cos() + 1
        if len(turns) == 1:
            a, b = Both.apply(a, b)
        return a.exp() * b.tanh()

    x = leaf(3)
    checkpoint(function, x, early_stop=False).sum().backward()
    found, x.grad = x.grad, None
    function(x).sum().backward()
    assert torch.equal(found, x.grad)


# ---- the end of the second run ----
@pytest.mark.parametrize("handler", ["returns", "computes", "raises"])
def test_a_function_that_catches_everything(handler):
    def function(x):
        try:
            return x.exp().sin()
        except BaseException:
            if handler == "raises":
                raise ValueError("cleaned up") from None
            return x.cos().exp().sin() if handler == "computes" else x

    x = leaf(3)
    checkpoint(function, x).sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


# ---- state ----
class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), norm, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class Counting(nn.Module):
    """Uses a buffer that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        self.count.add_(1)
        self.seen = self.seen + x.detach().mean(0)
        return (x * self.count.clone() + self.seen.sin()).exp()


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        return (x * torch.rand(4, generator=self.generator, dtype=x.dtype)).exp()


def outcome(module: nn.Module, call: Callable[..., Any]) -> list[torch.Tensor]:
    """Gradients of three steps, of which the second has two forwards before its backwards, and the buffers after."""
    found = []
    for micros in (1, 2, 1):
        outs = []
        for micro in range(micros):
            x = (leaf(3, 4).detach() + micro).requires_grad_()
            outs.append((call(module, x).square().sum(), x))
        for out, x in reversed(outs):
            out.backward()
            found.append(x.grad)
    return [*found, *(each.grad.clone() for each in module.parameters()), *module.buffers()]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Normed(nn.BatchNorm1d(4)),
    "batch norm, cumulative": lambda: Normed(nn.BatchNorm1d(4, momentum=None)),
    "batch norm in evaluation": lambda: Normed(nn.BatchNorm1d(4)).eval(),
    "a buffer that is used": Counting,
    "a generator": Drawing,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("way", ["module", "closure", "argument", "excluded"])
def test_a_step_counts_once(kind, way):
    torch.manual_seed(0)
    module = MODULES[kind]().double()
    ways = {
        "module": checkpoint,
        "closure": lambda module, x: checkpoint(lambda x: module(x), x),
        "argument": lambda module, x: checkpoint(lambda part, x: part(x), module, x),
        "excluded": checkpoint,
    }
    plain, again = copy.deepcopy(module), module
    if kind == "a generator":
        again.generator = torch.Generator().manual_seed(1)
    if way == "excluded":
        checkpoint_exclude_wrapper(again)
        again = nn.Sequential(again)
    expected, found = outcome(plain, CALLS["plain"]), outcome(again, ways[way])
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_a_generator_that_is_an_argument():
    generator = torch.Generator().manual_seed(3)
    x = leaf(4)
    out = checkpoint(lambda x, generator: (x * torch.rand(4, generator=generator)).exp(), x, generator)
    after = generator.get_state()
    out.sum().backward()
    assert torch.equal(generator.get_state(), after)
    factor = torch.rand(4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(x.grad, (x * factor).exp() * factor)


def test_a_buffer_that_later_calls_write_to_is_named():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 2:
                self.count.add_(1)
            return (x + self.count).exp()

    module = Late()
    checkpoint(module, leaf(3)).sum().backward()
    with pytest.raises(RuntimeError, match="wrote to the buffer 'count' of Late. It did not in its first call"):
        checkpoint(module, leaf(3)).sum().backward()
    checkpoint(module, leaf(3)).sum().backward()


class Cached(nn.Module):
    """A layer that appends its keys to a cache, as a decoder's do."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(4, 4)

    def forward(self, x, past_key_values):
        keys, values = past_key_values.update(self.keys(x)[:, None], x[:, None], 0)
        return (x @ keys[:, 0].transpose(-2, -1)).softmax(-1) @ values[:, 0]


def test_a_cache_is_as_the_first_run_found_it():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = Cached().double()
    found = []
    for call in CALLS.values():
        module.zero_grad()
        cache, x = transformers.DynamicCache(), leaf(2, 3, 4)
        run = module if call is CALLS["plain"] else functools.partial(checkpoint, module)
        out = run(x, past_key_values=cache) + run(x, past_key_values=cache)
        out.square().sum().backward()
        found.append([x.grad, module.keys.weight.grad, cache.layers[0].keys.detach()])
        assert cache.get_seq_length() == 6
    assert all(map(torch.equal, *found))


# ---- policies and plans ----
class Products(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.k.requires_grad_(not frozen)

    def forward(self, x):
        return self.q(x) @ self.k(x).transpose(-2, -1)


def keep_products(ctx, op, *args, **kwargs):
    kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("attention", [False, True])
def test_biased_projections_that_a_policy_keeps(frozen, attention):
    module = Products(frozen).double()
    if attention:
        forward = lambda x: F.scaled_dot_product_attention(module.q(x), module.k(x), x)  # noqa: E731
        function = functools.partial(lambda owner, x: forward(x), module)
    else:
        function = module
    for _ in range(3):
        x = leaf(2, 6, 8)
        checkpoint(function, x, policy_fn=keep_products).sum().backward()
        found, x.grad = x.grad, None
        function(x).sum().backward()
        assert torch.equal(found, x.grad)


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_a_linear_layer_whose_input_is_no_contiguous_tensor_follows_its_plan(share):
    """Kernels copy such an input; the trace has to save what the planned block saves."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

        def forward(self, x):
            h = self.up(x).sin().transpose(1, 2)
            return x + self.down((h * h.exp()).transpose(1, 2)).tanh()

    model = nn.Sequential(*(Block() for _ in range(3))).double()
    planned, x = copy.deepcopy(model), leaf(2, 6, 8)
    saved = trace_saved(planned, (x,))
    apply_memory_plan(planned, plan_memory(saved, budget=int(share * sum(each.bytes for each in saved)), bandwidth=1e9))
    for _ in range(2):
        x.grad = None
        planned(x).sum().backward()
        found, x.grad = x.grad, None
        model(x).sum().backward()
        assert torch.equal(found, x.grad)


def test_a_wrapped_block_with_batch_norm_under_a_policy():
    torch.manual_seed(0)
    plain = Normed(nn.BatchNorm1d(4)).double()
    again = checkpoint_wrapper(copy.deepcopy(plain), keep_products)
    assert all(map(torch.equal, outcome(again, CALLS["plain"]), outcome(plain, CALLS["plain"])))
