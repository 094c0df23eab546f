"""Policies on operations: the bits of the plain program, by a table of heavy operations or by torch's modes."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from offload_models import Block, gradients, net, same_bits
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

from hp_offload import (
    CheckpointPolicy,
    SwapManager,
    checkpoint,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    swap_wrapper,
)
from hp_platform.torch import heavy

aten = torch.ops.aten
SAVE, RECOMPUTE, SWAP = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SWAP


def products(answer):
    """A policy that answers so for matrix products."""
    return lambda ctx, op, *args, **kwargs: answer if op in (aten.addmm.default, aten.mm.default) else RECOMPUTE


@pytest.fixture
def computed(monkeypatch):
    """The shapes of what torch's linear computes from here on."""
    shapes, native = [], F.linear

    def counting(*args):
        shapes.append(tuple(args[1].shape))
        return native(*args)

    monkeypatch.setattr(heavy.F, "linear", counting)
    return shapes


def test_the_values_are_torchs():
    for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_RECOMPUTE):
        assert policy == TorchPolicy[policy.name].value
    assert CheckpointPolicy.PREFER_RECOMPUTE == TorchPolicy.PREFER_RECOMPUTE.value
    assert CheckpointPolicy.MUST_SWAP == 4


@pytest.mark.parametrize("answer", [SAVE, SWAP, CheckpointPolicy.PREFER_SAVE, True, TorchPolicy.MUST_SAVE])
def test_products_are_kept(answer, computed):
    model = same_bits(lambda block: checkpoint_wrapper(block, products(answer)))
    del computed[:]
    gradients(model, 1)
    assert computed.count((16, 8)) == 3, "once in forward, handed back in backward"


@pytest.mark.parametrize("answer", [RECOMPUTE, False])
def test_products_are_computed_again(answer, computed):
    model = same_bits(lambda block: checkpoint_wrapper(block, products(answer)))
    del computed[:]
    gradients(model, 1)
    assert computed.count((16, 8)) == 6


def test_a_policy_is_asked_once_about_stand_ins(computed):
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append((op, {value.device.type for value in args if isinstance(value, torch.Tensor)}))
        assert ctx.op_output is None or not isinstance(ctx.op_output, torch.Tensor) or ctx.op_output.is_meta
        return op is aten.addmm.default and args[2].shape[-1] == 16

    block = checkpoint_wrapper(Block().double(), policy)
    x = torch.ones(4, 8, dtype=torch.float64, requires_grad=True)
    block(x).sum().backward()
    first = len(asked)
    for _ in range(2):
        block(x).sum().backward()
    assert len(asked) == first and all(devices <= {"meta"} for _, devices in asked)
    del computed[:]
    block(x).sum().backward()
    assert computed.count((16, 8)) == 1 and computed.count((8, 16)) == 2


def test_one_module_that_is_called_twice_has_two_sites(computed):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(4, 4)

        def forward(self, x):
            return self.map(self.map(x).sin()).sin()

    answers = iter([RECOMPUTE, SAVE])
    policy = lambda ctx, op, *a, **k: next(answers) if op is aten.addmm.default else RECOMPUTE  # noqa: E731
    plain = Twice().double()
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4).requires_grad_()
    expected = torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()])
    for _ in range(2):
        del computed[:]
        out = checkpoint(plain, x, policy_fn=policy)
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), [x, *plain.parameters()]), expected))
    assert len(computed) == 3, "two in forward; the second is handed back"


def test_a_retained_graph_hands_back_again():
    block = Block().double()
    policy = products(SAVE)
    for _ in range(2):
        x = torch.ones(4, 8, dtype=torch.float64, requires_grad=True)
        out = checkpoint(block, x, policy_fn=policy).sum()
        first = torch.autograd.grad(out, x, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(out, x, retain_graph=_ == 1)[0], first) if _ else True


def test_an_output_that_was_written_to_raises():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(4, 4)

        def forward(self, x):
            return F.relu_(self.map(x)).exp()

    module, policy = Written(), products(SAVE)
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="has been mutated"):  # torch's, in the first call
        checkpoint(module, x, policy_fn=policy).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"of map#0 in Written.*: it was modified in place .*\(1 time\): do not keep this output, or"
    ):
        checkpoint(module, x, policy_fn=policy).sum().backward()
    expected = torch.autograd.grad(module(x).sum(), x)[0]
    copied = lambda x: F.relu(module.map(x)).exp()  # noqa: E731
    for function, answer in ((module, RECOMPUTE), (copied, SAVE)):
        for _ in range(2):
            out = checkpoint(function, x, policy_fn=products(answer)).sum()
            assert torch.equal(torch.autograd.grad(out, x)[0], expected)


