"""The PyTorch executor against the same plans run on numpy."""

from __future__ import annotations

import random
from math import gcd, prod

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor.layout.placements import PARTIAL_OPS, Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.sharding import local_shape, take
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.mesh.meshes import init_device_mesh
from hp_dtensor.redistribution import AllGather, AllReduce, AllToAll, ReduceScatter, plan, simulate
from hp_dtensor.redistribution.executor import coordinates
from hp_dtensor.torch.moves import redistribute
from hp_dtensor.torch.moves.redistribute import execute
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device

R = Replicate()
MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (2, 1, 2)]}


def _spec(mesh, placements, shape) -> TensorSpec:
    return TensorSpec.of(mesh, placements, shape)


def _any_placements(rng: random.Random, shape: tuple, mesh_shape: tuple) -> tuple:
    found: list = [R] * len(mesh_shape)
    ragged = rng.randrange(len(mesh_shape)) if shape and rng.random() < 0.3 else None
    for axis in range(len(mesh_shape)):
        if axis == ragged:
            continue
        kind = rng.choice(["replicate", "partial", "shard", "shard", "strided"])
        if kind == "partial":
            found[axis] = Partial(rng.choice(PARTIAL_OPS))
        elif kind in ("shard", "strided") and shape:
            dim = rng.randrange(len(shape))
            left = gcd(*(local_shape(shape, found, mesh_shape, c)[dim] for c in coordinates(mesh_shape)))
            factors = [f for f in range(1, left + 1) if left % f == 0] or [1]
            found[axis] = Shard(dim) if kind == "shard" else StridedShard(dim, rng.choice(factors))
    if ragged is not None:
        first = rng.randrange(len(shape))
        dims = tuple(range(first, rng.randrange(first, len(shape)) + 1))
        left = gcd(*(prod(local_shape(shape, found, mesh_shape, c)[d] for d in dims) for c in coordinates(mesh_shape)))
        total = rng.choice([f for f in range(1, left + 1) if left % f == 0] or [1])
        cuts = sorted(rng.randint(0, total) for _ in range(mesh_shape[ragged] - 1))
        units = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
        owners = [rank for rank, count in enumerate(units) for _ in range(count)]
        rng.shuffle(owners)
        found[ragged] = RaggedShard(dims, units, tuple(owners) if rng.random() < 0.5 else ())
    return tuple(found)


def _values(rng: random.Random, placements: tuple, shape: tuple, mesh_shape: tuple, dtype: type) -> dict:
    """A whole array for each rank, alike on the ranks of an axis that is not Partial; sums and products are exact."""
    numbers = np.random.default_rng(rng.randrange(2**31))
    choices = [1.0, 2.0, 0.5, -1.0] if dtype is np.float64 else [0, 1, 2]
    values = {c: numbers.choice(choices, size=shape).astype(dtype) for c in coordinates(mesh_shape)}
    return {
        c: values[tuple(i if isinstance(p, Partial) else 0 for i, p in zip(c, placements, strict=True))] for c in values
    }


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("seed", [0, 1])
def test_any_placements_to_any_others(seed: int, ranks: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    for mesh_shape in MESHES[ranks]:
        mesh = init_device_mesh(device_type(), mesh_shape)
        for _ in range(60):
            shape = tuple(rng.choice([0, 1, 2, 3, 4, 5, 6, 8, 9, 12]) for _ in range(rng.randrange(4)))
            src, dst = (_any_placements(rng, shape, mesh_shape) for _ in range(2))
            arrays = _values(rng, src, shape, mesh_shape, np.float64)
            _check(mesh, shape, src, dst, {c: take(a, src, mesh_shape, c) for c, a in arrays.items()})


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [np.float64, np.bool_, np.complex64], ids=lambda kind: kind.__name__)
def test_large_exchanges_keep_their_own_piece(dtype: type, ranks: int) -> None:
    """From ``OVERLAPPED`` bytes on, what stays on a rank is not sent to it."""
    torch.set_num_threads(1)
    mesh = init_device_mesh(device_type(), (ranks,))
    shape = (2 * ranks, 3 * ranks, ranks)
    whole = np.arange(prod(shape)).reshape(shape).astype(dtype)
    moves = [(Shard(a), Shard(b)) for a in range(3) for b in range(3) if a != b]
    usual, redistribute.OVERLAPPED = redistribute.OVERLAPPED, 1
    try:
        for source, target in [*moves, (Shard(1), StridedShard(1, 3)), (StridedShard(1, 3), Shard(1))]:
            locals_ = {c: take(whole, (source,), mesh.shape, c) for c in coordinates(mesh.shape)}
            _check(mesh, shape, (source,), (target,), locals_)
    finally:
        redistribute.OVERLAPPED = usual


