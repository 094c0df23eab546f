"""Static shapes: what is dropped, where, and against one process with the same rule."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hp_dtensor import init_device_mesh
from hp_moe import Drops, ExpertParallel, GroupedExperts, report_drops
from hp_platform.communication.checks import observers
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

HIDDEN, EXPERTS, CHOICES = 8, 5, 2


def inputs(rank: int, tokens: int):
    generator = torch.Generator().manual_seed(rank)
    skew = torch.tensor([4.0, 1.0, 1.0, 1.0, 0.1])
    chosen = torch.multinomial(skew.expand(tokens, -1), CHOICES, generator=generator)
    x, weights = (torch.randn(tokens, width, generator=generator, dtype=torch.float64) for width in (HIDDEN, CHOICES))
    return x.to(device_type()).requires_grad_(), chosen.to(device_type()), weights.to(device_type()).requires_grad_()


def build():
    torch.manual_seed(0)
    return GroupedExperts(HIDDEN, 4, EXPERTS).double().to(device_type())


def written_out(experts, x, chosen, weights, capacity):
    """Compute the tokens of one rank, each expert until it is full; return the sums, and what was dropped."""
    seats, dropped, out = [capacity] * EXPERTS, [0] * EXPERTS, []
    for token, numbers, factors in zip(x, chosen.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for expert, factor in zip(numbers, factors, strict=True):
            if not seats[expert]:
                dropped[expert] += 1
                continue
            seats[expert] -= 1
            w1, w2, w3 = (getattr(experts, name)[expert] for name in ("w1", "w2", "w3"))
            total = total + factor * (w2 @ (F.silu(w1 @ token) * (w3 @ token)))
        out.append(total)
    return torch.stack(out), tuple(dropped)


def spread_over_ranks(capacity: int, **options):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    return parallelize_module(build(), mesh, ExpertParallel(capacity=capacity, **options))


@on_ranks(2)
@pytest.mark.parametrize("capacity", [1, 3, 20])
def test_the_last_are_dropped_as_in_one_process(capacity):
    rank, single, spread = dist.get_rank(), build(), spread_over_ranks(capacity)
    model = torch.nn.Sequential(spread)
    for _ in range(2):  # the first call tells ranks' settings, the second asks nobody
        drops = []
        for each in range(2):
            x, chosen, weights = inputs(each, 7 + each)
            out, dropped = written_out(single, x, chosen, weights, capacity)
            out.square().sum().backward()
            drops.append(dropped)
            if each == rank:
                expected, own = out, (x, weights)
        x, chosen, weights = inputs(rank, 7 + rank)
        got = checkpoint(spread._expert_layer, spread, x, chosen, weights, use_reentrant=False)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        got.square().sum().backward()
        for one, other in zip((x, weights), own, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("hp_moe").addHandler(handler)
        try:
            assert report_drops(model) == {"0": Drops(drops[rank], chosen.numel())}
        finally:
            logging.getLogger("hp_moe").removeHandler(handler)
        count = sum(drops[rank])
        assert [line.partition(" at ")[0] for line in lines] == (
            [f"0: dropped {count} of {chosen.numel()} choices"] if count else []
        )
        assert report_drops(model) == {"0": Drops((0,) * EXPERTS, 0)}
    for name in ("w1", "w2", "w3"):
        got = getattr(spread, name).grad.full_tensor()
        torch.testing.assert_close(got, getattr(single, name).grad, rtol=1e-12, atol=1e-12, msg=name)


@on_ranks(2)
def test_shapes_are_static_and_no_counts_travel():
    spread, sizes = spread_over_ranks(3), []
    note = lambda kind, size, group: sizes.append(size) if kind == "all_to_all" else None  # noqa: E731
    spread._expert_layer(spread, *inputs(0, 2))
    spread._expert_layer(spread, *[each.detach() for each in inputs(0, 2)])  # of another kind: asks once more
    for tokens in (7, 4, 0):
        inputs_ = inputs(dist.get_rank(), tokens) if tokens % 2 else [each[:tokens].detach() for each in inputs(0, 7)]
        observers.append(note)
        try:
            spread._expert_layer(spread, *inputs_)
        finally:
            observers.remove(note)
    row = HIDDEN * 8
    experts = (3, 2)[dist.get_rank()]
    assert sizes == [EXPERTS * 3 * row, 2 * experts * 3 * row] * 3  # a row a seat, there and back


@on_ranks(2)
def test_a_wrong_number_is_not_passed_over():
    spread = spread_over_ranks(3)
    x, chosen, weights = inputs(dist.get_rank(), 6)
    spread._expert_layer(spread, x, chosen, weights)
    chosen[0, 0] = EXPERTS
    assert not spread._expert_layer(spread, x, chosen, weights).isfinite().any()
    with pytest.raises(ValueError, match=rf"Experts: .*rank {dist.get_rank()} has tokens of shape \(6, 4\); its"):
        spread._expert_layer(spread, x[:, :4], chosen, weights)
    if device_type() == "cpu":
        with pytest.raises(ValueError, match=r"GroupedExperts: rank 1 has tokens of shape \(6, 4\); its"):
            spread._expert_layer(spread, x[:, :4] if dist.get_rank() else x, chosen, weights)
    rank = dist.get_rank()
    spread = spread_over_ranks(3 + rank)
    with pytest.raises(ValueError, match="rank 0 has .*capacity=3; rank 1 has .*capacity=4; all ranks must have the"):
        spread._expert_layer(spread, x, chosen.clamp(max=EXPERTS - 1), weights)


@on_ranks(2)
@pytest.mark.skipif(device_type() != "cpu", reason="on other devices the host waits for no rank")
@pytest.mark.parametrize("change", ["mode", "dtype"])
def test_a_rank_that_computes_in_another_way_is_refused_on_all(change):
    spread, (x, chosen, weights) = spread_over_ranks(3), inputs(dist.get_rank(), 6)
    first = spread._expert_layer(spread, x, chosen, weights)
    if change == "dtype":
        spread, x = (spread.float(), x.float()) if dist.get_rank() else (spread, x)
    expected = (
        "rank 0 has .*gradients of tokens.*; rank 1 has .*no grad" if change == "mode" else "rank 1 has .*float32"
    )
    with torch.set_grad_enabled(change != "mode" or dist.get_rank() == 0):
        with pytest.raises(ValueError, match=expected):
            spread._expert_layer(spread, x, chosen, weights)
    spread = spread.double()
    assert torch.equal(spread._expert_layer(spread, x.double(), chosen, weights).isfinite(), first.isfinite())


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_drops_are_counted_once_in_training_alone(reentrant):
    spread, (x, chosen, weights) = spread_over_ranks(1), inputs(dist.get_rank(), 5)
    for training in (True, False):
        spread.train(training)
        out = checkpoint(spread._expert_layer, spread, x, chosen, weights, use_reentrant=reentrant)
        out.sum().backward()
        (drops,) = report_drops(spread).values()
        assert drops.choices == (10 if training else 0)


def test_arguments_that_do_not_go_with_a_capacity_are_refused():
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"capacity": 0}, "an int of 1 or more, got 0; for a factor, compute it"),
        ({"capacity": 1.25}, "got 1.25; for a factor, compute it"),
        (
            {"capacity": 2, "combine": "exact"},
            "does not go with combine='exact': what is dropped depends on the number",
        ),
        ({"capacity": 2, "token_dispatcher": "all_gather"}, "with token_dispatcher='all_gather': its shapes depend"),
        ({"capacity": 2, "chunks": 2}, "does not go with chunks=2: each part"),
        ({"capacity": 2, "slots": 1}, "does not go with slots=1: a replica is for what a capacity drops"),
    ]
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            ExpertParallel(**options)
    assert eval(repr(ExpertParallel(capacity=3))).capacity == 3
    assert ExpertParallel(capacity=math.ceil(1.25 * 6 * CHOICES / EXPERTS)).capacity == 3
