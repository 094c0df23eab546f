"""Views along a cut dim: writes to them reach their source, and they show what it holds, as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, implicit_replication, init_device_mesh
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]
R = Replicate()
LAYOUTS = [Shard(0), Shard(1), R, Partial()]


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device_type())


def placed(whole: torch.Tensor, *placements: Any) -> Any:
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh(device_type(), (2, 2) if len(placements) == 2 else (ranks,))
    return distribute_tensor(whole, mesh, placements)


def close(got: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, expected, rtol=1e-12, atol=1e-12)


VIEWS: dict[str, Any] = {
    "int": lambda t: t[1],
    "last": lambda t: t[-1],
    "slice": lambda t: t[1:4],
    "steps": lambda t: t[::2, 1:],
    "both": lambda t: t[1:4, 2],
    "new dim": lambda t: t[2:, None],
    "dots": lambda t: t[..., 3],
    "chained": lambda t: t[1:4][0],
    "chained slices": lambda t: t[1:5][1:][:, 2:],
    "narrow": lambda t: t.narrow(0, 1, 3),
    "narrow other": lambda t: torch.narrow(t, 1, 2, 3),
    "narrow negative": lambda t: t.narrow(0, -2, 2),
    "select": lambda t: t.select(0, 2),
    "select last": lambda t: torch.select(t, 1, -1),
    "chunk": lambda t: t.chunk(2)[1],
    "chunk columns": lambda t: t.chunk(3, 1)[1],
    "split": lambda t: t.split(2)[1],
    "split sizes": lambda t: torch.split(t, [1, 4], 0)[1],
    "tensor_split": lambda t: t.tensor_split(3, 1)[2],
    "hsplit": lambda t: t.hsplit(2)[1],
    "unbind": lambda t: t.unbind()[3],
    "unbind columns": lambda t: torch.unbind(t, dim=1)[2],
    "rows of an iteration": lambda t: list(t)[1],
    "diagonal": lambda t: t.diagonal(),
    "diagonal beside": lambda t: torch.diagonal(t, 1),
    "view": lambda t: t.view(30),
    "view mixed": lambda t: t.view(3, 10),
    "view_as": lambda t: t.view_as(t.new_zeros(10, 3)),
    "flatten": lambda t: t.flatten(),
    "reshape": lambda t: t.reshape(2, 15),
    "unflatten": lambda t: t.unflatten(1, (2, 3)),
    "unfold": lambda t: t.unfold(1, 2, 2),
    "transposed": lambda t: t.t()[1:4],
    "transposed after": lambda t: t[1:4].t(),
    "view of a view": lambda t: t[1:5].view(24)[3:17],
    "row of rows": lambda t: t.view(5, 2, 3)[1:3, 1],
    "detach": lambda t: t.detach()[1:3],
    "detach after": lambda t: t[1:3].detach(),
    "data": lambda t: t[1:3].data,
    "permuted": lambda t: t[1:3].permute(1, 0).unsqueeze(0),
    "at least": lambda t: torch.atleast_2d(t[1]),
    "empty": lambda t: t[2:2],
}
NOT_IN_A_GRAPH = ("detach", "data", "empty", "chunk", "split", "unbind", "iteration")
"""Without gradients, or refused by torch: views of several that are written to, or whose source is."""
WRITES: dict[str, Any] = {
    "mul_": lambda v: v.mul_(3.0),
    "fill": lambda v: v.fill_(7.0),
    "zero_": lambda v: v.zero_(),
    "copy_": lambda v: v.copy_(v * 2 + v),
    "index": lambda v: v.__setitem__(..., 2.0),
    "neg_": lambda v: torch.neg_(v),
    "foreach": lambda v: torch._foreach_mul_([v], 2.0),
    "whole": lambda v: v.cumsum_(0),
}


def alike(program: Any, whole: torch.Tensor, *placements: Any) -> None:
    """Runs ``program`` on one device and distributed; what it gives is the same, and so is its operand afterwards."""
    plain, given = whole.clone(), placed(whole.clone(), *placements)
    expected, got = program(plain), program(given)
    close(given, plain)
    for one, other in zip(got, expected, strict=True):
        close(one, other)


@on_ranks(2)
@pytest.mark.parametrize("name", VIEWS)
def test_a_write_to_a_view_reaches_its_source(name: str) -> None:
    def program(x: Any, write: Any) -> Any:
        view = VIEWS[name](x)
        out = write(view)
        assert out is None or out is view or isinstance(out, (list, tuple))
        return view, view * 2

    for place in LAYOUTS[:3]:
        for write in ("mul_", "fill", "copy_", "index", "whole"):
            alike(lambda x, w=write: program(x, WRITES[w]), rand(5, 6), place)
    alike(lambda x: program(x, WRITES["mul_"]), rand(5, 6), Partial())


@on_ranks(2)
@pytest.mark.parametrize("name", WRITES)
def test_each_way_to_write(name: str) -> None:
    def program(x: Any) -> Any:
        rows, columns, row = x[1:4], x.chunk(2, 1)[1], x[2]
        WRITES[name](rows)
        WRITES[name](columns)
        WRITES[name](row)
        return rows, columns, row

    for place in LAYOUTS[:3]:
        alike(program, rand(5, 6), place)
        with torch.inference_mode():
            alike(program, rand(5, 6), place)


@on_ranks(2)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_shows_what_its_source_holds(name: str) -> None:
    def program(x: Any) -> Any:
        view, other = VIEWS[name](x), x[:, 1:5]
        first = view * 1
        x.mul_(2.0)
        second = view + 1
        x[2] = 5.0
        third = view.sum()
        other.add_(1.0)
        fourth = view - 1
        x.data.mul_(2.0)
        fifth = view * 3
        return first, second, third, fourth, fifth, view

    for place in LAYOUTS[:3]:
        alike(program, rand(5, 6), place)
        with torch.inference_mode():
            alike(program, rand(5, 6), place)


@on_ranks(2)
@pytest.mark.parametrize("place", LAYOUTS[:3], ids=str)
def test_what_is_asked_of_a_view_that_changed(place: Any) -> None:
    def program(x: Any) -> Any:
        view = x[1:4]
        made = [view.shape, view.dim(), len(view), view.stride(), view.is_contiguous(), view.dtype]
        x.add_(1.0)
        whole = view.full_tensor().clone() if isinstance(view, DTensor) else view * 1
        x.add_(1.0)
        moved = view.redistribute(placements=[Shard(1)]) * 1 if isinstance(view, DTensor) else view * 1
        x.add_(1.0)
        value = view[0, 0].item()
        x.add_(1.0)
        return torch.tensor(view.tolist()) * 1.0, whole, moved, torch.tensor([value, *map(float, made[0])])

    plain, given = rand(5, 6), placed(rand(5, 6), place)
    for one, other in zip(program(given), program(plain), strict=True):
        close(one, other)
    view = given[1:4]
    assert "DTensor(shape=(3, 6)" in repr(view) and isinstance(view, DTensor)


@on_ranks(2)
@pytest.mark.parametrize("leaf", [Shard(0), Shard(1), R], ids=str)
@pytest.mark.parametrize("name", [name for name in VIEWS if not any(part in name for part in NOT_IN_A_GRAPH)])
def test_gradients_through_written_sources_and_views(name: str, leaf: Any) -> None:
    def read_after_a_write(x: Any, w: Any) -> Any:
        y = x * 1.0
        view = VIEWS[name](y)
        y.mul_(w).add_(1.0)
        return (view**3).sum() + (y**2).sum()

    def written(x: Any, w: Any) -> Any:
        y = x * 1.0
        view = VIEWS[name](y)
        view.mul_(2.0).add_(y.sum())
        y.mul_(w)
        return (view**3).sum() + (y**2).sum()

    for program in (read_after_a_write, written):
        plain = rand(5, 6).requires_grad_(), rand(5, 6).add(1).requires_grad_()
        given = [placed(t.detach(), leaf).requires_grad_() for t in plain]
        expected, got = program(*plain), program(*given)
        close(got.detach(), expected.detach())
        expected.backward()
        got.backward()
        for one, other in zip(given, plain, strict=True):
            close(one.grad, other.grad)


@on_ranks(2)
def test_the_gradient_of_a_row_read_after_its_source_was_written() -> None:
    for make in (lambda t: t.clone(), lambda t: placed(t, Shard(0))):
        x = make(rand(5, 6)).requires_grad_()
        y = x * 1.0
        z = y[1]
        y.add_(1)
        (z**3).sum().backward()
        expected = torch.zeros(5, 6, dtype=torch.float64, device=device_type())
        expected[1] = 3 * (rand(5, 6)[1] + 1) ** 2
        close(x.grad, expected)


@on_ranks(2)
@pytest.mark.parametrize("place", [Shard(0), Shard(1)], ids=str)
def test_views_of_leaves(place: Any) -> None:
    """With gradients on they can't be written; without, the leaf is, as an initialisation does."""
    plain, given = rand(5, 6).requires_grad_(), placed(rand(5, 6), place).requires_grad_()
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        given[1:3, 1:3].mul_(2.0)
    given = placed(rand(5, 6), place).requires_grad_()
    for leaf in (plain, given):
        with torch.no_grad():
            leaf[1:3].mul_(2.0)
            leaf.chunk(2, 1)[0].fill_(1.0)
            leaf.view(30)[20:].zero_()
            torch.nn.init.constant_(leaf[4], 3.0)
        (leaf[1:3] * leaf[2:4]).sum().backward()
    close(given.detach(), plain.detach())
    close(given.grad, plain.grad)


