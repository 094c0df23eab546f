"""Products of matrices on every combination of layouts: values, gradients, placements, collectives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from behaviours import P, R, close, counted, like_one_device, line, place, rand

from hp_dtensor import DTensor, Partial, Placement, Shard, StridedShard, init_device_mesh
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
S0, S1, S2 = Shard(0), Shard(1), Shard(2)


@pytest.mark.smoke
@on_ranks(2, 3)
def test_every_combination_of_two_operands(ranks: int) -> None:
    mesh = line(ranks)
    for call, shapes in (
        (torch.mm, ((12, 8), (8, 6))),
        (torch.bmm, ((4, 8, 4), (4, 4, 6))),
        (torch.matmul, ((2, 3, 4), (4, 5))),
        (lambda a, b: torch.tensordot(a, b, dims=([0], [0])), ((4, 4), (4, 7))),
    ):
        choices = [[R, P, *map(Shard, range(len(shape)))] for shape in shapes]
        for a, b in itertools.product(*choices):
            like_one_device(call, [rand(*shape) for shape in shapes], mesh, [(a,), (b,)])


@on_ranks(2)
def test_where_the_product_is() -> None:
    mesh = line(2)
    for a, b, out in ((S0, R, S0), (R, S1, S1), (S1, S0, P), (R, R, R), (P, R, P), (R, P, P)):
        made, counts = counted(lambda a=a, b=b: torch.mm(place(rand(12, 8), mesh, a), place(rand(8, 4), mesh, b)))
        assert not counts and made.placements == (out,), f"{a} {b}"
        assert made.t().placements == (Shard(1 - out.dim) if isinstance(out, Shard) else out,)
    with torch.inference_mode():
        made = F.linear(place(rand(1, 7, 8), mesh, R), place(rand(6, 8), mesh, S0))
        assert made.placements == (S2,)
        close(torch.matmul(place(rand(8, 6), mesh, R), place(rand(6, 6), mesh, S0)), rand(8, 6) @ rand(6, 6))


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim:UserWarning")
def test_cross_products_stay_sharded() -> None:
    mesh = line(2)
    for a, b, out in ((S0, S0, S0), (S1, S1, S1), (P, R, P), (S2, S2, R)):
        for call in (torch.linalg.cross, torch.cross):  # on a part of (6, 2, 3) torch.cross would take dim 0
            made, counts = like_one_device(call, [rand(6, 2, 3), rand(6, 2, 3).flip(0)], mesh, [(a,), (b,)])
            assert made.placements == (out,) and bool(counts) == (a == S2), f"{a} {b}"
    made, counts = like_one_device(torch.linalg.cross, [rand(5, 3), rand(1, 3)], mesh, [(S0,), (R,)])
    assert made.placements == (S0,) and not counts


@on_ranks(2, 3)
@pytest.mark.parametrize("bias", [(4,), (12, 4), (), (1, 4), (12, 1)], ids=str)
def test_a_bias_goes_where_the_product_is(bias: tuple[int, ...], ranks: int) -> None:
    mesh = line(ranks)

    def at(dim: int) -> Placement:
        """A cut of the result's dim, of the bias: replicated where it has not that dim."""
        own = dim - 2 + len(bias)
        return Shard(own) if own >= 0 and bias[own] > 1 else R

    for mat1, mat2, own, out in (
        (S0, R, at(0), S0),
        (R, S1, at(1), S1),
        (S1, S0, P, P),
        (R, R, R, R),
        (S1, S0, R, None),
    ):
        wholes, placed = [rand(*bias), rand(12, 8), rand(8, 4)], [(own,), (mat1,), (mat2,)]
        for call in (torch.addmm, lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2)):
            made, counts = like_one_device(call, wholes, mesh, placed)
            if out is None and bias == (12, 4):
                continue  # as large as the product: reduced there
            assert not counts and made.placements == (P if out is None else out,), f"{placed}: {counts}"


@on_ranks(2)
@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_baddbmm(beta: float) -> None:
    mesh, wholes = line(2), [rand(4, 4, 6), rand(4, 4, 8), rand(4, 8, 6)]
    for placements in itertools.product([R, S0, S1, S2], repeat=3):
        call = lambda t, a, b: torch.baddbmm(t, a, b, beta=beta, alpha=0.5)  # noqa: E731
        like_one_device(call, wholes, mesh, [(p,) for p in placements])


