"""Reductions whose summands travel encoded."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from faked_hosts import fake_hosts

from hp_onesided import Wire, all_reduce, bound, reduce_scatter
from hp_onesided.cores.library import library
from hp_onesided.torch import wire as codec
from hp_onesided.wire import gathers
from hp_platform import count_collectives, get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.not_on("torch-cuda", "torch-npu", "torch-npu-sim", reason="tensors are on the host here")

WIRES = [Wire(dtype, 32, rounding) for dtype in ("bf16", "e4m3", "int8") for rounding in ("nearest", "stochastic")]
NAMES = [f"{wire.dtype} {wire.rounding}" for wire in WIRES]
each_wire = pytest.mark.parametrize("wire", WIRES, ids=NAMES)
each_dtype = pytest.mark.parametrize("dtype", ["bf16", "e4m3", "int8"])


def sent(values: torch.Tensor, wire: Wire, rows: int = 1) -> torch.Tensor:
    """Encode a tensor in so many pieces, and decode it."""
    columns = values.numel() // rows
    return codec.decode(codec.encode(codec.cut(values, rows, columns), wire), wire, columns).view(values.shape)


def draw(rank: int, count: int = 1000) -> torch.Tensor:
    """Draw values of a rank, some of them a thousand times larger than others."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator) * 10 ** torch.empty(count).uniform_(-2, 1, generator=generator)


def bounds(tensors: list[torch.Tensor], wire: Wire) -> torch.Tensor:
    blocks = zip(*(tensor.double().split(wire.block) for tensor in tensors))
    return torch.cat([bound(wire, block) for block in blocks])


