"""``x[index] = value`` on every layout: values and gradients are those of one device, and nothing of x is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_dtensor import (
    DTensor,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
)
from hp_dtensor.debugging.debug import CommDebugMode
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R, P = Replicate(), Partial()
SHAPE = (6, 5, 4)
INDICES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "everything": (slice(None), SHAPE),
    "dots": (Ellipsis, (4,)),
    "row": (2, (5, 4)),
    "last row": (-1, (4,)),
    "rows": (slice(1, 5), (4, 5, 4)),
    "rows of one value": (slice(1, 5), (1, 5, 1)),
    "every other row": (slice(0, None, 2), (3, 5, 4)),
    "every third row from the second": (slice(1, 6, 3), (2, 1, 4)),
    "rows by their bounds": ((slice(0, 6), slice(0, 5), slice(1, None)), (6, 5, 3)),
    "no rows": (slice(3, 3), (5, 4)),
    "past the end": (slice(4, 100), (2, 5, 4)),
    "columns": ((slice(None), slice(1, 4)), (6, 3, 4)),
    "corner": ((slice(1, 4), slice(2, None), 0), (3, 3)),
    "element": ((3, 2, 1), ()),
    "dots and last": ((Ellipsis, -1), (6, 5)),
    "new dims": ((None, 4, slice(1, 3), None), (1, 2, 1, 4)),
    "row and slice": ((5, slice(None), slice(1, 3)), (5, 2)),
    "leading ones": (slice(2, 4), (1, 2, 5, 4)),
    "list": ([0, 5, 3], (3, 5, 4)),
    "list of columns": ((slice(None), [4, 0]), (6, 2, 4)),
    "list and slice": (([1, 2], slice(1, 3)), (2, 2, 4)),
    "tensor": ((slice(None), slice(None), torch.tensor([3, 1])), (6, 5, 2)),
    "tensors apart": ((torch.tensor([1, 4]), slice(None), torch.tensor([0, 2])), (2, 5)),
    "tensor first": (torch.tensor([[5, 0], [1, 3]]), (2, 2, 5, 4)),
    "number in a tensor": (torch.tensor(2), (5, 4)),
    "mask": (torch.arange(6) % 2 == 0, (3, 5, 4)),
    "true": (True, SHAPE),
}
LAYOUTS: list[tuple[Placement, ...]] = [
    (R,),
    (Shard(0),),
    (Shard(1),),
    (Shard(2),),
    (P,),
    (Partial("avg"),),
]
LAYOUTS_2D = [
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (Shard(0), P),
    (StridedShard(0, 3), R),
    (R, StridedShard(2, 2)),
    (RaggedShard((0, 1, 2), (1, 3)), R),
    (P, Shard(2)),
]


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device_type())


def here(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(here, index))
    return index.to(device_type()) if isinstance(index, torch.Tensor) else index


def placements_of(shape: tuple[int, ...], axes: int) -> list[tuple[Placement, ...]]:
    """Layouts of a value: replicated, partial, cut along its first and its last dim."""
    every = [(R,) * axes, (P,) * axes]
    if shape:
        every += [(Shard(0),) * axes, (R,) * (axes - 1) + (Shard(len(shape) - 1),)]
    return every


def check(mesh: Any, layout: tuple[Placement, ...], write: Any, *wholes: torch.Tensor, value: Any = None) -> None:
    """Writing into a copy of x, with gradients of x and of the value; ``write(x, value)`` is run on both."""
    plain = [w.clone().requires_grad_() for w in wholes]
    expected = plain[0] * 1
    write(expected, *plain[1:])
    (expected * rand(*expected.shape)).sum().backward()
    layouts = [layout, *([value] if value is not None else [])]
    given = [distribute_tensor(w, mesh, p, src_data_rank=None).requires_grad_() for w, p in zip(wholes, layouts)]
    made = given[0] * 1
    assert made.placements == layout
    write(made, *given[1:])
    where = f"{layout}, value {value}"
    assert made.placements == layout, where
    torch.testing.assert_close(made.full_tensor(), expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{where}: {m}")
    (made.full_tensor() * rand(*expected.shape)).sum().backward()
    for tensor, truth in zip(given, plain):
        want = truth.grad
        assert want is not None and tensor.grad is not None, where
        for axis, placement in enumerate(tensor.placements):  # that of a rank's own part of an average
            want = want / (mesh.shape[axis] if placement.is_partial("avg") else 1)
        torch.testing.assert_close(
            tensor.grad.full_tensor(), want, rtol=1e-12, atol=1e-12, msg=lambda m: f"gradient, {where}: {m}"
        )


@on_ranks(2, 3)
@pytest.mark.parametrize("name", INDICES)
def test_any_index_of_any_layout(name: str, ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (ranks,))
    index, shape = INDICES[name]
    index = here(index)

    def write(x: torch.Tensor, value: torch.Tensor) -> None:
        with implicit_replication():
            x[index] = value

    values = placements_of(shape, 1)
    number = list(INDICES).index(name)
    for step, layout in enumerate(LAYOUTS):
        check(mesh, layout, write, rand(*SHAPE), rand(*shape), value=values[(number + step + ranks) % len(values)])


@on_ranks(4)
def test_on_two_axes() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    for number, (index, shape) in enumerate(INDICES.values()):
        index = here(index)

        def write(x: torch.Tensor, value: torch.Tensor, index: Any = index) -> None:
            with implicit_replication():
                x[index] = value

        values = placements_of(shape, 2)
        for step, layout in list(enumerate(LAYOUTS_2D))[number % 2 :: 2]:
            check(mesh, layout, write, rand(*SHAPE), rand(*shape), value=values[(number + step) % len(values)])


@on_ranks(2, 3)
def test_nothing_is_sent_where_the_value_lies_as_the_slice_does(ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (ranks,))
    whole, part = rand(6, 5), rand(6, 2)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    value = distribute_tensor(part, mesh, [Shard(0)])
    mask = x > 0
    column = distribute_tensor(torch.tensor([1, 3], device=device_type()), mesh, [R])
    with CommDebugMode() as comm:
        x[:, 1:3] = value
        x[:, column] = value
        x[4, 0] = 7.0
        x[mask] = 0.0
        x[1:, -1] = distribute_tensor(rand(5), mesh, [R], src_data_rank=None)
    assert comm.get_total_counts() == 0
    expected = whole.clone()
    expected[:, 1:3] = part
    expected[:, [1, 3]] = part
    expected[4, 0] = 7.0
    expected[whole > 0] = 0.0
    expected[1:, -1] = rand(5)
    torch.testing.assert_close(x.full_tensor(), expected)


@on_ranks(2)
@pytest.mark.parametrize("layout", [R, Shard(0), Shard(1), P, Partial("avg")], ids=repr)
def test_numbers_and_masks(layout: Placement) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    whole = rand(5, 4)
    mask, rows = whole > 0.3, torch.arange(5, device=device_type()) % 2 == 0
    expected = whole.clone()
    x = distribute_tensor(whole, mesh, [layout])
    for t, masks in (
        (expected, (mask, rows)),
        (x, tuple(distribute_tensor(m, mesh, [Shard(0)]) for m in (mask, rows))),
    ):
        t[masks[0]] = -1.5
        t[3] = 2.0
        t[0, 1:3] = t[4, 0]
        t[masks[1]] += 1.0
        t[1:3] *= 2.0
        t[-1, -1] = True
    assert x.placements == (layout,)
    torch.testing.assert_close(x.full_tensor(), expected)


@on_ranks(2, 3)
@pytest.mark.parametrize("layout", [R, Shard(0), Shard(1), P], ids=repr)
@pytest.mark.parametrize("accumulate", [False, True], ids=["written", "added"])
def test_index_put(layout: Placement, accumulate: bool, ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (ranks,))
    rows = torch.tensor([1, 4, 1] if accumulate else [1, 4, 0], device=device_type())

    def write(x: torch.Tensor, value: torch.Tensor) -> None:
        with implicit_replication():
            other = torch.index_put(x, [rows], value, accumulate)
            x.index_put_((rows,), value, accumulate=accumulate)
            assert not isinstance(x, DTensor) or other.placements == (layout,)
            x += other

    for value in ((R,), (Shard(1),), (P,)):
        check(mesh, (layout,), write, rand(6, 4), rand(3, 4), value=value)


@on_ranks(2)
def test_an_index_that_does_not_fit_is_an_error_on_all_ranks() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    x = distribute_tensor(rand(6, 4), mesh, [Shard(0)])
    for index in (6, (0, 0, 0), (slice(None), 4)):
        with pytest.raises(IndexError):
            x[index] = 1.0
    with pytest.raises(RuntimeError, match="shape|size"):
        x[1:3] = distribute_tensor(rand(3, 4), mesh, [R])
    with pytest.raises(ValueError, match="a plain tensor of shape"):
        x[1:3] = rand(2, 4)
    x[1:3] = distribute_tensor(rand(6, 4)[1:3], mesh, [R])
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.detach().requires_grad_()[0] = 1.0
    torch.testing.assert_close(x.full_tensor(), rand(6, 4))


@on_ranks(2, 3)
@pytest.mark.parametrize("layout", [R, Shard(0), Shard(1)], ids=repr)
def test_what_is_written_to_a_slice_reaches_its_tensor(layout: Placement, ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (ranks,))
    whole, row = rand(6, 4), rand(4)
    x, value = distribute_tensor(whole, mesh, [layout]), distribute_tensor(row, mesh, [R])
    for t, v in ((whole, row), (x, value)):
        t[1].add_(1.0)
        t[2:4].mul_(2.0)
        t[:, 1].copy_(t[:, 0])
        t[-1, 1:3].zero_()
        t[0][2] = 5.0
        t[4].copy_(v)
        torch.relu_(t[3:])
    torch.testing.assert_close(x.full_tensor(), whole)


@on_ranks(2)
@pytest.mark.parametrize("layout", [R, Shard(0), Shard(1), P], ids=repr)
def test_scattered_slices(layout: Placement) -> None:
    mesh = init_device_mesh(device_type(), (2,))

    def write(x: torch.Tensor, row: torch.Tensor) -> None:
        y = torch.select_scatter(x, row, 0, -2).slice_scatter(x[:, 1:3] * 2, 1, 0, 3, 2)
        assert not isinstance(x, DTensor) or y.placements == (layout,)
        x += y

    for value in ((R,), (Shard(0),), (P,)):
        check(mesh, (layout,), write, rand(6, 4), rand(4), value=value)
    x = distribute_tensor(rand(6, 4), mesh, [layout])
    with pytest.raises(RuntimeError, match=r"src has shape \(1, 4\), the slice that it replaces has \(4,\)"):
        x.select_scatter(x[:1], 0, 0)


@on_ranks(2)
def test_a_slice_is_written_to_itself_where_some_ranks_have_nothing() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    torch.manual_seed(0)
    whole = torch.randn(1, 3, 4, dtype=torch.float64)
    x = distribute_tensor(whole, mesh, [Shard(0)]).clone()
    x[:, 1:2] *= x[:, 1:2]
    whole[:, 1:2] *= whole[:, 1:2]
    assert torch.equal(x.full_tensor(), whole)
    x[:, 1:] = x[:, :-1]  # one device refuses it, and so would the rank that has the row, alone
    whole[:, 1:] = whole[:, :-1].clone()
    assert torch.equal(x.full_tensor(), whole)