@on_ranks(2, 3, 4)
def test_ranks_in_any_order(ranks: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(ranks)
    for mesh_shape in MESHES[ranks]:
        for _ in range(4):
            mesh = DeviceMesh(device_type(), np.array(rng.sample(range(ranks), ranks)).reshape(mesh_shape))
            for _ in range(25):
                shape = tuple(rng.choice([0, 1, 3, 4, 6, 8]) for _ in range(rng.randrange(1, 4)))
                src, dst = (_any_placements(rng, shape, mesh_shape) for _ in range(2))
                arrays = _values(rng, src, shape, mesh_shape, np.float64)
                _check(mesh, shape, src, dst, {c: take(a, src, mesh_shape, c) for c, a in arrays.items()})


def _check(mesh, shape: tuple, src: tuple, dst: tuple, locals_: dict) -> None:
    where = f"{src} -> {dst} of {shape} on {mesh.shape} at {mesh.get_coordinate()}"
    steps = plan(src, dst, shape, mesh.shape)
    expected = simulate(steps, locals_, shape, mesh.shape)[mesh.get_coordinate()]
    local = torch.from_numpy(locals_[mesh.get_coordinate()].copy()).to(mesh.device_type)
    given = local.clone()
    result = execute(local, _spec(mesh, src, shape), _spec(mesh, dst, shape))
    assert torch.equal(local, given), f"the input changed: {where}"
    assert type(result) is torch.Tensor and result.is_contiguous() and result.dtype is local.dtype, where
    assert tuple(result.shape) == expected.shape, where
    assert np.array_equal(result.cpu().numpy(), expected), where


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.int32, torch.int64, torch.uint8], ids=str)
def test_dtypes_that_backends_lack(dtype: torch.dtype, ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (ranks,))
    rng = random.Random(7)
    numpy_dtype = np.dtype(str(dtype).removeprefix("torch.")).type
    moves = [
        (Shard(0), R),
        (Shard(0), Shard(1)),
        (Shard(1), StridedShard(1, 1)),
        (R, Shard(1)),
        (R, Partial("product")),
    ]
    moves += [(Partial(op), target) for op in ("min", "max", "product", "sum") for target in (R, Shard(0))]
    for shape in ((6, 6), (5, 4)):
        for source, target in moves:
            arrays = _values(rng, (source,), shape, mesh.shape, numpy_dtype)
            _check(mesh, shape, (source,), (target,), {c: take(a, (source,), mesh.shape, c) for c, a in arrays.items()})


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_dtypes_that_numpy_lacks(dtype: torch.dtype) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    whole = torch.arange(12, device=mesh.device_type).reshape(4, 3).to(torch.float32).to(dtype)
    shard = whole[mesh.get_local_rank(0) * 2 :][:2].clone()
    specs = {p: _spec(mesh, (p,), (4, 3)) for p in (Shard(0), Shard(1), R, Partial())}
    for target in (R, Shard(1)):
        got = execute(shard, specs[Shard(0)], specs[target])
        back = execute(got, specs[target], specs[Shard(0)])
        assert got.dtype is dtype and _same_bits(back, shard)
    assert _same_bits(execute(shard, specs[Shard(0)], specs[R]), whole)
    if dtype is not torch.float8_e4m3fn:
        assert torch.equal(execute(whole, specs[Partial()], specs[R]), whole + whole)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@on_ranks(2)
def test_reductions_without_meaning_are_errors() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    whole = torch.ones(4, device=mesh.device_type)
    to = _spec(mesh, (R,), (4,))
    with pytest.raises(TypeError, match=r"a torch.complex64 tensor cannot be reduced by 'max'"):
        execute(whole.to(torch.complex64), _spec(mesh, (Partial("max"),), (4,)), to)
    with pytest.raises(TypeError, match=r"a torch.bool tensor cannot be reduced by 'avg'"):
        execute(whole.bool(), _spec(mesh, (Partial("avg"),), (4,)), to)


@on_ranks(2)
def test_wrong_arguments_are_errors_before_anything_is_sent() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    other = init_device_mesh(device_type(), (1, 2))
    spec = _spec(mesh, (Shard(0),), (4, 4))
    local = torch.ones(2, 4, device=mesh.device_type)
    with pytest.raises(ValueError, match=r"shape \(4, 4\) cannot become \(4, 8\)"):
        execute(local, spec, _spec(mesh, (R,), (4, 8)))
    with pytest.raises(ValueError, match="one mesh is needed"):
        execute(local, spec, _spec(other, (R, R), (4, 4)))
    with pytest.raises(ValueError, match=r"the local tensor has shape \(3, 4\).*gives this rank \(2, 4\)"):
        execute(torch.ones(3, 4, device=mesh.device_type), spec, _spec(mesh, (R,), (4, 4)))


