"""The ways of tokens to their experts: the same results, and the bytes that each sends."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import Wraps

from hp_dtensor import init_device_mesh
from hp_moe import ExpertParallel, FeedForward, GroupedExperts, MoE, overlap_experts
from hp_platform.communication.checks import observers
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

TOKENS, HIDDEN, EXPERTS, CHOICES = 6, 8, 6, 3


def mesh_of(style: ExpertParallel, size: int):
    if style.mesh_axes == 2:
        return init_device_mesh(device_type(), (2, size // 2), mesh_dim_names=("oep", "iep"))
    return init_device_mesh(device_type(), (size,), mesh_dim_names=("ep",))


def inputs(rank: int, seed: int = 0, tokens: int = TOKENS):
    """Return tokens, choices and weights of a rank; rank 1 has fewer tokens, and none wants the last expert."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    count = tokens - 2 if rank == 1 else tokens
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:CHOICES] for _ in range(count)])
    values = (torch.randn(count, width, generator=generator, dtype=torch.float64) for width in (HIDDEN, CHOICES))
    x, weights = (each.to(device_type()).requires_grad_() for each in values)
    return x, chosen.to(device_type()), weights


def build():
    torch.manual_seed(0)
    return GroupedExperts(HIDDEN, 4, EXPERTS).double().to(device_type())


def written_out(experts, x, chosen, weights):
    """Compute the sum over choices of weight times expert."""
    out = []
    for token, numbers, factors in zip(x, chosen.tolist(), weights, strict=True):
        each = [
            experts.w2[e] @ (torch.nn.functional.silu(experts.w1[e] @ token) * (experts.w3[e] @ token)) for e in numbers
        ]
        out.append((torch.stack(each) * factors.unsqueeze(-1)).sum(0))
    return torch.stack(out)


def compare(style, **options):
    """Compare a style's outputs and gradients, of two calls, with one process that has all ranks' tokens."""
    size, rank = dist.get_world_size(), dist.get_rank()
    single, spread = build(), build()
    parallelize_module(spread, mesh_of(style, size), style)
    for seed in range(2):
        for each in range(size):
            expected = written_out(single, *(given := inputs(each, seed, **options)))
            expected.square().sum().backward()
            if each == rank:
                out, own = expected, given
        got = spread._expert_layer(spread, *(mine := inputs(rank, seed, **options)))
        torch.testing.assert_close(got, out, rtol=1e-12, atol=1e-12)
        got.square().sum().backward()
        for one, other in zip(mine, own, strict=True):
            if one.is_floating_point():
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    for name in ("w1", "w2", "w3"):
        got = getattr(spread, name).grad.full_tensor()
        torch.testing.assert_close(got, getattr(single, name).grad, rtol=1e-12, atol=1e-12, msg=f"{style} {name}")


@on_ranks(4)
@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather", "deredundency"])
def test_exchanges_equal_one_process(dispatcher):
    compare(ExpertParallel(dispatcher))


@pytest.mark.smoke
@on_ranks(2)
@pytest.mark.parametrize("dispatcher", ["all_to_all", "deredundency"])
def test_parts_of_the_tokens_equal_one_process(dispatcher):
    compare(ExpertParallel(dispatcher, chunks=2))
    compare(ExpertParallel(dispatcher, chunks=2), tokens=3)  # one rank has an empty part


@contextmanager
def journal():
    """List where exchanges begin and end."""
    listed: list[str] = []
    count = iter(range(1000))

    def note(kind, size, group):
        number = next(count)
        listed.append(f"begin {number}")
        return lambda: listed.append(f"end {number}")

    observers.append(note)
    try:
        yield listed
    finally:
        observers.remove(note)


def between(listed, first, event, last):
    places = [listed.index(each) for each in (first, event, last)]
    assert places == sorted(places), listed


@contextmanager
def weights_noted(listed):
    """Note where the matrices of weights' gradients are computed, one after the other into one tensor."""
    plain = torch.mm

    def noting(one, other, out):
        if out._base is not None and out._base.dim() == 3:
            listed.append("dW")
        return plain(one, other, out=out)

    torch.mm = noting  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.mm = plain


@on_ranks(2)
def test_one_part_travels_while_the_other_is_computed():
    style = ExpertParallel(chunks=2)
    experts = parallelize_module(build(), mesh_of(style, 2), style)
    x, chosen, weights = inputs(dist.get_rank())
    experts._expert_layer(experts, x, chosen, weights)
    with journal() as listed:
        out = experts._expert_layer(experts, x, chosen, weights).square().sum()
        # of each part the counts (0, 1), three tensors of dispatch (2 to 4, 5 to 7) and one of combine (8, 9)
        between(listed, "begin 0", "begin 1", "end 0")
        between(listed, "begin 2", "begin 7", "end 2")
        between(listed, "begin 5", "begin 8", "end 5")  # the first part is computed in between
        between(listed, "begin 8", "begin 9", "end 8")
        listed.clear()
        with weights_noted(listed):
            out.backward()
        # of combine (10, 11, the last part first), then two tensors of dispatch each (12, 13 and 14, 15)
        between(listed, "begin 10", "begin 11", "end 10")
        between(listed, "begin 11", "begin 12", "end 11")  # the last part's gradients are computed in between
        between(listed, "begin 12", "begin 14", "end 12")
        between(listed, "begin 14", "dW", "end 12")