@on_ranks(4)
@pytest.mark.parametrize(
    "places", [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (R, Shard(0)), (Shard(1), Partial())], ids=str
)
def test_on_two_axes(places: Any) -> None:
    def program(x: Any) -> Any:
        rows, column, flat = x[1:4], x.select(1, 2), x.view(30)
        rows.mul_(2.0)
        column.mul_(3.0)
        first = flat * 1.0
        flat[7:9].zero_()
        return rows, column, flat, first

    alike(program, rand(5, 6), *places)


@on_ranks(3)
def test_with_parts_that_have_nothing() -> None:
    def program(x: Any) -> Any:
        row, both, flat = x[0], x[:, 1:], x.flatten()
        row.add_(1.0)
        x.mul_(2.0)
        both[1].fill_(4.0)
        return row, both, flat

    alike(program, rand(2, 6), Shard(0))
    alike(program, rand(2, 2), Shard(1))


@on_ranks(2)
def test_what_is_no_view_on_one_device() -> None:
    def program(x: Any) -> Any:
        copied, taken, cloned = x.t().reshape(30), x[[1, 2]], x[1:3].clone()
        whole, masked, of_a_view = x[1:3] * 1.0, x[x > 0], x[1:4][x[1:4] > 0]
        picked, turned = x[1:4][[0, 1]], x[1:4].t().reshape_as(x[:3])
        for each in (copied, taken, cloned, whole, masked, of_a_view, picked, turned):
            each.zero_()
        x.add_(1.0)
        return copied, taken, cloned, whole, masked, of_a_view, picked, turned

    for place in LAYOUTS[:3]:
        alike(program, rand(5, 6), place)


