"""Reductions, norms, softmax and what goes over a dim: values, gradients, placements, collectives."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from behaviours import P, R, close, counted, like_one_device, line, place, rand
from torch import nn

from hp_dtensor import DTensor, Partial, Shard, distribute_module, distribute_tensor, init_device_mesh
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
S0, S1, S2 = Shard(0), Shard(1), Shard(2)


@on_ranks(2, 3)
@pytest.mark.parametrize("name", "sum mean prod amax amin all any max min std var argmax logsumexp".split())
def test_over_each_dim(name: str, ranks: int) -> None:
    mesh, whole = line(ranks), rand(6, 5, 7)
    if name in ("all", "any"):
        whole = whole < 0
    for placement in (S0, S1, R, P) if whole.is_floating_point() else (S0, S1, R):
        for dim, kept in itertools.product(range(3), (True, False)):

            def call(t: Any, dim: int = dim, kept: bool = kept) -> Any:
                made = getattr(t, name)(dim, keepdim=kept)
                return made if isinstance(made, torch.Tensor) else made.values

            made, counts = like_one_device(call, [whole], mesh, [(placement,)])
            if isinstance(placement, Shard) and dim != placement.dim:
                at = placement.dim - (dim < placement.dim and not kept)
                assert not counts and made.placements == (Shard(at),), f"{placement} over {dim}"
            else:
                assert sum(counts.values()) <= 1
        if name != "logsumexp":
            like_one_device(lambda t: getattr(t, name)(), [whole], mesh, [(placement,)])


@on_ranks(2)
@pytest.mark.parametrize("order", [-2, -1, 0, 0.5, 1, 2, -math.inf, math.inf])
def test_a_norm_of_a_tensor_of_which_a_rank_has_nothing(order: float) -> None:
    whole = torch.tensor([[2.0, -4.0, 5.0]], dtype=torch.float64, device=device_type())
    made = distribute_tensor(whole, line(2), [S0])
    torch.testing.assert_close(made.norm(order).full_tensor(), whole.norm(order), rtol=1e-12, atol=0)


@on_ranks(2)
def test_names_of_numpy_and_statistics() -> None:
    mesh, whole = line(2), rand(6, 4)
    for placement in (S0, S1, R):
        for call in (
            lambda t: t.sum(axis=1, keepdims=True),
            lambda t: t.mean(axis=(0, 1)),
            lambda t: t.max(axis=0).values,
            lambda t: t.argmax(axis=1, keepdims=True),
            lambda t: t.amin(axis=1),
            lambda t: torch.cat([t, t * 2], axis=1),
            lambda t: torch.stack([t, t], axis=1),
            lambda t: torch.stack(tensors=(t, t * 3)),
            lambda t: t.std(False),
            lambda t: t.var(unbiased=False),
            lambda t: torch.std(t, (0, 1), keepdim=True),
            lambda t: t.var(1, correction=2),
            lambda t: torch.std_mean(t, dim=1)[1],
            lambda t: torch.var_mean(t, 0, keepdim=True)[0],
        ):
            like_one_device(call, [whole], mesh, [(placement,)])


@on_ranks(4)
def test_only_the_axis_that_cuts_the_dim_is_gathered() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    for call in (lambda t: t.std(dim=1), lambda t: t.var(1), lambda t: t.norm(dim=1), lambda t: t.logsumexp(1)):
        made, counts = like_one_device(call, [rand(6, 4)], mesh, [(S0, S1)])
        assert counts == {"all_gather": 1} and made.placements == (S0, R)
    for placements in ((P, S1), (P, S0), (S0, S1), (R, S0), (R, S1)):
        for op in (torch.argmax, torch.argmin):
            like_one_device(lambda t, op=op: op(t, dim=1), [rand(8, 8)], mesh, [placements])


@on_ranks(2)
def test_softmax_and_others_along_a_dim() -> None:
    mesh = line(2)
    calls = {
        "softmax": lambda t, dim: F.softmax(t, dim=dim, dtype=torch.float64),
        "log_softmax": lambda t, dim: t.log_softmax(dim),
        "cumsum": torch.cumsum,
        "logsumexp": lambda t, dim: t.logsumexp(dim, keepdim=True),
        "topk": lambda t, dim: t.topk(2, dim=dim).values,
        "sort": lambda t, dim: t.sort(dim).values,
    }
    for (name, call), dim, cut in itertools.product(calls.items(), (-1, 0, 1), (0, 1, 2)):
        made, counts = like_one_device(lambda t, c=call, d=dim: c(t, d), [rand(4, 6, 8)], mesh, [(Shard(cut),)])
        if dim % 3 == cut:
            assert counts == {"all_gather": 1} and made.placements == (R,), name
        else:
            assert not counts and made.placements == (Shard(cut),), name


@on_ranks(2, 3)
@pytest.mark.parametrize("order", [2, 1, 3.0, math.inf, -math.inf, 0])
def test_norms(order: float, ranks: int) -> None:
    mesh, whole = line(ranks), rand(7, 4)
    for placement in (R, S0, S1, P):
        x = place(whole, mesh, placement)
        for call in (
            lambda t: torch.linalg.vector_norm(t, order),
            lambda t: t.norm(order),
            lambda t: torch.norm(t, p=order, dim=1, keepdim=True),
            lambda t: torch.linalg.norm(t, order, dim=0),
            lambda t: torch.linalg.norm(t[0], order),
            lambda t: torch.dist(t, t * 0.5 + 1, order),
        ):
            made, counts = counted(lambda call=call, x=x: call(x))
            close(made, call(whole), f"{placement}")
            assert sum(counts.values()) <= 2
            if order in (2, 3.0):
                like_one_device(call, [whole], mesh, [(placement,)])
    for call in (torch.norm, torch.linalg.norm, lambda t: t.norm("fro", dim=(0, 1)), lambda t: torch.norm(t, "nuc")):
        like_one_device(call, [whole], mesh, [(S0,)])


@on_ranks(4)
def test_norms_of_lists_on_several_meshes() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("x", "y"))
    x, y = mesh["x"], mesh["y"]
    a, b = place(rand(4, 6), x, S0), place(rand(6, 6), y, R)
    first, second = torch._foreach_norm([a, b], 2)
    assert first.device_mesh == x and second.device_mesh == y
    close(first, rand(4, 6).norm())
    close(second, rand(6, 6).norm())
    sums = torch._foreach_add([a, b], [a, b])
    assert [t.device_mesh for t in sums] == [x, y] and sums[0].placements == (S0,)
    close(sums[0], rand(4, 6) * 2)
    with pytest.raises(ValueError, match="operands are on different meshes"):
        torch._foreach_add([a], [place(rand(4, 6), y, S0)])
    part = DTensor.from_local(torch.tensor([float(mesh.get_rank()), 1.0], device=device_type()), x, [P])
    close(torch._foreach_norm([part])[0], part.full_tensor().norm())


@on_ranks(2)
def test_parts_are_reduced_before_a_norm_or_an_extreme() -> None:
    mesh = line(2)
    p = DTensor.from_local(rand(3) + mesh.get_rank(), mesh, [P])
    for call in (torch.norm, torch.max, torch.min, torch.linalg.vector_norm, torch.prod):
        close(call(p), call(p.full_tensor()))
    biggest = DTensor.from_local(rand(3) + mesh.get_rank(), mesh, [Partial("max")])
    assert torch.max(biggest).placements == (Partial("max"),)
    close(torch.max(biggest), biggest.full_tensor().max())


@on_ranks(2)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm], ids=["layer", "rms"])
def test_normalisation_over_trailing_dims(kind: Any, affine: bool) -> None:
    mesh, whole = line(2), rand(6, 5, 4)
    for first, cut in itertools.product(range(3), range(3)):
        plain = kind(whole.shape[first:], elementwise_affine=affine, dtype=torch.float64, device=device_type())
        norm = distribute_module(kind(whole.shape[first:], elementwise_affine=affine).double().to(device_type()), mesh)
        x, y = place(whole, mesh, Shard(cut), grad=True), whole.clone().requires_grad_()
        made, counts = counted(lambda norm=norm, x=x: norm(x))
        assert sum(counts.values()) == (0 if cut < first else 1)
        expected = plain(y)
        close(made.detach(), expected.detach())
        _, counts = counted(lambda made=made: made.square().sum().backward())
        assert counts.get("all_gather", 0) == 0 and sum(counts.values()) <= 1 + affine
        expected.square().sum().backward()
        close(x.grad, y.grad)
        for own, truth in zip(norm.parameters(), plain.parameters(), strict=True):
            assert own.grad.placements == (R,)
            close(own.grad, truth.grad)


@on_ranks(2)
def test_losses_over_classes() -> None:
    mesh = line(2)
    for shape, target_shape in (((8, 6), (8,)), ((4, 6, 5), (4, 5))):
        target = (rand(*target_shape).abs() * 100).long() % 6
        for cut, reduction, loss in itertools.product(
            range(len(shape)), ("none", "mean", "sum"), (F.nll_loss, F.cross_entropy)
        ):
            made, counts = like_one_device(
                lambda t, y, f=loss, r=reduction: f(t, y, reduction=r),
                [rand(*shape), target],
                mesh,
                [(Shard(cut),), (R,)],
            )
            if cut != 1:
                expected = P if reduction != "none" else Shard(cut - (cut > 1))
                assert sum(counts.values()) <= (reduction == "mean") and made.placements == (expected,)


@on_ranks(2)
def test_functions_of_matrices_gather_once() -> None:
    mesh, whole = line(2), rand(6, 6)
    x = place(whole, mesh, S0)
    made, counts = counted(lambda: torch.linalg.svd(x, full_matrices=False))
    assert counts == {"all_gather": 1}
    for got, want in zip(made, torch.linalg.svd(whole, full_matrices=False), strict=True):
        close(got, want)
    symmetric = place(whole, mesh, R) + place(whole, mesh, R).mT
    values, vectors = torch.linalg.eigh(symmetric)
    assert torch.dist(vectors @ torch.diag(values) @ vectors.mT, symmetric).item() < 1e-10
    for call in (
        torch.linalg.inv,
        lambda t: torch.linalg.solve(t, t * 2),
        torch.linalg.svdvals,
        torch.linalg.pinv,
        lambda t: torch.linalg.multi_dot([t, t, t]),
        lambda t: torch.special.i0e(t) + torch.special.zeta(t.abs() + 2, 3.0).detach(),
    ):
        like_one_device(call, [whole], mesh, [(S0,)])


@on_ranks(2, 3)
def test_histograms(ranks: int) -> None:
    mesh, whole = line(ranks), rand(7, 4)
    for placement in (S0, S1, R):
        x = place(whole, mesh, placement)
        made, counts = counted(lambda x=x: x.histc(20, min=-2, max=2))
        assert not counts and made.is_partial() == (placement != R)
        close(made, whole.histc(20, min=-2, max=2))
        close(torch.histc(x), torch.histc(whole))


@on_ranks(2)
def test_images_larger_and_complex_rotations() -> None:
    mesh, image = line(2), rand(4, 1, 2, 2)
    for module in (
        nn.UpsamplingBilinear2d(scale_factor=2),
        nn.UpsamplingNearest2d(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bicubic"),
    ):
        made, counts = like_one_device(module, [image], mesh, [(S0,)])
        assert not counts and made.placements == (S0,)
    angles = rand(1, 6, 4, dtype=torch.complex128)
    for placement, own in ((R, R), (S0, R), (S1, S1)):
        rotation = distribute_tensor(angles, mesh, [own])

        def rotate(t: Any, rotation: Any = rotation) -> Any:
            by = rotation if isinstance(t, DTensor) else angles
            return torch.view_as_real(torch.view_as_complex(t) * by)

        made, counts = like_one_device(rotate, [rand(2, 6, 4, 2)], mesh, [(placement,)])
        assert not counts and made.placements == (placement,)