@on_ranks(4)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_parts_times_parts(op: str) -> None:
    kind = Partial(op)
    for shape in ((4,), (2, 2), (2, 2, 1)):
        mesh = init_device_mesh(device_type(), shape)
        a, b = (DTensor.from_local(rand(*s) + mesh.get_rank(), mesh, [kind] * mesh.ndim) for s in ((8, 6), (6, 10)))
        made, counts = counted(lambda a=a, b=b: torch.mm(a, b))
        assert made.placements == (kind,) * mesh.ndim
        assert set(counts) <= {"all_reduce", "reduce_scatter", "all_gather"} and sum(counts.values()) <= 3
        close(made, a.full_tensor() @ b.full_tensor())
    mesh = init_device_mesh(device_type(), (2, 2))
    a = DTensor.from_local(rand(8, 6) + mesh.get_coordinate()[0], mesh, [kind, R])
    b = DTensor.from_local(rand(6, 10) + mesh.get_coordinate()[1], mesh, [R, kind])
    made, counts = counted(lambda: torch.mm(a, b))
    assert not counts and made.placements == (kind, kind)
    close(made, a.full_tensor() @ b.full_tensor())


@on_ranks(4)
def test_axes_of_one_rank_and_strides() -> None:
    for shape in ((2, 2), (4, 1), (1, 4)):
        mesh = init_device_mesh(device_type(), shape)
        made, counts = like_one_device(torch.matmul, [rand(8, 6), rand(6, 8)], mesh, [(S0, R), (R, S1)])
        assert not counts and made.placements == (S0, S1)
    strided = StridedShard(0, 2)
    made, counts = like_one_device(torch.mm, [rand(8, 3), rand(3, 7)], line(4), [(strided,), (R,)])
    assert not counts and made.placements == (strided,)
    mesh = init_device_mesh(device_type(), (2, 2))
    both = (StridedShard(0, 4), StridedShard(0, 8))
    made, _ = like_one_device(torch.mm, [rand(48, 8), rand(8, 8)], mesh, [both, (R, R)])
    tables, rows = StridedShard(0, 2), torch.tensor([0, 7, 3, 3], device=device_type())
    like_one_device(F.embedding, [rows, rand(8, 3)], line(4), [(R,), (tables,)])


@on_ranks(3)
def test_empty_parts() -> None:
    mesh = line(3)
    like_one_device(torch.mm, [rand(2, 3), rand(3, 3)], mesh, [(S0,), (R,)])
    like_one_device(torch.addmm, [rand(4), rand(12, 0), rand(0, 4)], mesh, [(R,), (S0,), (R,)])
    like_one_device(torch.mm, [rand(4, 2), rand(2, 5)], mesh, [(S1,), (S0,)])


@on_ranks(2)
@pytest.mark.parametrize("placement", [R, S0, S1], ids=repr)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_attention_of_whole_heads(placement: Placement, causal: bool) -> None:
    mesh = line(2)
    wholes = [rand(4, 8, 6, 5), rand(4, 8, 6, 5) * 0.5, rand(4, 8, 6, 5) + 1]
    plain = [w.clone().requires_grad_() for w in wholes]
    given = [place(w, mesh, placement, grad=True) for w in wholes]
    expected = F.scaled_dot_product_attention(*plain, is_causal=causal)
    expected.sum().backward()

    def run() -> Any:
        out = F.scaled_dot_product_attention(*given, is_causal=causal)
        out.sum().backward()
        return out

    made, counts = counted(run)
    assert not counts and made.placements == (placement,)
    close(made.detach(), expected.detach())
    for tensor, truth in zip(given, plain, strict=True):
        assert tensor.grad.placements == (placement,)
        close(tensor.grad, truth.grad)


@on_ranks(2)
def test_grouped_products_of_experts() -> None:
    mesh = line(2)
    if not hasattr(F, "grouped_mm"):
        return
    offsets = torch.tensor([4, 10, 16], dtype=torch.int32, device=device_type())
    x, up, down = (rand(*s).to(torch.bfloat16) for s in ((16, 16), (3, 16, 32), (3, 32, 16)))
    plain = [t.clone().requires_grad_() for t in (x, up, down)]
    given = [place(t, mesh, p, grad=True) for t, p in zip((x, up, down), (R, S2, S1), strict=True)]

    def run(a: Any, b: Any, c: Any, ends: Any) -> Any:
        return F.grouped_mm(F.grouped_mm(a, b, offs=ends), c, offs=ends)

    expected = run(*plain, offsets)
    made, counts = counted(lambda: run(*given, place(offsets, mesh, R)))
    assert not counts and made.placements == (P,)
    expected.backward(torch.ones_like(expected))
    made.backward(place(torch.ones_like(expected), mesh, R))
    loose = {"rtol": 0.05, "atol": 0.5}
    torch.testing.assert_close(made.full_tensor(), expected, **loose)
    for tensor, truth in zip(given, plain, strict=True):
        assert tensor.grad.placements == tensor.placements
        torch.testing.assert_close(tensor.grad.full_tensor(), truth.grad, **loose)


@on_ranks(2)
def test_padding() -> None:
    mesh = line(2)
    for placement, value, out in ((S0, 0, S0), (S1, 0, R), (P, 0, P), (P, 1.0, R), (R, 1.0, R)):
        made, counts = like_one_device(lambda t, v=value: F.pad(t, [1, 1], value=v), [rand(8, 6)], mesh, [(placement,)])
        assert made.placements == (out,) and (not counts) == (placement == out)
