"""Cross entropy of sharded classes: values and gradients of one device, and what is communicated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
)
from hp_platform import count_collectives
from hp_platform.communication.checks import observers
from hp_styles import ColwiseParallel, loss_parallel, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()


def _draw(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, targets of which some are 2 (to ignore), class weights."""
    dim = min(len(shape) - 1, 1)
    gen = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(shape, dtype=torch.float64, generator=gen)
    target = torch.randint(0, shape[dim], shape[:dim] + shape[dim + 1 :], generator=gen)
    weight = torch.rand(shape[dim], dtype=torch.float64, generator=gen) + 0.5
    return logits.to(device_type()), target.to(device_type()), weight.to(device_type())


def _expected(
    logits: Any, target: Any, weight: Any, z_loss: float, ignore_index: int, reduction: str, smoothing: float
):
    """On one device; the z-loss as its definition says."""
    options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": smoothing}
    rows = F.cross_entropy(logits, target, reduction="none", **options)
    counted = target != ignore_index
    rows = rows + z_loss * torch.logsumexp(logits, min(logits.dim() - 1, 1)).square().where(counted, 0)
    if reduction == "none":
        return rows
    own = torch.ones_like(rows) if weight is None else weight[target]
    return rows.sum() if reduction == "sum" else rows.sum() / own.where(counted, 0).sum()


@contextmanager
def _largest() -> Iterator[list[int]]:
    """The bytes of each collective inside."""
    sizes: list[int] = []
    observers.append(observe := lambda kind, size, group: sizes.append(size))
    try:
        yield sizes
    finally:
        observers.remove(observe)


def _check(
    mesh: Any, shape: tuple[int, ...], placements: tuple[Placement, ...], target_placements: Any, **options: Any
):
    logits, target, weight = _draw(shape)
    weight = weight if options.pop("weighted", False) else None
    z_loss = options.pop("z_loss", 0.0)
    options = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, **options}
    plain = logits.clone().requires_grad_()
    want = _expected(plain, target, weight, z_loss, *options.values())
    cotangent = torch.linspace(0.5, 1.5, max(want.numel(), 1), dtype=want.dtype, device=want.device).reshape(want.shape)
    want.backward(cotangent)
    x = distribute_tensor(logits, mesh, placements).requires_grad_()
    t = distribute_tensor(target, mesh, target_placements)
    w = None if weight is None else distribute_tensor(weight, mesh, [R] * mesh.ndim)
    with _largest() as sizes, loss_parallel(z_loss=z_loss):
        got = F.cross_entropy(x, t, w, **options)
        cotangent = distribute_tensor(cotangent, mesh, [p if p.is_shard() else R for p in got.placements])
        sizes.clear() if got.dim() else None  # distributing it is the test's own
        got.backward(cotangent)
    assert got.dtype == want.dtype and tuple(got.shape) == tuple(want.shape)
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=1e-12)
    assert x.grad is not None and x.grad.placements == x.placements
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)
    return sizes, got


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "ignore_index": 2},
    {"reduction": "none", "ignore_index": 2, "z_loss": 0.1},
    {"weighted": True, "ignore_index": 2, "z_loss": 0.1},
    {"label_smoothing": 0.1, "weighted": True, "ignore_index": 2},
    {"label_smoothing": 0.2, "reduction": "none", "weighted": True},
]


@on_ranks(2, 4)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_axis(options: dict[str, Any], ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (ranks,), ("tp",))
    for shape in ((6, 11), (6, 8), (6, 5), (2, 11, 3), (2, 5, 3, 2), (11,)):  # 5 and 11 of 4: an empty and a short part
        rows = [Shard(0)] if len(shape) > 1 else [R]
        for target in ([R], rows):
            _, got = _check(mesh, shape, (Shard(min(len(shape) - 1, 1)),), target, **options)
            assert got.placements == (R,)


@on_ranks(4)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_and_classes_on_two_axes(options: dict[str, Any]) -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("dp", "tp"))
    for placements, target in (
        ((Shard(0), Shard(1)), (Shard(0), R)),
        ((Shard(0), Shard(1)), (R, R)),
        ((Shard(1), Shard(0)), (R, Shard(0))),
        ((R, Shard(1)), (Shard(0), R)),
        ((Shard(1), Shard(1)), (R, R)),
    ):
        _, got = _check(mesh, (5, 11), placements, target, **options)
        reduced = options.get("reduction") != "none"
        for kind, p in zip(got.placements, placements, strict=True):
            assert kind == ((Partial() if reduced else Shard(0)) if p == Shard(0) else R)
    _check(mesh, (2, 11, 5), (Shard(2), Shard(1)), (Shard(1), R), **options)


@on_ranks(4)
def test_only_row_sized_tensors_are_communicated(ranks: int) -> None:
    rows, classes = 6, 4096
    mesh = init_device_mesh(device_type(), (ranks,), ("tp",))
    for options in OPTIONS:
        sizes, _ = _check(mesh, (rows, classes), (Shard(1),), [R], **options)
        assert max(sizes, default=0) <= 2 * rows * 8 < classes // ranks * 8
    x = distribute_tensor(_draw((rows, classes))[0], mesh, [Shard(1)]).requires_grad_()
    t = distribute_tensor(_draw((rows, classes))[1], mesh, [R])
    with count_collectives() as forward:
        loss = F.cross_entropy(x, t)  # the same without the context
    with count_collectives() as backward:
        loss.backward()
    assert dict(forward) == {"all_reduce": 2} and forward.bytes == 3 * rows * 8 and not backward


