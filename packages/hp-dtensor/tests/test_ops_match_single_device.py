"""Every call of the tables, on every combination of placements: values, shapes and gradients of one device."""

from __future__ import annotations

import itertools
import random
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from hp_dtensor.sharding import take
from hp_dtensor.spec import TensorSpec
from hp_dtensor.torch.autograd import grad_spec
from hp_dtensor.torch.dtensor import local_view, wrap
from hp_platform.testing import device_type, on_ranks

sys.path.insert(0, str(Path(__file__).parent))  # the tables; pytest imports tests by their path
import op_cases_shapes  # noqa: F401
from op_cases import CASES, Arg, Case

NAMES = {case.name: case for case in CASES}
assert len(NAMES) == len(CASES)
LIMIT = 24
"""Combinations of placements that are tried of one call."""


def _whole(arg: Arg, rng: random.Random) -> torch.Tensor:
    """Values that sums of a few of them represent exactly."""
    gen = torch.Generator().manual_seed(rng.randrange(2**31))
    count = 1
    for size in arg.shape:
        count *= size
    if arg.kind == "b":
        return torch.randint(0, 2, arg.shape, generator=gen).bool()
    if arg.kind.startswith("i"):
        return torch.randint(0, int(arg.kind[1:]), arg.shape, generator=gen)
    order = torch.randperm(count, generator=gen).double()
    values = (order + 1) / 32 if arg.kind == "p" else (order - count // 2) / 16 + 1 / 32
    return values.reshape(arg.shape)


def _choices(arg: Arg, only: str) -> list[Placement]:
    found: list[Placement] = [Replicate()]
    if "shard" in only:
        found += [Shard(dim) for dim in range(len(arg.shape))]
    if arg.kind in "fp":
        found += [Partial()] * ("partial" in only) + [Partial("avg")] * ("avg" in only)
    return found


def _combinations(case: Case, axes: int, limit: int) -> list[tuple[tuple[Placement, ...], ...]]:
    """All combinations, or as many as ``limit`` of them, with every placement of every argument among them."""
    rng = random.Random(zlib.crc32(case.name.encode()))
    choices = [list(itertools.product(_choices(arg, case.only), repeat=axes)) for arg in case.args]
    every = 1
    for each in choices:
        every *= len(each)
    if every <= limit:
        return list(itertools.product(*choices))
    rows = [rng.sample(each, len(each)) for each in choices]
    longest = min(max(map(len, rows)), limit)
    found = {tuple(row[i % len(row)] for row in rows): None for i in range(longest)}
    while len(found) < limit:
        found[tuple(rng.choice(each) for each in choices)] = None
    return list(found)


def _leaf(whole: torch.Tensor, placements: tuple[Placement, ...], mesh: Any, seed: int) -> DTensor:
    """A leaf whose full value is ``whole``; what a rank holds differs from others' along axes that are partial only."""
    mine = mesh.get_coordinate()
    gen = torch.Generator().manual_seed(seed)
    part = whole
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            count = mesh.shape[axis]
            others = [torch.randint(-64, 64, whole.shape, generator=gen).double() / 32 for _ in range(count - 1)]
            first = part * (count if placement.is_partial("avg") else 1) - sum(others)
            part = [first, *others][mine[axis]]
    local = torch.from_numpy(take(part.numpy(), placements, mesh.shape, mine).copy()).to(mesh.device_type)
    made = wrap(local, TensorSpec.of(mesh, placements, whole.shape))
    return made.requires_grad_(whole.is_floating_point())


def _listed(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    tolerance = 1e-12 if expected.dtype is torch.float64 else 1e-6 if expected.is_floating_point() else 0
    torch.testing.assert_close(
        got.detach().cpu(), expected.detach(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def _run(case: Case, mesh: Any, placements: tuple[tuple[Placement, ...], ...], seed: int) -> str | None:
    """One combination, twice: a call is planned the first time and found the second. Returns the text of a refusal."""
    rng = random.Random(seed)
    wholes = [_whole(arg, rng) for arg in case.args]
    for attempt in range(2):
        what = f"{case.name} of {placements} on {mesh.shape}, call {attempt + 1}"
        plain = [whole.clone().requires_grad_(whole.is_floating_point()) for whole in wholes]
        given = [_leaf(w, p, mesh, seed + i) for i, (w, p) in enumerate(zip(wholes, placements))]
        before = [local_view(t).clone() for t in given]
        expected = _listed(case.run(*plain))
        try:
            out = _listed(case.run(*given))
        except (NotImplementedError, RuntimeError) as error:
            assert case.refuses and re.search(case.refuses, str(error)), f"{what}: {type(error).__name__}: {error}"
            return str(error)
        assert len(out) == len(expected), what
        for made, value in zip(out, expected):
            if not isinstance(value, torch.Tensor):
                assert made == value and type(made) is type(value), what
                continue
            assert type(made) is DTensor and made.device_mesh == mesh, f"{what}: {type(made)}"
            assert tuple(made.shape) == tuple(value.shape), f"{what}: shape {made.shape} for {value.shape}"
            assert made.dtype == value.dtype, f"{what}: {made.dtype} for {value.dtype}"
            assert tuple(local_view(made).shape) == made._spec.local_shape, (
                f"{what}: {made._spec} holds {local_view(made).shape}"
            )
            _same(made.full_tensor(), value, what)
        for tensor, old in zip(given, before):
            assert torch.equal(local_view(tensor), old), f"{what}: an argument was changed"
        _check_gradients(out, expected, given, plain, mesh, what, whole_first=attempt == 1)
    return None


def _check_gradients(
    out: list[Any], expected: list[Any], given: list[DTensor], plain: list[Any], mesh: Any, what: str, whole_first: bool
) -> None:
    gen = torch.Generator().manual_seed(7)
    roots, cots, plain_roots, plain_cots = [], [], [], []
    for made, value in zip(out, expected):
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            assert not (isinstance(made, DTensor) and made.requires_grad), f"{what}: requires_grad"
            continue
        cotangent = torch.randn(value.shape, generator=gen, dtype=torch.float64).to(value.dtype)
        plain_roots.append(value)
        plain_cots.append(cotangent)
        assert made.requires_grad, f"{what}: no gradient"
        if whole_first:
            roots.append(made.full_tensor())
            cots.append(cotangent.to(mesh.device_type))
        else:
            spec = grad_spec(made._spec)
            roots.append(made)
            cots.append(_leaf(cotangent, spec.placements, mesh, 0).detach())
    if not roots:
        return
    torch.autograd.backward(plain_roots, plain_cots)
    torch.autograd.backward(roots, cots)
    for index, (tensor, value) in enumerate(zip(given, plain)):
        if value.grad is None:
            assert tensor.grad is None or not local_view(tensor.grad).any(), f"{what}: gradient of argument {index}"
            continue
        assert tensor.grad is not None, f"{what}: argument {index} got no gradient"
        assert tensor.grad._spec is grad_spec(tensor._spec), what
        scale = 1.0
        for axis, placement in enumerate(tensor.placements):
            scale /= mesh.shape[axis] if placement.is_partial("avg") else 1
        _same(tensor.grad.full_tensor(), value.grad * scale, f"{what}: gradient of argument {index}")


@on_ranks(2, 3)
@pytest.mark.parametrize("name", NAMES)
def test_one_axis(name: str, ranks: int) -> None:
    case = NAMES[name]
    mesh = init_device_mesh(device_type(), (ranks,))
    combinations = _combinations(case, 1, LIMIT)
    refused = [p for seed, p in enumerate(combinations) if _run(case, mesh, p, seed)]
    assert len(refused) < len(combinations) or "no sharding rule" in case.refuses, f"{name} refuses every combination"


@on_ranks(4)
@pytest.mark.parametrize("name", NAMES)
def test_two_axes(name: str) -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    for seed, placements in enumerate(_combinations(NAMES[name], 2, 6)):
        _run(NAMES[name], mesh, placements, seed)