@on_ranks(2, 4)
@each_wire
@pytest.mark.smoke
def test_each_element_is_within_the_bound(ranks, wire, monkeypatch):
    fake_hosts(monkeypatch, range(ranks))
    groups = get_platform().groups
    group, rank, count = groups.default_group(), groups.rank(), 32 * 3 * ranks
    tensors = [draw(each, count) for each in range(ranks)]
    exact, limits = torch.stack(tensors).double().sum(0), bounds(tensors, wire)
    whole = tensors[rank].clone()
    all_reduce(whole, wire, group=group)
    assert ((whole - exact).abs() <= limits).all()
    piece = torch.empty(count // ranks)
    handle = reduce_scatter(piece, tensors[rank], wire, group=group, async_op=True)
    assert handle is not None
    handle.wait()
    assert torch.equal(piece, whole.view(ranks, -1)[rank])  # the same bits
    mean = tensors[rank].clone()
    all_reduce(mean, wire, "avg", group=group)
    assert torch.equal(mean, whole / ranks)
    assert torch.equal(tensors[rank], draw(rank, count))


@on_ranks(4)
@each_dtype
@pytest.mark.parametrize("dtype_of_tensor", [torch.float32, torch.bfloat16, torch.float16])
def test_sizes_and_dtypes(dtype, dtype_of_tensor, monkeypatch):
    fake_hosts(monkeypatch, [0, 0, 1, 1])
    groups, wire = get_platform().groups, Wire(dtype)
    group, rank = groups.default_group(), groups.rank()
    for count in (0, 1, 127, 128, 129, 1000):
        tensors = [draw(each, count).to(dtype_of_tensor) for each in range(4)]
        total = torch.zeros(count)
        for tensor in tensors:
            total += sent(tensor, wire) if count else tensor
        whole = tensors[rank].clone().view(-1, 1)
        all_reduce(whole, wire, group=group)
        assert whole.dtype is dtype_of_tensor
        assert torch.equal(whole.view(-1), total.to(dtype_of_tensor))
        piece = torch.empty(count, dtype=dtype_of_tensor)
        reduce_scatter(piece, torch.cat(tensors), wire, group=group)  # the same on each rank
        assert torch.equal(piece, (sent(tensors[rank], wire) * 4).to(dtype_of_tensor) if count else piece)


@on_ranks(2, 4)
@each_wire
def test_bytes_that_are_sent(ranks, wire, monkeypatch):
    fake_hosts(monkeypatch, range(ranks))
    count, group = 32 * 40, get_platform().groups.default_group()
    with count_collectives() as counts:
        all_reduce(torch.ones(count), wire, group=group)
    if gathers(wire, ranks, 4):
        assert counts == {"all_gather": 1} and counts.bytes == ranks * wire.nbytes(count)
    else:
        assert counts == {"all_to_all": 1, "all_gather": 1} and counts.bytes == wire.nbytes(count) + 4 * count


@on_ranks(2, 4)
@each_wire
def test_bits_are_alike_for_any_number_of_ranks(ranks, wire, monkeypatch):
    fake_hosts(monkeypatch, range(ranks))
    groups = get_platform().groups
    values = draw(7, 1024) if groups.rank() == 1 else torch.zeros(1024)
    expected = sent(draw(7, 1024), wire)
    all_reduce(values, wire, group=groups.default_group())
    assert torch.equal(values, expected)


@each_wire
def test_pieces_have_the_bits_of_the_whole(wire):
    values = draw(3, 1024)
    assert all(torch.equal(sent(values, wire, rows), sent(values, wire)) for rows in (2, 8, 32))


@each_wire
def test_what_is_not_finite_arrives(wire):
    special = torch.tensor([math.nan, math.inf, -math.inf, 1.0, -2.0, 0.0])
    values = torch.cat([draw(1, 26), special, draw(2, 32), special[:3]])
    result = sent(values, wire)
    assert torch.equal(result.isnan(), values.isnan())
    infinite = values.isinf()
    assert torch.equal(result[infinite], values[infinite]) and not result[~infinite].isinf().any()
    kept = values.isfinite()
    limit = bounds([values.where(kept, 0.0)], wire) * 1.1  # one code less beside infinities
    assert ((result - values).abs() <= limit)[kept].all()


@pytest.mark.skipif(library() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("block", [1, 7, 128])
@pytest.mark.parametrize("dtype", ["int8", "e4m3"])
def test_the_compiled_core_has_the_bits_of_the_operators(dtype, rounding, block, monkeypatch):
    wire = Wire(dtype, block, rounding, seed=block)
    for rows, count in ((1, 1), (1, 1000), (3, 257)):
        finite = torch.cat([draw(row, count) for row in range(rows)])
        finite[::5] = -0.0
        finite[1::7] *= 1e-38
        for values in (finite, finite.clone()):
            if values is not finite:
                values[::13], values[3::31], values[4::37] = math.nan, math.inf, -math.inf
            values = values.view(rows, count)
            core = codec.encode(values, wire)
            decoded = codec.decode(core, wire, count)
            with monkeypatch.context() as patch:
                patch.setattr(codec, "library", lambda: None)
                assert torch.equal(codec.encode(values, wire), core)
                expected = codec.decode(core, wire, count)
            assert torch.equal(decoded.isnan(), values.isnan()) and torch.equal(expected.isnan(), values.isnan())
            kept = decoded.nan_to_num(7.0).view(torch.int32)
            assert torch.equal(kept, expected.nan_to_num(7.0).view(torch.int32))


@each_wire
def test_zeros_keep_their_sign(wire):
    beside = sent(torch.tensor([0.0, -0.0, math.nan, math.inf, 1.0]), wire)
    assert beside[:2].tolist() == [0.0, 0.0] and beside.isnan().tolist() == [False, False, True, False, False]
    zeros = torch.tensor([0.0, -0.0, 3.0, -0.0, -1e-30] * 20)
    result = sent(zeros, wire)
    assert torch.equal(result.signbit()[zeros == 0], zeros.signbit()[zeros == 0])
    assert not result[zeros == 0].any()
    assert torch.equal(sent(torch.full((40,), -0.0), wire).signbit(), torch.ones(40, dtype=torch.bool))


@each_wire
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-20, 1e30, 3e38])
def test_extreme_sizes(wire, size):
    values = draw(5, 256) / 40 * size
    values[17] = torch.finfo(torch.float32).max if size == 3e38 and wire.dtype != "bf16" else size
    result = sent(values, wire)
    assert result.isfinite().all()
    assert ((result.double() - values.double()).abs() <= bounds([values], wire)).all()