@on_ranks(2)
def test_what_can_not_be_written_is_refused() -> None:
    with pytest.raises(RuntimeError, match="unsupported operation"):
        placed(rand(1, 6), Shard(0)).expand(3, 6).mul_(2.0)
    close(placed(rand(1, 6), Shard(0)).expand(3, 6).clone().mul_(2.0), rand(1, 6).expand(3, 6) * 2)
    view = placed(rand(5, 6), Shard(0))[1:4]
    with pytest.raises(NotImplementedError, match="t_ of a DTensor of shape .* that is a view of another one"):
        view.t_()
    close(view.t(), rand(5, 6)[1:4].t())
    close(view.clone().t_(), rand(5, 6)[1:4].t())
    for shape in ((6, 6), (6, 4)):
        source = placed(rand(*shape), Shard(0))
        view, kept = source[1:4], source[1:4].clone()
        source.t_()
        with pytest.raises(RuntimeError, match="whose shape or layout was changed in place since: it is"):
            view * 1.0
        close(source[1:4] * 1.0, rand(*shape).t()[1:4])
        close(kept * 1.0, rand(*shape)[1:4])


@on_ranks(2)
def test_what_is_read_once_is_moved_once() -> None:
    x = placed(rand(6, 6), Shard(0))
    with count_collectives() as counts:
        view = x[1:3]
        (view * 2.0 + view.t().t()).sum(0)
    assert dict(counts) == {"all_gather": 1}