class _Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was dispatched")


@on_ranks(2)
def test_a_subclass_is_taken_as_the_tensor_that_it_is() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    for target in (R, Shard(0), Shard(1)):
        local = torch.ones(2, 4, device=mesh.device_type, requires_grad=True).as_subclass(_Loud)
        result = execute(local, _spec(mesh, (Shard(0),), (4, 4)), _spec(mesh, (target,), (4, 4)))
        assert type(result) is torch.Tensor and not result.requires_grad and result is not local


@on_ranks(2)
def test_a_strided_input_is_taken() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    local = torch.arange(8.0, device=mesh.device_type).reshape(4, 2).t()
    result = execute(local, _spec(mesh, (Shard(0),), (4, 4)), _spec(mesh, (R,), (4, 4)))
    assert result.is_contiguous() and torch.equal(result, torch.cat([local, local]))


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = func._schema.returns and any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and not views and name not in ("new_empty", "empty"):
            self.copies.append(name)
        return func(*args, **(kwargs or {}))


@on_ranks(2)
@pytest.mark.parametrize(
    ("source", "target", "copies"),
    [
        (Shard(0), R, 0),
        (RaggedShard((0, 1), (1, 1)), R, 0),
        (Partial(), Shard(0), 0),
        (Partial(), R, 1),
        (Shard(1), R, 1),
        (Partial(), Shard(1), 1),
        (Shard(0), Shard(1), 1),
        (Shard(1), Shard(0), 1),
        (R, Shard(0), 1),
        (RaggedShard((0, 1), (3, 1)), RaggedShard((0, 1), (1, 1)), 0),
        (RaggedShard((0, 1), (3, 1)), Shard(0), 0),
        (RaggedShard((0, 1), (7, 1)), R, 1),
    ],
    ids=repr,
)
def test_copies_are_only_those_that_the_layout_needs(source, target, copies: int) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    specs = _spec(mesh, (source,), (4, 8)), _spec(mesh, (target,), (4, 8))
    local = torch.ones(specs[0].local_shape, device=mesh.device_type)
    execute(local, *specs)
    with _Ops() as ops:
        execute(local, *specs)
    # gloo's own reduce-scatter copies inside.
    inside = ("copy_",) if source == Partial() and target != R else ()
    assert len([name for name in ops.copies if name not in inside]) == copies, ops.copies


@on_ranks(4)
def test_one_collective_for_each_step_that_sends() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    kinds = {AllReduce: "all_reduce", AllGather: "all_gather", ReduceScatter: "reduce_scatter", AllToAll: "all_to_all"}
    for src, dst in [((Shard(0), Partial()), (R, R)), ((Partial(), Shard(1)), (Shard(1), Shard(0)))]:
        specs = _spec(mesh, src, (8, 8)), _spec(mesh, dst, (8, 8))
        with count_collectives() as counts:
            execute(torch.ones(specs[0].local_shape, device=mesh.device_type), *specs)
        expected = [kinds[type(step)] for step in plan(src, dst, (8, 8), (2, 2)) if type(step) in kinds]
        assert dict(counts) == {kind: expected.count(kind) for kind in expected}


@on_ranks(3)
def test_far_from_even_pieces_are_sent_as_they_are() -> None:
    mesh = init_device_mesh(device_type(), (3,))
    ragged = RaggedShard((0,), (10, 0, 2))
    specs = _spec(mesh, (ragged,), (120,)), _spec(mesh, (R,), (120,))
    with count_collectives() as counts:
        result = execute(torch.arange(float(prod(specs[0].local_shape)), device=mesh.device_type), *specs)
    assert dict(counts) == {"all_to_all": 1}
    assert torch.equal(result.cpu(), torch.cat([torch.arange(100.0), torch.arange(20.0)]))


@on_ranks(2)
def test_a_rank_outside_the_mesh_takes_no_part() -> None:
    from hp_dtensor.mesh.device_mesh import DeviceMesh

    mesh = DeviceMesh(device_type(), [0])
    specs = _spec(mesh, (Shard(0),), (4,)), _spec(mesh, (R,), (4,))
    assert execute(torch.ones(specs[0].local_shape, device=mesh.device_type), *specs).shape == specs[0].local_shape