@each_dtype
def test_stochastic_rounding_is_unbiased(dtype):
    values = draw(9, 256).clamp(-3, 3)
    wire = Wire(dtype, 64, "stochastic")
    results = torch.stack([sent(values, replace(wire, seed=seed)) for seed in range(2000)]).double()
    spread = results.std(0) / math.sqrt(len(results)) + bounds([values], wire) / len(results)  # a rare one is not seen
    assert ((results.mean(0) - values).abs() <= 6 * spread + 1e-6 * values.abs().max()).all()
    assert len(results.unique(dim=0)) == len(results)  # each seed has its own chance
    # No element's chance says anything of its neighbour's.
    apart = (results - values)[:, :64]
    assert torch.corrcoef(apart.T).fill_diagonal_(0).nan_to_num(0).abs().max() < 0.15


STEPS = {"bf16": 0.01, "int8": 0.03, "e4m3": 0.03}


def trained(reduce, rank: int, ranks: int) -> float:
    """Train 200 steps on this rank's samples; the loss over all of them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 16, generator=generator)
    targets = torch.sin(inputs @ torch.randn(16, 4, generator=generator))
    weights = [
        (torch.randn(shape, generator=generator) / math.sqrt(shape[0])).requires_grad_()
        for shape in ((16, 64), (64, 4))
    ]

    def loss(rows):
        return (torch.tanh(inputs[rows] @ weights[0]) @ weights[1] - targets[rows]).square().mean()

    for _ in range(200):
        for weight, gradient in zip(weights, torch.autograd.grad(loss(slice(rank, None, ranks)), weights)):
            reduce(gradient)
            with torch.no_grad():
                weight -= 0.1 * gradient
    return loss(slice(None)).item()


@on_ranks(2, 4)
@each_wire
def test_training_keeps_its_loss(ranks, wire, monkeypatch):
    fake_hosts(monkeypatch, range(ranks))
    groups, collectives = get_platform().groups, get_platform().collectives
    group, rank = groups.default_group(), groups.rank()
    exact = trained(lambda gradient: collectives.all_reduce(gradient, "avg", group=group), rank, ranks)
    wired = trained(lambda gradient: all_reduce(gradient, wire, "avg", group=group), rank, ranks)
    assert abs(wired - exact) <= STEPS[wire.dtype] * exact
    assert exact < 0.2


@on_ranks(2)
def test_refusals(monkeypatch):
    group, wire = get_platform().groups.default_group(), Wire("int8")
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] are on one host, where encoding takes longer than sending"):
        all_reduce(torch.ones(4), wire, group=group)
    fake_hosts(monkeypatch, [0, 1])
    for dtype in (torch.int32, torch.float64, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match="a wire carries float32, bfloat16, float16, got"):
            all_reduce(torch.ones(4, dtype=dtype), wire, group=group)
    with pytest.raises(ValueError, match="must be contiguous, got strides"):
        all_reduce(torch.ones(4, 4).T, wire, group=group)
    with pytest.raises(ValueError, match="op is 'max'; a wire reduces by sum or avg"):
        all_reduce(torch.ones(4), wire, "max", group=group)
    with pytest.raises(ValueError, match="2 ranks with a piece of 3 elements have 6, but the tensor has 4"):
        reduce_scatter(torch.ones(3), torch.ones(4), wire, group=group)
    with pytest.raises(TypeError, match="must have the same dtype"):
        reduce_scatter(torch.ones(2), torch.ones(4).half(), wire, group=group)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dtype": "int4"}, "dtype is 'int4'; choose one of: bf16, e4m3, int8"),
        ({"dtype": "int8", "rounding": "up"}, "rounding is 'up'; choose one of: nearest, stochastic"),
        ({"dtype": "int8", "block": 0}, "block is 0; pass a number of elements"),
        ({"dtype": "int8", "seed": 1.5}, "seed is 1.5; pass an integer"),
    ],
)
def test_wires_that_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        Wire(**arguments)