@on_ranks(2)
@pytest.mark.parametrize("late", [False, True])
def test_a_shared_expert_runs_while_numbers_or_results_travel(late):
    style = ExpertParallel("all_to_all", late)
    torch.manual_seed(0)
    moe = MoE(HIDDEN, 4, EXPERTS, CHOICES, shared_expert=FeedForward(HIDDEN, 4)).double().to(device_type())
    single = copy.deepcopy(moe)
    parallelize_module(moe.experts, mesh_of(style, 2), style)
    x = inputs(dist.get_rank())[0]
    torch.testing.assert_close(moe(x), single(x), rtol=1e-12, atol=1e-12)
    with journal() as listed:
        assert moe.shared_expert is not None
        moe.shared_expert.register_forward_hook(lambda *_: listed.append("shared"))
        out = moe(x)
        between(listed, "begin 2" if late else "begin 0", "shared", "end 2" if late else "end 0")
        with weights_noted(listed):
            out.square().sum().backward()
        between(listed, "begin 4", "dW", "end 4")  # weights' gradients while those of tokens travel


@on_ranks(2)
def test_overlap_that_is_none_is_refused():
    class Own(ExpertParallel):
        def dispatch(self, exchange, tokens, weights):
            return super().dispatch(exchange, tokens, weights)

    with pytest.raises(TypeError, match="chunks=2 begins and ends exchanges apart, but dispatch is the style's own"):
        Own(chunks=2)
    compare(Own())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"chunks": 0}, "chunks is the number of parts of a rank's tokens, 1 or more, got 0"),
        ({"chunks": 2, "combine": "exact"}, "with chunks=2 a weight's gradient is a sum over parts"),
        ({"chunks": 2, "token_dispatcher": "all_gather"}, "chunks=2 hides nothing"),
        ({"async_combine": True, "token_dispatcher": "all_gather"}, "async_combine=True hides nothing"),
    ]
    for arguments, text in wrong:
        with pytest.raises(ValueError, match=text):
            ExpertParallel(**arguments)
    compare(ExpertParallel(chunks=2, combine="fast"))
    compare(ExpertParallel(chunks=1, combine="exact"))
    style = ExpertParallel(chunks=2)
    experts = parallelize_module(build(), mesh_of(style, 2), style)
    with pytest.raises(ValueError, match="runs by ExpertParallel.*chunks=2.*not one dispatch and one combine"):
        overlap_experts(experts, None)  # type: ignore[arg-type]
    for other in (ExpertParallel(), ExpertParallel("deredundency")):
        experts, own = parallelize_module(build(), mesh_of(other, 2), other), inputs(dist.get_rank())
        expected = experts._expert_layer(experts, *own)
        assert overlap_experts(experts, overlap := Wraps()) == 1
        torch.testing.assert_close(experts._expert_layer(experts, *own), expected)
        assert overlap.calls == ["dispatch", "combine"]
    mixed = ExpertParallel(chunks=1 + dist.get_rank())
    experts = parallelize_module(build(), mesh_of(mixed, 2), mixed)
    with pytest.raises(
        ValueError, match="rank 0 has .*combine='fast'; rank 1 has .*chunks=2; all ranks must have the same"
    ):
        experts._expert_layer(experts, *inputs(dist.get_rank()))


@contextmanager
def sent():
    """List the collectives: kind, bytes, and the group's size."""
    listed = []

    def note(kind, size, group):
        listed.append((kind, size, group))

    observers.append(note)
    try:
        yield listed
    finally:
        observers.remove(note)


@on_ranks(4)
def test_bytes_are_those_of_copies_rows_or_all_tokens():
    size, rank = dist.get_world_size(), dist.get_rank()
    row = HIDDEN * 8
    owner = torch.tensor([0, 0, 1, 1, 2, 3])  # six experts over four ranks
    x, chosen, weights = inputs(rank)
    ranks, groups = owner[chosen.cpu()], owner[chosen.cpu()] // 2
    expected: dict[tuple[str, Any], int] = {
        ("all_to_all", "fast"): sum(len(set(each)) for each in ranks.tolist()) * row,
        ("all_to_all", "exact"): chosen.numel() * row,
        ("all_gather", "fast"): size * TOKENS * row,
        ("deredundency", "fast"): sum(len(set(each)) for each in groups.tolist()) * row,
    }
    for (dispatcher, combine), count in expected.items():
        style = ExpertParallel(dispatcher, combine=combine)
        mesh = mesh_of(style, size)
        experts = parallelize_module(build(), mesh, style)
        with sent() as listed, torch.no_grad():
            experts._expert_layer(experts, x, chosen, weights)
        kind = "all_gather" if dispatcher == "all_gather" else "all_to_all"
        group = mesh.get_group(0)  # of two hops, the slow axis
        over = [bytes for name, bytes, where in listed if name == kind and where is group]
        if dispatcher == "all_to_all":
            del over[0]  # the counts
        assert over[0] == count, (dispatcher, combine, over, count)
        if kind == "all_to_all":
            both = torch.tensor([over[0], over[-1]], device=device_type())
            dist.all_reduce(both)
            assert both[0] == both[1]  # as many bytes come back


@pytest.mark.parametrize("dispatcher", ["all_gather", "deredundency"])
def test_sums_on_the_way_are_not_exact(dispatcher):
    with pytest.raises(ValueError, match=f"{dispatcher}' adds a token's results up on their way, .* combine='fast'"):
        ExpertParallel(dispatcher, combine="exact")
    ExpertParallel(dispatcher, combine="fast"), ExpertParallel("all_to_all", combine="exact")