def test_another_branch_names_the_sites():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.turns = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x):
            self.turns += 1
            return (self.right if self.turns == 4 else self.left)(x).exp()

    module, policy = Routed(), products(SAVE)
    x = torch.ones(2, 4, requires_grad=True)
    checkpoint(module, x, policy_fn=policy).sum().backward()
    out = checkpoint(module, x, policy_fn=policy)
    with pytest.raises(
        RuntimeError, match=r"Routed.* reached right#0 as heavy operation 0 where its forward reached left#0"
    ):
        out.sum().backward()


def test_excluded_modules_have_no_part_in_a_policy():
    def change(block):
        checkpoint_exclude_wrapper(block.up)
        checkpoint_wrapper(block, products(SAVE))

    same_bits(change)


# ---- what no table can say ----
def test_other_operations_fall_back_to_torchs_modes_and_say_so():
    policy = lambda ctx, op, *a, **k: SAVE if op is aten.gelu.default else RECOMPUTE  # noqa: E731
    with pytest.warns(
        UserWarning, match=r"policy_fn of Block cannot become a table .*: it keeps aten.gelu.default outside"
    ):
        same_bits(lambda block: checkpoint_wrapper(block, policy))


def test_keeping_everything_keeps_no_random_numbers():
    with pytest.warns(UserWarning, match="cannot become a table"):
        same_bits(lambda block: checkpoint_wrapper(block, lambda ctx, op, *a, **k: SAVE))


def test_a_policy_that_looks_at_values_falls_back_and_says_so():
    def policy(ctx, op, *args, **kwargs):
        return SAVE if op is aten.addmm.default and args[1].sum() > 0 else RECOMPUTE

    with pytest.warns(UserWarning, match=r"policy_fn of Block .*: it looks at the values of aten.addmm.default"):
        same_bits(lambda block: checkpoint_wrapper(block, policy))


def test_swapping_what_no_module_computes_is_refused():
    policy = lambda ctx, op, *a, **k: SWAP if op is aten.gelu.default else RECOMPUTE  # noqa: E731
    with pytest.raises(
        NotImplementedError,
        match=r"of Block.* MUST_SWAP for aten.gelu.default: only .* by `swap`, or answer MUST_RECOMP",
    ):
        checkpoint(Block(), torch.ones(4, 8), policy_fn=policy)
    same_bits(swap_wrapper)
    same_bits(lambda block: checkpoint_wrapper(block, lambda ctx, op, *a, **k: RECOMPUTE))


@pytest.mark.parametrize("answer", ["keep", None, 7, 1.0])
def test_nonsense_is_refused(answer):
    with pytest.raises(
        TypeError, match=r"policy_fn returned .* for aten\..*; it returns a CheckpointPolicy: MUST_SAVE"
    ):
        checkpoint(Block(), torch.ones(4, 8), policy_fn=lambda ctx, op, *a, **k: answer)


# ---- mixes ----
@pytest.mark.parametrize("cases", [40, pytest.param(200, marks=pytest.mark.thorough)])
def test_mixes_have_the_same_bits(cases):
    """Each block at random: left alone, in full, by a table, on the host, parts excluded or nested."""
    draw, manager = random.Random(0), SwapManager()
    model = net(2, dropout=0.25)
    expected = gradients(model, 2)

    def by_table(answers):
        given = {(16, 8): answers[0], (8, 16): answers[1]}

        def policy(ctx, op, *args, **kwargs):
            return given[tuple(args[2].t().shape)] if op is aten.addmm.default else RECOMPUTE

        return policy

    for case in range(cases):
        other = copy.deepcopy(model)
        for block in other.blocks:
            for part in ("norm", "up", "down", "dropout"):
                kind = draw.choice(["", "", "checkpoint", "exclude", "exclude less", "swap"])
                if kind == "checkpoint":
                    checkpoint_wrapper(getattr(block, part))
                elif kind.startswith("exclude"):
                    checkpoint_exclude_wrapper(getattr(block, part), save_output=kind == "exclude")
                elif kind == "swap":
                    swap_wrapper(getattr(block, part), group_swap=draw.random() < 0.5)
            kind = draw.choice(["", "full", "full", "table", "table", "table", "swap"])
            options = {"early_stop": draw.random() < 0.7, "swap_inputs": draw.random() < 0.3}
            if kind == "full":
                checkpoint_wrapper(block, **options)
            elif kind == "table":
                answers = draw.choices([*CheckpointPolicy], k=2)
                checkpoint_wrapper(block, by_table(answers), group_swap=draw.random() < 0.5, **options)
            elif kind == "swap":
                swap_wrapper(block)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = gradients(other, 2)
        assert all(map(torch.equal, found, expected)), f"case {case}"
    assert manager.host_bytes < 1_000_000
