"""Functions that modules call by name: kept by a policy or a plan, they run once, and gradients have the same bits."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from hp_offload import CheckpointPolicy, apply_memory_plan, checkpoint, checkpoint_exclude_wrapper, trace_saved
from hp_offload.saved import MemoryPlan
from hp_offload.torch.regions import functions

aten = torch.ops.aten
KEEP, RECOMPUTE, SWAP = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SWAP
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default


class Ran(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[object] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """Attention between maps, all by name, with what is drawn at random before and after."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Parameter(torch.randn(24, 8)), nn.Parameter(torch.randn(8, 8))
        self.dropout = dropout

    def forward(self, x):
        batch, length, size = x.shape
        heads = F.linear(F.dropout(x, 0.1), self.qkv).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = (each.cos() for each in heads)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + F.dropout(h.transpose(1, 2).reshape(batch, length, size) @ self.out, 0.1).sin()


class Shared(nn.Module):
    """Attention of three views of one storage, as expanded heads."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.map(x).view(*x.shape[:2], 6, 4).transpose(1, 2).chunk(3, 1)
        k = k[:, :1].expand_as(q)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape).sin()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(5, 4, 3, padding=1), nn.ConvTranspose1d(4, 5, 3, padding=1)

    def forward(self, x):
        return self.second(self.first(x.sin()).tanh()).sin()


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x):
        h = torch.bmm(x.sin(), self.weight).cos()
        h = torch.einsum("bij,bjk->bik", h, self.weight).cos()
        h = torch.baddbmm(h, h, self.weight.mT).cos()
        return (h.matmul(self.weight[0]) @ self.weight[1]).cos()


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)

    def forward(self, x):
        return (self.table(torch.arange(5) % 7) * x).sin()


CASES = {
    "attention": (Attention, FLASH),
    "attention of views": (Shared, FLASH),
    "linear": (Attention, aten.mm.default),
    "convolution": (Convolutions, aten.convolution.default),
    "products": (Products, aten.bmm.default),
    "baddbmm": (Products, aten.baddbmm.default),
    "matmul": (Products, aten.mm.default),
    "embedding": (Embeddings, aten.embedding.default),
}


def only(kept, answer=KEEP):
    return lambda ctx, op, *args, **kwargs: answer if op is kept else RECOMPUTE


def gradients(call, model, steps=3):
    """The gradients of some steps, and the operations that the last one ran."""
    torch.manual_seed(1)
    found = []
    for step in range(steps):
        x = torch.linspace(-1, 1, 2 * 5 * 8, dtype=torch.float64).view(2, 5, 8).mul(step + 1).requires_grad_()
        model.zero_grad()
        with Ran() as ran:
            call(x * 1).square().sum().backward()
        found += [x.grad, *(parameter.grad for parameter in model.parameters())]
    return found, ran.counts


def build(kind):
    torch.manual_seed(0)
    return CASES[kind][0]().double()


@pytest.mark.parametrize("answer", [KEEP, SWAP])
@pytest.mark.parametrize("kind", CASES)
def test_what_is_kept_runs_once(kind, answer):
    model, op = build(kind), CASES[kind][1]
    expected, plain = gradients(model, model)
    full, again = gradients(lambda x: checkpoint(model, x, early_stop=False), model)
    policy = only(op, answer)
    kept, once = gradients(lambda x: checkpoint(model, x, policy_fn=policy, early_stop=False), model)
    assert all(map(torch.equal, full, expected)) and all(map(torch.equal, kept, expected))
    assert plain[op] <= once[op] < again[op]


def test_a_function_of_no_module():
    model = nn.ParameterList([torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8)])
    function, policy = lambda x: torch.mm(x.flatten(0, 1), model[0]).sin(), only(aten.mm.default)
    expected, plain = gradients(function, model)
    kept, once = gradients(lambda x: checkpoint(function, x, policy_fn=policy), model)
    assert all(map(torch.equal, kept, expected)) and once[aten.mm.default] == plain[aten.mm.default]


def test_autocast():
    model, policy = build("products").float(), only(aten.bmm.default)

    def cast(run):
        def call(x):
            with torch.autocast("cpu", torch.bfloat16):
                return run(x.float())

        return call

    expected, plain = gradients(cast(model), model)
    kept, once = gradients(cast(lambda x: checkpoint(model, x, policy_fn=policy)), model)
    assert all(map(torch.equal, kept, expected))
    assert once[aten.bmm.default] == plain[aten.bmm.default]


def test_random_numbers_that_a_function_drew_are_drawn_after_it(monkeypatch):
    """An attention that drops out by itself, as those of accelerators do."""

    def attention(query, key, value, mask=None, dropout_p=0.0):
        if has_torch_function((query, key, value)):
            arguments = {"mask": mask, "dropout_p": dropout_p}
            return handle_torch_function(attention, (query, key, value), query, key, value, **arguments)
        return torch.native_dropout(query, dropout_p, True)[0]

    monkeypatch.setitem(functions._SITES, attention, "scaled_dot_product_attention()")
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, is_causal, **options: attention(*args, **options)
    )
    torch.manual_seed(0)
    model, policy = Attention(0.4).double(), only(aten.native_dropout.default)
    expected, plain = gradients(model, model)
    kept, once = gradients(lambda x: checkpoint(model, x, policy_fn=policy, early_stop=False), model)
    assert all(map(torch.equal, kept, expected))
    assert once[aten.native_dropout.default] == plain[aten.native_dropout.default] == 1


def test_an_attention_of_many_operations_is_no_site():
    """On CPU with dropout: what it saves beside its output is larger than its output."""
    model, policy = build("attention"), only(aten.bmm.default)
    model.dropout = 0.4
    expected, plain = gradients(model, model)
    with pytest.warns(
        UserWarning, match="policy_fn of Attention .* keeps aten.bmm.default outside of heavy operations"
    ):
        kept, once = gradients(lambda x: checkpoint(model, x, policy_fn=policy), model)
    assert all(map(torch.equal, kept, expected)) and once[aten.bmm.default] == plain[aten.bmm.default]


def test_nested_and_excluded_parts():
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = Attention(), Shared(), Attention()

        def forward(self, x):
            x = checkpoint(self.first, x)
            return self.third(checkpoint(self.second, x))

    torch.manual_seed(0)
    model = Three().double()
    plain = nn.Sequential(model.first, model.second, model.third)
    expected, _ = gradients(plain, plain)
    checkpoint_exclude_wrapper(model.third)
    for policy in (only(FLASH), only(aten.mm.default), only(aten.mm.default, SWAP)):
        found, _ = gradients(lambda x, policy=policy: checkpoint(model, x, policy_fn=policy), model)
        assert all(map(torch.equal, found, expected))


def test_a_retained_graph_and_a_second_derivative():
    model, policy = build("products"), only(aten.bmm.default)
    x = torch.linspace(-1, 1, 80, dtype=torch.float64).view(2, 5, 8).requires_grad_()
    results = []
    for call in (model, *[lambda x: checkpoint(model, x, policy_fn=policy)] * 2):
        out = call(x).sum()
        (first,) = torch.autograd.grad(out, x, retain_graph=True)
        # In a policy's first call torch's modes allow one backward.
        again = first if len(results) == 1 else torch.autograd.grad(out, x, create_graph=True)[0]
        second = again if len(results) == 1 else torch.autograd.grad(again.square().sum(), x)[0]
        results.append((first, again, second))
    assert all(map(torch.equal, results[0], results[2]))


def test_a_backward_inside():
    model, policy = nn.ParameterList([torch.randn(8, 8), torch.randn(8)]).double(), only(aten.addmm.default)

    def function(x):
        h = x.flatten(0, 1) * 1
        out = torch.addmm(model[1], h, model[0]).sin()
        if first:  # in a policy's first call torch's modes allow one backward
            return out
        (inner,) = torch.autograd.grad(out.square().sum(), h, retain_graph=True)
        return out * inner.detach()

    call, first = lambda x: checkpoint(function, x, policy_fn=policy, early_stop=False), True
    gradients(call, model, 1)
    first = False
    (expected, plain), (found, once) = gradients(function, model), gradients(call, model)
    assert all(map(torch.equal, found, expected))
    assert once[aten.addmm.default] == plain[aten.addmm.default] + 1, "for the gradient in the second run"


def test_a_second_derivative_inside_recomputes():
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(2, 8).requires_grad_()

    def function(x):
        out = torch.mm(x, weight).sin()
        return out if first else out * torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]

    def call(policy):
        return torch.autograd.grad(checkpoint(function, x * 1, policy_fn=policy).sum(), (x, weight))

    keeping, first = only(aten.mm.default), True
    call(keeping)
    first = False
    with pytest.raises(NotImplementedError, match=r"through mm\(\), .* answer MUST_RECOMPUTE"):
        call(keeping)
    expected = torch.autograd.grad(function(x * 1).sum(), (x, weight))
    assert all(map(torch.equal, call(only(aten.mm.default, RECOMPUTE)), expected))


def test_a_write_to_a_kept_output_raises():
    function, policy = lambda x, w: torch.bmm(x, w).mul_(2).sin(), only(aten.bmm.default)
    x, w = (torch.ones(2, 3, 3, requires_grad=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="has been mutated"):  # torch's, in the first call
        checkpoint(function, x, w, policy_fn=policy).sum().backward()
    with pytest.raises(RuntimeError, match=r"The output of bmm\(\)#0 in .*: it was modified in place"):
        checkpoint(function, x, w, policy_fn=policy).sum().backward()


def test_another_branch_names_the_functions():
    turns = []

    def function(x):
        turns.append(0)
        return torch.mm(x, x).sin() if len(turns) != 4 else torch.matmul(x, x).sin()

    x, policy = torch.ones(3, 3, requires_grad=True), only(aten.mm.default)
    checkpoint(function, x, policy_fn=policy).sum().backward()
    out = checkpoint(function, x, policy_fn=policy)
    with pytest.raises(
        RuntimeError, match=r"reached matmul\(\)#0 as heavy operation 0 where its forward reached mm\(\)#0"
    ):
        out.sum().backward()


def test_nothing_looks_for_functions_unless_one_is_kept(monkeypatch):
    asked = []
    model, policy = build("attention"), only(aten.addmm.default)
    call = lambda x: checkpoint(model, x, policy_fn=policy)  # noqa: E731
    gradients(call, model, 1)
    monkeypatch.setattr(functions.Calls, "__torch_function__", lambda *args, **kwargs: asked.append(args))
    gradients(call, model)
    assert not asked


# ---- plans ----
def test_random_plans_of_attention_have_the_same_bits():
    torch.manual_seed(0)
    draw, model = random.Random(0), nn.Sequential(*(Attention() for _ in range(3))).double()
    expected, plain = gradients(model, model)
    saved = trace_saved(model, (torch.zeros(2, 5, 8, dtype=torch.float64),))
    counts = set()
    for _ in range(12):
        policies = {
            each.site: draw.choice([KEEP, SWAP, RECOMPUTE]) if each.swappable and each.alias_of is None else KEEP
            for each in saved
        }
        torch.manual_seed(0)
        other = nn.Sequential(*(Attention() for _ in range(3))).double()
        other.load_state_dict(model.state_dict())
        apply_memory_plan(other, MemoryPlan(policies, 0, 0.0))
        found, ran = gradients(other, other)
        assert all(map(torch.equal, found, expected))
        counts.add(ran[FLASH] - plain[FLASH])
    assert 0 in counts and len(counts) > 1, "attentions whose output a plan keeps do not run again"
