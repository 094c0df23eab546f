"""Views and moves of dims: what needs no communication, for which cuts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours import P, R, close, counted, like_one_device, line, place, rand

from hp_dtensor import Shard, init_device_mesh
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

# the call, its operand's shape, the dims that may be cut evenly without communication
CASES: list[tuple[str, Callable[[Any], Any], tuple[int, ...], tuple[int, ...]]] = [
    ("atleast_1d", torch.atleast_1d, (4, 6), (0, 1)),
    ("atleast_2d of one dim", torch.atleast_2d, (4,), (0,)),
    ("atleast_3d of one dim", torch.atleast_3d, (4,), (0,)),
    ("atleast_3d of two dims", torch.atleast_3d, (4, 6), (0, 1)),
    ("broadcast_to, a dim before", lambda x: torch.broadcast_to(x, (1, 4, 6)), (4, 6), (0, 1)),
    ("broadcast_to, more dims", lambda x: torch.broadcast_to(x, (3, 4, 5, 6)), (4, 1, 6), (0, 2)),
    ("broadcast_to as it is", lambda x: torch.broadcast_to(x, (-1, 6)), (4, 6), (0, 1)),
    ("expand", lambda x: x.expand(3, 4, 5, -1, 7), (4, 1, 6, 1), (0, 2)),
    ("expand of a tuple", lambda x: x.expand((3, 4, 5, 6)), (4, 1, 6), (0, 2)),
    ("flatten", torch.flatten, (4, 6), (0, 1)),
    ("flatten of one dim", torch.flatten, (8,), (0,)),
    ("movedim", lambda x: torch.movedim(x, 1, 2), (4, 6, 8, 2), (0, 1, 2, 3)),
    ("movedim of two", lambda x: torch.movedim(x, (1, 2), (0, 1)), (4, 6, 8), (0, 1, 2)),
    ("movedim from behind", lambda x: torch.movedim(x, (1, 2), (-3, -2)), (4, 6, 8), (0, 1, 2)),
    ("permute", lambda x: torch.permute(x, (2, 0, 1)), (4, 6, 8), (0, 1, 2)),
    ("permute from behind", lambda x: torch.permute(x, (-1, -3, -2)), (4, 6, 8), (0, 1, 2)),
    ("ravel", torch.ravel, (4, 6), (0, 1)),
    ("repeat", lambda x: x.repeat(1, 2, 1, 1, 2), (4, 6), (0,)),
    ("repeat nothing", lambda x: x.repeat(1, 1), (4, 6), (0, 1)),
    ("tile", lambda x: torch.tile(x, (1, 3)), (4, 6, 8), (0, 1)),
    ("tile, more dims", lambda x: torch.tile(x, (2, 1, 1)), (4, 6), (0, 1)),
    ("reshape, two dims in one", lambda x: torch.reshape(x, (24, 8)), (4, 6, 8), (0, 1, 2)),
    ("transpose", lambda x: torch.transpose(x, 2, 0), (4, 6, 8, 2), (0, 1, 2, 3)),
    ("transpose from behind", lambda x: torch.transpose(x, -1, 0), (4, 6, 8), (0, 1, 2)),
    ("swapaxes by name", lambda x: torch.swapaxes(x, axis0=0, axis1=2), (4, 6, 8), (0, 1, 2)),
    ("t of one dim", lambda x: x.t(), (8,), (0,)),
    ("unsqueeze", lambda x: torch.unsqueeze(x, 1), (4, 6, 8), (0, 1, 2)),
    ("squeeze", torch.squeeze, (4, 1, 6), (0, 2)),
    ("view of a dim among ones", lambda x: x.view(-1), (1, 1, 8), (2,)),
    ("view of two dims among ones", lambda x: x.view(-1), (1, 1, 4, 1, 6, 1), (2, 4)),
    ("view, one dim in two", lambda x: x.view(4, 2, 4), (4, 8), (0, 1)),
    ("view, two dims in one and one in two", lambda x: x.view(24, 4, 2), (4, 6, 8), (0, 1, 2)),
    ("unflatten", lambda x: x.unflatten(-1, (4, -1)), (4, 8), (0, 1)),
    ("split", lambda x: torch.stack(x.split(2, dim=1)), (4, 6), (0,)),
    ("unbind", lambda x: x.unbind(1)[1], (4, 6, 8), (0, 2)),
    ("flip", lambda x: x.flip(1), (4, 6), (0,)),
    ("reversed", lambda x: reversed(x), (4, 6), (1,)),
    ("roll", lambda x: x.roll(1, 0), (4, 6), (1,)),
    ("cat by name", lambda x: torch.cat(tensors=[x, x], dim=1), (4, 6), (0,)),
    ("slice past the end", lambda x: x[:, :9], (4, 6), (0, 1)),
    ("slice of a whole dim", lambda x: x[1:3, :], (4, 6), (1,)),
    ("view_as_complex and back", lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j), (4, 6, 2), (0, 1)),
]


@on_ranks(4)
@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_nothing_is_sent(name: str) -> None:
    _, call, shape, free = next(case for case in CASES if case[0] == name)
    mesh = init_device_mesh(device_type(), (2, 2))
    choices = [R, P, *map(Shard, free)]
    for placements in itertools.product(choices, choices):
        dims = [p.dim for p in placements if isinstance(p, Shard)]
        if len(dims) == 2 and dims[0] == dims[1] and shape[dims[0]] % 4:
            continue
        if len(dims) == 2 and any(word in name for word in ("view", "flatten", "in one", "ravel")):
            continue  # two cuts may meet in one dim
        made, counts = like_one_device(call, [rand(*shape)], mesh, [placements])
        assert not counts, f"{placements}: {counts}"
        for have, got in zip(placements, made.placements, strict=True):
            assert not have.is_partial() or got.is_partial()
            assert have.is_replicate() == got.is_replicate(), f"{placements} became {made.placements}"


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("size", [1, 5])
def test_an_uneven_dim_that_stays_is_the_same_memory(size: int, ranks: int) -> None:
    whole = rand(size, 2, 2, 2)
    x = place(whole, line(ranks), Shard(0))
    for shape in ((size, 2, 4), (size, 4, 2), (size, 8), (size, 2, 2, 2)):
        made, counts = counted(lambda shape=shape: x.view(shape))
        assert not counts and made.placements == (Shard(0),)
        assert made.to_local().data_ptr() == x.to_local().data_ptr()
        close(made, whole.view(shape))


@on_ranks(2, 3)
def test_a_cut_that_a_view_can_not_keep_is_gathered(ranks: int) -> None:
    whole = rand(4, 4)
    x = place(whole, line(ranks), Shard(0), grad=True)
    made = x.view(-1, 8)
    close(made.detach(), whole.view(-1, 8))
    made.square().sum().backward()
    close(x.grad, 2 * whole)
    with pytest.raises(RuntimeError, match="size|shape"):
        x.view(3, 5)


@on_ranks(2)
def test_strides_are_of_the_whole() -> None:
    mesh, whole = line(2), rand(4, 6, 8)
    for placement in (R, Shard(0), Shard(1), Shard(2)):
        x = place(whole, mesh, placement)
        for change in (
            lambda t: t,
            lambda t: t.transpose(0, 2),
            lambda t: t.permute(1, 2, 0),
            lambda t: t.transpose(0, 2).contiguous(),
            lambda t: t.unsqueeze(1),
        ):
            got, want = change(x), change(whole)
            assert got.stride() == want.stride() and got.is_contiguous() == want.is_contiguous()
            assert got.to_local().is_contiguous() == want.is_contiguous()
    local = rand(8, 4, 8).permute(1, 2, 0)
    assert tuple(local.stride()) == (8, 1, 32)
