"""Element by element: partial values that stay partial, writing in place, copies, comparisons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from behaviours import P, R, close, counted, like_one_device, line, place, rand

from hp_dtensor import DTensor, Partial, Placement, Shard, init_device_mesh
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
AVG = Partial("avg")


def parts(mesh: Any, *shape: int, op: str = "sum") -> DTensor:
    """Parts that differ between ranks."""
    return DTensor.from_local(rand(*shape) + mesh.get_rank(), mesh, [Partial(op)] * mesh.ndim)


# ---- partial values ----
@on_ranks(2, 3)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_what_is_linear_keeps_parts(op: str, ranks: int) -> None:
    mesh, kind = line(ranks), Partial(op)
    p, q = parts(mesh, 2, 3, op=op), parts(mesh, 2, 3, op=op)
    row, column = place(rand(3), mesh, R), place(rand(2, 1), mesh, R)
    number = torch.tensor(2.0, dtype=torch.float64, device=device_type())
    for name, call in {
        "p + q": lambda a, b, r, c: a + b,
        "p - q": lambda a, b, r, c: a - b,
        "p + a row": lambda a, b, r, c: a + r,
        "a column + p": lambda a, b, r, c: c + a,
        "a row - p": lambda a, b, r, c: r - a,
        "p * 2": lambda a, b, r, c: a * 2,
        "p * a number in a tensor": lambda a, b, r, c: number * a,
        "p * row": lambda a, b, r, c: a * r,
        "p / 2": lambda a, b, r, c: a / 2,
        "p / column": lambda a, b, r, c: a / c,
        "-p": lambda a, b, r, c: -a,
        "p.t()": lambda a, b, r, c: a.t() + c.t(),
        "stack": lambda a, b, r, c: torch.stack([a, b, r.expand(2, 3)]),
        "cat": lambda a, b, r, c: torch.cat([a, r[None]]),
        "add_": lambda a, b, r, c: a.clone().add_(r),
        "mul_": lambda a, b, r, c: a.clone().mul_(c),
    }.items():
        made, counts = counted(lambda call=call: call(p, q, row, column))
        assert not counts and made.placements == (kind,), f"{name}: {counts} {made.placements}"
        close(made, call(p.full_tensor(), q.full_tensor(), row.full_tensor(), column.full_tensor()), name)


@on_ranks(2, 3)
def test_what_is_not_linear_reduces_once(ranks: int) -> None:
    mesh = line(ranks)
    p, q, largest = parts(mesh, 2, 3), parts(mesh, 2, 3), parts(mesh, 2, 3, op="max")
    ones = place(torch.ones(2, 3, dtype=torch.float64, device=device_type()), mesh, R)
    for name, call in {
        "p * q": lambda a, b, c, r: a * b,
        "p + 1": lambda a, b, c, r: a + 1,
        "exp": lambda a, b, c, r: a.exp(),
        "1 / p": lambda a, b, c, r: 1 / a,
        "p > 0": lambda a, b, c, r: a > 0,
        "a maximum times ones": lambda a, b, c, r: c * r,
        "residual": lambda a, b, c, r: a + r,
        "where": lambda a, b, c, r: torch.where(r > 0, a, 0.0),
    }.items():
        made, counts = counted(lambda call=call: call(p, q, largest, ones))
        assert sum(counts.values()) <= 1, f"{name}: {counts}"  # none where the last call reduced the same value
        close(made, call(p.full_tensor(), q.full_tensor(), largest.full_tensor(), ones.full_tensor()), name)


@on_ranks(2, 3)
@pytest.mark.parametrize("op", ["max", "min", "sum", "avg", "product"])
def test_moving_elements_keeps_parts_of_every_reduction(op: str, ranks: int) -> None:
    mesh = line(ranks)
    p, q = parts(mesh, 4, 6, op=op), parts(mesh, 4, 6, op=op) * 1
    if op not in ("sum", "avg"):
        q = parts(mesh, 4, 6, op=op).clone()
    for name, call in {
        "clone": lambda a, b: a.clone(),
        "contiguous": lambda a, b: a.t().contiguous(),
        "permute": lambda a, b: a.permute(1, 0),
        "view": lambda a, b: a.view(2, 2, 6),
        "expand": lambda a, b: a[None].expand(3, 4, 6),
        "split": lambda a, b: a.split(4, dim=1)[1],
        "chunk": lambda a, b: a.chunk(3, dim=0)[0],
        "narrow": lambda a, b: a.narrow(1, 2, 3),
        "index": lambda a, b: a[1:, ::2],
        "flip": lambda a, b: a.flip(0),
        "repeat": lambda a, b: a.repeat(2, 1),
        "unbind": lambda a, b: a.unbind(1)[0],
        "cat": lambda a, b: torch.cat([a, b], 1),
        "stack": lambda a, b: torch.stack([a, b]),
        "copy_": lambda a, b: a.clone().copy_(b[0]),
        "gather": lambda a, b: a.gather(1, _index(a)),
    }.items():
        made, counts = counted(lambda call=call: call(p, q))
        assert not counts and made.placements == (Partial(op),), f"{name}: {counts} {made.placements}"
        close(made, call(p.full_tensor(), q.full_tensor()), name)


def _index(like: Any) -> Any:
    whole = torch.tensor([[0, 5], [1, 1], [2, 0], [3, 4]], device=device_type())
    return place(whole, like.device_mesh, R) if isinstance(like, DTensor) else whole


@on_ranks(2, 3)
@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_of_parts_of_extremes(op: str, ranks: int) -> None:
    mesh = line(ranks)
    p, q = parts(mesh, 4, 6, op=op), parts(mesh, 4, 6, op=op)
    elementwise, over, method = (
        (torch.maximum, torch.amax, "max") if op == "max" else (torch.minimum, torch.amin, "min")
    )
    for call in (
        lambda a, b: elementwise(a, b),
        lambda a, b: getattr(a, method)(b),
        lambda a, b: over(a, 1),
        lambda a, b: over(a, (0, 1), keepdim=True),
        lambda a, b: getattr(a, method)(),
    ):
        made, counts = counted(lambda call=call: call(p, q))
        assert not counts and made.placements == (Partial(op),)
        close(made, call(p.full_tensor(), q.full_tensor()))
    other = parts(mesh, 4, 6, op="min" if op == "max" else "max")
    close(elementwise(p, other), elementwise(p.full_tensor(), other.full_tensor()))
    close((p > 0.5).any(), (p.full_tensor() > 0.5).any())
    close(torch.any(p), torch.any(p.full_tensor()))
    watched = p.detach().requires_grad_()
    elementwise(watched, q).sum().backward()
    plain = p.full_tensor().requires_grad_()
    elementwise(plain, q.full_tensor()).sum().backward()
    close(watched.grad, plain.grad)


# ---- in place ----
@on_ranks(2, 3)
def test_writing_in_place_keeps_the_tensor_and_its_layout(ranks: int) -> None:
    mesh, whole = line(ranks), rand(7, 3)
    x = place(whole, mesh, Shard(0))
    for other in (3, place(whole, mesh, R), parts(mesh, 7, 3), place(rand(3), mesh, Shard(0))):
        plain = other.full_tensor() if isinstance(other, DTensor) else other
        given = x.clone()
        assert given.add_(other) is given and given.placements == (Shard(0),)
        close(given, whole + plain)
        assert given.mul_(other) is given
        close(given, (whole + plain) * plain)
    for placement in (R, Shard(0), Shard(1)):
        given, expected = place(whole, mesh, placement), whole.clone()
        for t, mask in ((given, place(whole > 0, mesh, Shard(0))), (expected, whole > 0)):
            t.masked_fill_(mask, -9.0)
            t.clamp_(max=2.0).neg_().tril_()
        close(given, expected)
    with pytest.raises(RuntimeError, match=r"clamp_: the operand that is written in place is Partial\(\)"):
        DTensor.from_local(torch.tensor(64.0, device=device_type()), mesh, [P]).clamp_(max=10)


@on_ranks(2)
def test_copies_into_every_layout() -> None:
    mesh = line(2)
    placements: list[Placement] = [R, Shard(0), Shard(1), P]
    for source_shape, shape in (((6, 6), (6, 6)), ((6,), (4, 6)), ((3, 1), (2, 5, 3, 4))):
        for source in placements[: len(source_shape) + 1] + [P]:
            for target in [*placements, Shard(len(shape) - 1)]:
                if target == P and isinstance(source, Shard):
                    continue  # would have to be redistributed
                x = place(rand(*shape), mesh, target)
                assert x.copy_(place(rand(*source_shape), mesh, source)) is x and x.placements == (target,)
                close(x, rand(*source_shape).expand(shape), f"{source} into {target}")


@on_ranks(2, 3)
def test_equality_and_sizes_are_of_the_whole(ranks: int) -> None:
    mesh = line(ranks)
    ones = torch.ones(4 * ranks, 4, device=device_type())
    x, y = place(ones, mesh, Shard(0)), place(ones, mesh, R)
    other = DTensor.from_local(torch.ones(4, 4, device=device_type()) + (mesh.get_rank() == 1), mesh, [Shard(0)])
    assert x.equal(y) and torch.equal(y, x) and not other.equal(y) and not y.equal(other)
    assert x.is_same_size(y) and torch.is_same_size(other, y) and not x.is_same_size(y[1:])
    assert torch.numel(x) == 16 * ranks and [float(row[0]) for row in reversed(x)] == [1.0] * 4 * ranks


@on_ranks(2)
def test_types() -> None:
    mesh, whole = line(2), rand(6, 4)
    for placement in (R, Shard(0)):
        x = place(whole, mesh, placement)
        made = torch.where(x > 0, 1, 0)
        assert made.dtype is torch.int64 and made.placements == (placement,)
        close(made, torch.where(whole > 0, 1, 0))
        half = x.to(torch.bfloat16)
        assert half.dtype is half.to_local().dtype is torch.bfloat16 and half.float().dtype is torch.float32
        assert x.float().type_as(half).dtype is torch.bfloat16 and x.dtype is torch.float64
        assert torch.zeros_like(x, dtype=torch.bfloat16).dtype is torch.bfloat16
        for call in (F.gelu, F.relu, torch.sigmoid, lambda t: t.clamp(-1, 1)):
            made, counts = like_one_device(call, [whole], mesh, [(placement,)])
            assert not counts and made.placements == (placement,)
    number = place(rand(1, 1, dtype=torch.complex64), mesh, R)
    made, counts = counted(lambda: number.conj() + 1)
    assert not counts
    close(made, rand(1, 1, dtype=torch.complex64).conj() + 1)


@on_ranks(4)
def test_two_cuts_of_one_dim_and_of_two() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    for placements in ((Shard(0), Shard(0)), (Shard(0), Shard(1))):
        for op in (torch.add, torch.sub, torch.mul, torch.div):
            made, counts = like_one_device(lambda t, op=op: op(t, 2), [rand(4, 4)], mesh, [placements])
            assert not counts and made.placements == placements