@on_ranks(2)
def test_half_precision_and_autocast() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tp",))
    logits, target, _ = _draw((6, 11))
    t = distribute_tensor(target, mesh, [R])
    for wide in (False, True):
        x = distribute_tensor(logits.bfloat16(), mesh, [Shard(1)]).requires_grad_()
        plain = logits.bfloat16().requires_grad_()
        with torch.autocast(device_type(), dtype=torch.bfloat16, enabled=wide):
            got, want = F.cross_entropy(x, t), F.cross_entropy(plain, target)
        got.backward()
        want.backward()
        assert got.dtype == want.dtype == (torch.float32 if wide else torch.bfloat16)
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-2, atol=1e-3)  # one device rounds on its way
        assert x.grad is not None and x.grad.dtype == torch.bfloat16
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad, rtol=2e-2, atol=1e-3)


@on_ranks(2)
def test_masked_classes_and_ignored_rows_alone() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tp",))
    logits, target, _ = _draw((6, 8))
    logits[:, 4:] = -torch.inf  # all that one rank holds
    target = target % 4
    plain = logits.clone().requires_grad_()
    want = F.cross_entropy(plain, target)
    want.backward()
    x = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    got = F.cross_entropy(x, distribute_tensor(target, mesh, [R]))
    got.backward()
    torch.testing.assert_close(got.full_tensor(), want)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    ignored = distribute_tensor(torch.full_like(target, -100), mesh, [R])
    assert F.cross_entropy(x, ignored).isnan() and F.cross_entropy(x, ignored, reduction="sum") == 0


@on_ranks(2)
def test_a_head_whose_outputs_stay_sharded() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tp",))
    head = nn.Linear(4, 11, dtype=torch.float64, device=device_type())
    whole = {name: value.detach().clone().requires_grad_() for name, value in head.named_parameters()}
    hidden, target = torch.randn(6, 4, dtype=torch.float64, device=device_type()), _draw((6, 11))[1]
    F.cross_entropy(F.linear(hidden, whole["weight"], whole["bias"]), target).backward()
    parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
    with loss_parallel():
        loss = nn.CrossEntropyLoss()(head(hidden), target)  # a plain target is the whole one
        loss.backward()
    for name, value in head.named_parameters():
        assert isinstance(value.grad, DTensor)
        torch.testing.assert_close(value.grad.full_tensor(), whole[name].grad)


@on_ranks(4)
def test_what_is_refused(ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("dp", "tp"))
    logits, target, weight = _draw((6, 11))
    x = distribute_tensor(logits, mesh, [Shard(0), Shard(1)])
    t = distribute_tensor(target, mesh, [Shard(0), R])
    with loss_parallel():
        for placements in ([Shard(0), R], [Partial(), Shard(1)]):
            wrong = x.redistribute(placements=[R, R]) if placements[0].is_partial() else x
            wrong = wrong.redistribute(placements=placements)
            with pytest.raises(ValueError, match=r"inside loss_parallel: .* are not sharded on the class dim 1"):
                F.cross_entropy(wrong, t)
        with pytest.raises(ValueError, match=r"a plain target of shape \(6,\) may be the whole or a part; distribute"):
            F.cross_entropy(x, target)
        with pytest.raises(ValueError, match="class probabilities, class indices are needed"):
            F.cross_entropy(x, x)
        with pytest.raises(ValueError, match=r"need a target of shape \(6,\), got \(5,\)"):
            F.cross_entropy(x, t[:5])
        with pytest.raises(ValueError, match=r"11 classes need a weight of shape \(11,\), got \(6,\)"):
            F.cross_entropy(x, t, weight[:6])
        with pytest.raises(ValueError, match="pass weight.detach"):
            F.cross_entropy(x, t, weight.requires_grad_())
        found = F.cross_entropy(x, t, weight.detach()), F.cross_entropy(x.redistribute(placements=[R, Shard(1)]), t)
    expected = F.cross_entropy(logits, target, weight.detach()), F.cross_entropy(logits, target)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.full_tensor(), want)
    with loss_parallel():
        with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none', got 'avg'"):
            F.cross_entropy(x, t, reduction="avg")
    for wrong in (x.redistribute(placements=[Shard(0), R]), x):  # outside of loss_parallel
        torch.testing.assert_close(F.cross_entropy(wrong, t).full_tensor(), expected[1])
    torch.testing.assert_close(F.cross_entropy(x, x).full_tensor(), F.cross_entropy(logits, logits))
    with pytest.raises(ValueError, match="a plain tensor of shape .* meets a DTensor"):
        F.cross_entropy(x, target)
    with implicit_replication():
        torch.testing.assert_close(F.cross_entropy(x, target).full_tensor(), F.cross_entropy(logits, target))
    if device_type() == "cpu":
        with pytest.raises(IndexError, match="target 11 is out of bounds of 11 classes"):
            F.cross_entropy(x, t + 11 - t)
    with pytest.raises(ValueError, match="z_loss must be a finite number of at least 0, got -1"):
        loss_parallel(z_loss=-1)
    with pytest.raises(
        RuntimeError, match=r"loss_parallel\(z_loss=0.1\): no F.cross_entropy of a DTensor was computed"
    ):
        with loss_parallel(z_loss=0.1):
            F.cross_entropy(logits, target)
    with loss_parallel(z_loss=0.1):
        F.cross_entropy(x, t)
    y = x.detach().requires_grad_()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(F.cross_entropy(y, t), y, create_graph=True)
    plain, seconds = logits.detach().requires_grad_(), []
    for given, of, loss in (
        (plain, target, F.cross_entropy),
        (y, t, lambda y, t: F.cross_entropy(y.redistribute(placements=[Shard(0), R]), t)),
    ):
        (first,) = torch.autograd.grad(loss(given, of), given, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), given)[0])
    torch.testing.assert_close(seconds[1].full_tensor(), seconds[0])
