"""Every call of the tables, on combinations of placements: values, shapes and gradients of one device.

The default run tries a few combinations of each call: every placement of every argument, on two ranks or on three. To
run them all, as after a change of the rules, set HYPER_PARALLEL_SWEEP to how many of one call are enough, 100 say;
strided and ragged shards are then among them. HYPER_PARALLEL_CASES=cross leaves the calls with "cross" in their names.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import zlib
from dataclasses import dataclass
from typing import Any

import op_cases_shapes  # noqa: F401
import pytest
import torch
from op_cases import CASES, Arg, Case

from hp_dtensor import DTensor, Partial, Placement, RaggedShard, Replicate, Shard, StridedShard, init_device_mesh
from hp_dtensor.layout.sharding import local_shape, take
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.torch.backward.autograd import grad_spec
from hp_dtensor.torch.dtensor import local_view, wrap
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device

assert len({case.name for case in CASES}) == len(CASES)
LIMIT = int(os.environ.get("HYPER_PARALLEL_SWEEP", "0"))
NAMED = os.environ.get("HYPER_PARALLEL_CASES", "")
CHOSEN = [case for case in CASES if NAMED in case.name]
assert CHOSEN, f"HYPER_PARALLEL_CASES: none of {len(CASES)} calls has {NAMED!r} in its name"
GROUP = 32
GROUPS = [pytest.param(i, id=f"from {CHOSEN[i].name}") for i in range(0, len(CHOSEN), GROUP)]


@dataclass
class Truth:
    """What a call is on one device.

    Attributes:
        case: the call.
        wholes: its arguments.
        values: its results, tensors or not.
        cotangents: for each result that has a gradient, what backward starts with.
        grads: the gradients of the arguments, None where there is none.
    """

    case: Case
    wholes: list[torch.Tensor]
    values: list[Any]
    cotangents: list[torch.Tensor | None]
    grads: list[torch.Tensor | None]


def _whole(arg: Arg, gen: torch.Generator) -> torch.Tensor:
    """Values that sums of a few of them represent exactly."""
    if arg.kind == "b":
        return torch.randint(0, 2, arg.shape, generator=gen).bool()
    if arg.kind.startswith("i"):
        return torch.randint(0, int(arg.kind[1:]), arg.shape, generator=gen)
    count = torch.Size(arg.shape).numel()
    order = torch.randperm(count, generator=gen).double()
    values = (order + 1) / 32 if arg.kind == "p" else (order - count // 2) / 16 + 1 / 32
    return values.reshape(arg.shape)


def _truth(case: Case) -> Truth:
    gen = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    wholes = [_whole(arg, gen) for arg in case.args]
    plain = [whole.clone().requires_grad_(whole.is_floating_point()) for whole in wholes]
    values = _listed(case.run(*plain))
    cotangents = [
        torch.randn(v.shape, generator=gen, dtype=torch.float64).to(v.dtype)
        if isinstance(v, torch.Tensor) and v.requires_grad
        else None
        for v in values
    ]
    roots = [v for v, c in zip(values, cotangents) if c is not None]
    if roots:
        torch.autograd.backward(roots, [c for c in cotangents if c is not None])
    return Truth(case, wholes, values, cotangents, [p.grad for p in plain])


def _choices(arg: Arg, only: str, ranks: int) -> list[Placement]:
    found: list[Placement] = [Replicate()]
    if "shard" in only:
        found += [Shard(dim) for dim in range(len(arg.shape))]
    if LIMIT and "shard" in only and arg.shape:
        found += [StridedShard(dim, 2) for dim, size in enumerate(arg.shape) if size and size % 2 == 0]
        count = torch.Size(arg.shape).numel()
        if count >= ranks:
            units = (1,) * (ranks - 2) + (0, count - ranks + 2)
            found.append(RaggedShard(tuple(range(len(arg.shape))), units))
    if arg.kind in "fp":
        found += [Partial()] * ("partial" in only) + [Partial("avg")] * ("avg" in only)
    return found


def _exists(arg: Arg, placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> bool:
    """Whether there is such a tensor: a split_factor, or the units of a run, may not divide what other axes leave."""
    try:
        for place in itertools.product(*map(range, mesh_shape)):
            local_shape(arg.shape, placements, mesh_shape, place)
    except ValueError:
        return False
    return True


def _combinations(case: Case, mesh_shape: tuple[int, ...], limit: int) -> list[tuple[tuple[Placement, ...], ...]]:
    """All combinations, or as many as ``limit`` of them, but every placement of every argument on one axis."""
    rng = random.Random(zlib.crc32(case.name.encode()))
    axes = len(mesh_shape)
    choices = [list(itertools.product(_choices(arg, case.only, mesh_shape[0]), repeat=axes)) for arg in case.args]
    choices = [[p for p in each if _exists(arg, p, mesh_shape)] for arg, each in zip(case.args, choices)]
    every = 1
    for each in choices:
        every *= len(each)
    if every <= limit:
        return list(itertools.product(*choices))
    rows = [rng.sample(each, len(each)) for each in choices]
    least = max(map(len, rows)) if axes == 1 else limit
    found = {tuple(row[i % len(row)] for row in rows): None for i in range(least)}
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
    got, expected = got.detach().cpu(), expected.detach()
    assert got.shape == expected.shape and got.dtype is expected.dtype, f"{what}: {got.shape} for {expected.shape}"
    tolerance = (
        1e-12
        if expected.dtype is torch.float64
        else 1e-6
        if expected.is_floating_point() or expected.is_complex()
        else 0
    )
    if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        raise AssertionError(f"{what}: got\n{got}\nfor\n{expected}")


def _holds(made: DTensor, expected: torch.Tensor, what: str) -> None:
    """A DTensor's part on this rank is the part of ``expected``."""
    spec = made._spec
    assert tuple(made.shape) == tuple(expected.shape), f"{what}: shape {made.shape} for {expected.shape}"
    assert tuple(local_view(made).shape) == spec.local_shape, f"{what}: {spec} holds {local_view(made).shape}"
    if made.is_partial():
        _same(made.full_tensor(), expected, what)
    else:
        mine = take(expected.numpy(force=True), spec.placements, spec.mesh.shape, spec.mesh.get_coordinate())
        _same(
            local_view(made), torch.from_numpy(mine), f"{what} on rank {spec.mesh.get_rank()} placed {spec.placements}"
        )