@on_ranks(2)
@pytest.mark.parametrize("name", ["int", "view", "transposed after"])
def test_a_view_stays_on_memory_that_its_source_left(name: str) -> None:
    def program(t: Any) -> list[Any]:
        view = VIEWS[name](t)
        t.data = t.data * 2
        t.data = t.data * 2  # may lie where the first did
        t.add_(1)
        seen = view * 1
        view.add_(5)  # no longer the source's
        return [seen, view, t]

    alike(program, rand(5, 6), Shard(0))


@on_ranks(2)
def test_the_part_of_a_view_may_be_read_and_not_written() -> None:
    x = placed(rand(5, 6), Shard(0))
    view = x[1:4]
    part = view.to_local()
    close(part * 2 + 1, rand(5, 6)[1:4] * 2 + 1)
    close(part.clone().mul_(2.0), rand(5, 6)[1:4] * 2)
    assert type(part + 1) is torch.Tensor and part.shape == (3, 6)
    writes = [
        lambda t: t.mul_(2.0),
        lambda t: t[0].zero_(),
        lambda t: t.__setitem__(0, 1.0),
        lambda t: t.view(18).data.add_(1.0),
        lambda t: torch.add(t, 1.0, out=t),
        lambda t: torch.nn.functional.relu(t, inplace=True),
        lambda t: torch._foreach_mul_([t], 2.0),
    ]
    for write in writes:
        with pytest.raises(RuntimeError, match="had to be redistributed. It is a copy, and a write to it can't reach"):
            write(part)
    view.add_(1.0)
    close(part * 1, rand(5, 6)[1:4] + 1)
    x.mul_(2.0)
    with pytest.raises(RuntimeError, match="was written to since; call to_local.. of the view again"):
        part * 1
    close(view.to_local() * 1, (rand(5, 6) + torch.ones_like(rand(5, 6)))[1:4] * 2)
    whole = view.full_tensor()
    whole.zero_()  # a copy, as of all DTensors that are moved
    close(view, (rand(5, 6)[1:4] + 1) * 2)


@on_ranks(2)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_dtensor_of_the_part_of_a_view_is_a_view_of_the_source(recorded: bool) -> None:
    def program(x: Any) -> Any:
        y = x * 1.0
        view = y.diagonal()
        again = view * 1
        if isinstance(view, DTensor):
            again = DTensor.from_local(view.to_local(), view.device_mesh, view.placements, shape=view.shape)
        else:
            again = view.view_as(view)
        again[0:2] = 0.25
        seen = again * 3
        y.add_(1.0)
        return y, view, again, seen

    plain = rand(5, 6).requires_grad_(recorded)
    given = placed(rand(5, 6), Shard(0)).requires_grad_(recorded)
    expected, got = program(plain), program(given)
    for one, other in zip(got, expected, strict=True):
        close(one.detach(), other.detach())
    if recorded:
        sum((value**2).sum() for value in expected).backward()
        sum((value**2).sum() for value in got).backward()
        close(given.grad, plain.grad)


@on_ranks(2)
def test_a_part_of_a_view_meets_a_dtensor_as_any_plain_tensor() -> None:
    x = placed(rand(5, 6), Shard(0))
    part = x[1].to_local()
    for operation in (lambda: x + part, lambda: part + x):
        with pytest.raises(ValueError, match=r"a plain tensor of shape \(6,\) meets a DTensor"):
            operation()
        with implicit_replication():
            close(operation(), rand(5, 6) + rand(5, 6)[1])
    same = copy.deepcopy(part)
    assert type(same) is torch.Tensor
    same.zero_()
