"""The ways of tokens to their experts: the same results, and the bytes that each sends."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from hp_dtensor import init_device_mesh
from hp_moe import ExpertParallel, GroupedExperts
from hp_platform.observing import observers
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
    expected = {
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