def _run(truth: Truth, mesh: Any, placements: tuple[tuple[Placement, ...], ...]) -> bool:
    """One combination, twice: a call is planned the first time and found the second. False where it refuses."""
    case = truth.case
    for attempt in range(2):
        what = f"{case.name} of {placements} on {mesh.shape}, call {attempt + 1}"
        given = [_leaf(w, p, mesh, i) for i, (w, p) in enumerate(zip(truth.wholes, placements))]
        before = [local_view(t).clone() for t in given]
        try:
            out = _listed(case.run(*given))
        except (NotImplementedError, RuntimeError) as error:
            assert case.refuses and re.search(case.refuses, str(error)), f"{what}: {type(error).__name__}: {error}"
            return False
        assert len(out) == len(truth.values), what
        for made, value in zip(out, truth.values):
            if not isinstance(value, torch.Tensor):
                assert made == value and type(made) is type(value), what
                continue
            assert isinstance(made, DTensor) and made.device_mesh == mesh, f"{what}: {type(made)}"
            assert made.requires_grad == value.requires_grad, f"{what}: requires_grad {made.requires_grad}"
            _holds(made, value, what)
        for tensor, old in zip(given, before):
            assert torch.equal(local_view(tensor), old), f"{what}: an argument was changed"
        _check_gradients(truth, out, given, what, from_whole=attempt == 1)
    return True


def _check_gradients(truth: Truth, out: list[Any], given: list[DTensor], what: str, from_whole: bool) -> None:
    mesh = given[0].device_mesh
    roots, starts = [], []
    for made, cotangent in zip(out, truth.cotangents):
        if cotangent is None:
            continue
        if from_whole:
            roots.append(made.full_tensor())
            starts.append(cotangent.to(mesh.device_type))
        else:
            roots.append(made)
            starts.append(_leaf(cotangent, grad_spec(made._spec).placements, mesh, 0).detach())
    if not roots:
        return
    torch.autograd.backward(roots, starts)
    for index, (tensor, grad) in enumerate(zip(given, truth.grads)):
        where = f"{what}: gradient of argument {index}"
        if grad is None:
            assert tensor.grad is None or not local_view(tensor.grad).any(), where
            continue
        assert tensor.grad is not None, f"{where}: none"
        assert tensor.grad._spec is grad_spec(tensor._spec), where
        for axis, placement in enumerate(tensor.placements):  # that of a rank's own part of an average
            grad = grad / (mesh.shape[axis] if placement.is_partial("avg") else 1)
        _holds(tensor.grad, grad, where)


def _sweep(first: int, mesh: Any, limit: int) -> None:
    for case in CHOSEN[first : first + GROUP]:
        truth = _truth(case)
        combinations = _combinations(case, mesh.shape, max(limit, LIMIT))
        if not LIMIT and mesh.ndim == 1 and len(combinations) > 1:  # one half on two ranks, the other on three
            combinations = combinations[mesh.size() % 2 :: 2]
        ran = [_run(truth, mesh, p) for p in combinations]
        assert any(ran) or case.refuses, f"{case.name} refuses every combination"


@on_ranks(3, thorough=(2,), timeout=300.0)
@pytest.mark.parametrize("first", GROUPS)
def test_one_axis(first: int, ranks: int) -> None:
    _sweep(first, init_device_mesh(device_type(), (ranks,)), 2)


@on_ranks(4, timeout=300.0)
@pytest.mark.parametrize("first", GROUPS)
def test_two_axes(first: int) -> None:
    _sweep(first, init_device_mesh(device_type(), (2, 2)), 1)
