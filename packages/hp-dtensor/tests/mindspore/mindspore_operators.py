"""Judges MindSpore's operators on DTensors: values and gradients on placements of every operand, against one device.

An operator is *wrong* where a combination of placements gives another value or gradient, *refused* where one raises (on
all ranks alike) and none is wrong, *missing* where MindSpore refuses the call on one device, and otherwise *right*.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.graph.api import _pynative_executor
from mindspore_operator_table import OPERATORS, SINGLE, Flags, Ints

from hp_dtensor import DTensor, Partial, Replicate, Shard, implicit_replication, init_device_mesh
from hp_dtensor import parallelize_value_and_grad as value_and_grad
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mindspore.backward.autograd import execute, forget
from hp_dtensor.mindspore.dtensor import wrap

__all__ = ["Verdict", "judge", "judge_all", "judge_in_pool"]


@dataclass
class Verdict:
    """One operator's outcome.

    Attributes:
        name: the operator's name in the table.
        right: the number of combinations of placements that gave one device's values and gradients.
        raised: the errors' first lines, with the number of combinations.
        wrong: what differed, and on which placements.
        missing: why one device refuses the call; None where it does not.
    """

    name: str
    right: int = 0
    raised: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    missing: str | None = None

    @property
    def outcome(self) -> str:
        """One of missing, wrong, refused and right."""
        if self.missing is not None:
            return "missing"
        return "wrong" if self.wrong else "refused" if self.raised or not self.right else "right"


def judge(name: str, mesh_shape: Sequence[int], limit: int) -> Verdict:
    """Judge one operator on this rank.

    Args:
        name: its name in the table.
        mesh_shape: the mesh of all ranks.
        limit: the most combinations of placements to try; all replicated is the first.
    """
    case, verdict, mesh = OPERATORS[name], Verdict(name), init_device_mesh("cpu", tuple(mesh_shape))
    try:
        operands, seeds, expected = _truth(name)
    except Exception as error:
        _recover()
        verdict.missing = _line(error)
        return verdict
    for placements in _combinations(name, operands, mesh.ndim, limit):
        what = ", ".join("".join(map(_short, placed)) for placed in placements)
        try:
            inputs = [_distributed(x, mesh, placed) for x, placed in zip(operands, placements, strict=True)]
            with implicit_replication():  # of index tensors in the table
                made = _run(case.function, inputs, [_replicated(seed, mesh) for seed in seeds], value_and_grad)
        except Exception as error:
            _recover()
            line = _line(error)
            verdict.raised[line] = verdict.raised.get(line, 0) + 1
            continue
        problem = _difference(made, expected, name in SINGLE)
        if problem is None:
            verdict.right += 1
        else:
            verdict.wrong.append(f"{what}: {problem}")
    return verdict


def judge_all(names: Sequence[str], mesh_shape: Sequence[int], limit: int) -> list[Verdict]:
    """`judge` for several operators: what a pool's rank runs."""
    return [judge(name, mesh_shape, limit) for name in names]


def judge_in_pool(names: Sequence[str], mesh_shape: Sequence[int], limit: int, timeout: float = 300.0) -> list[Verdict]:
    """`judge_all` on ranks; where a rank dies or hangs, operator by operator, to find the one.

    An operator is right where it is on every rank.
    """
    from hp_testing import run_ranks
    from hp_testing.pools.pool import RankError

    ranks = int(np.prod(mesh_shape))
    try:
        by_rank = run_ranks(ranks, judge_all, list(names), tuple(mesh_shape), limit, timeout=timeout)
    except RankError as error:
        if len(names) == 1:
            return [Verdict(names[0], wrong=[f"aborts or hangs: {error}"])]
        half = len(names) // 2
        shorter = max(60.0, timeout / 2)
        return [v for part in (names[:half], names[half:]) for v in judge_in_pool(part, mesh_shape, limit, shorter)]
    return [_over_ranks(verdicts) for verdicts in zip(*by_rank, strict=True)]


def _over_ranks(verdicts: Sequence[Verdict]) -> Verdict:
    refusals = {sum(verdict.raised.values()) for verdict in verdicts}
    if len(refusals) > 1 and not any(verdict.wrong for verdict in verdicts):
        return Verdict(verdicts[0].name, wrong=[f"refused on one rank alone: {[v.raised for v in verdicts]}"])
    return max(verdicts, key=lambda v: ("right", "refused", "missing", "wrong").index(v.outcome))


# ---- one device ----
def _truth(name: str) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Operands, cotangents, and values with gradients of one device: in float64 where it takes that."""
    for dtype in (np.float64, np.float32):
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        case = OPERATORS[name]
        operands = [_operand(operand, rng, dtype) for operand in case.operands]
        try:
            values = _values(case.function(*map(Tensor, operands)))
            seeds = [rng.standard_normal(v.shape).astype(v.dtype) for v in values if v.dtype.kind == "f"]
            _pynative_executor.sync()
        except Exception:
            _recover()
            if dtype is np.float32:
                raise
            continue
        try:
            return operands, seeds, _run(case.function, list(map(Tensor, operands)), list(map(Tensor, seeds)))
        except Exception:  # MindSpore has no gradient here
            _recover()
            return operands, [], values
    raise AssertionError


def _operand(operand: Any, rng: np.random.Generator, dtype: type) -> np.ndarray:
    if isinstance(operand, Ints):
        return rng.integers(0, operand.high, operand.shape).astype(ms.dtype_to_nptype(operand.dtype))
    if isinstance(operand, Flags):
        return rng.random(operand.shape) < 0.5
    return rng.standard_normal(operand).astype(dtype)


# ---- a call, its values, and its gradients where cotangents are given ----
def _run(
    function: Callable[..., Any], inputs: list[Any], seeds: list[Any], transform: Any = ms.value_and_grad
) -> list[Any]:
    values = _values(function(*inputs))
    positions = tuple(i for i, x in enumerate(inputs) if x.is_floating_point())
    if not seeds or not positions:
        return values

    def loss(*given: Any) -> Any:
        out = [value for value in _flat(function(*given)) if value.is_floating_point()]
        parts = [(value * seed).sum() for value, seed in zip(out, seeds, strict=True)]
        return sum(parts[1:], parts[0])

    _, gradients = transform(loss, positions)(*inputs)
    return values + _values(gradients)


def _flat(out: Any) -> list[Any]:
    return [v for part in out for v in _flat(part)] if isinstance(out, (tuple, list)) else [out]


def _values(out: Any) -> list[Any]:
    """The values as arrays."""
    made = []
    for value in _flat(out):
        if isinstance(value, DTensor):
            assert tuple(value.to_local().shape) == value._spec.local_shape, value._spec
            value = value.full_tensor()
        made.append(value.asnumpy().copy())  # which is a view of what may be written to
    return made


def _difference(made: list[np.ndarray], expected: list[np.ndarray], single: bool) -> str | None:
    if len(made) != len(expected):
        return f"{len(made)} values and gradients for {len(expected)}"
    for place, (got, want) in enumerate(zip(made, expected, strict=True)):
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"value {place}: {got.shape} {got.dtype} for {want.shape} {want.dtype}"
        tolerance = {"float64": 1e-10, "float32": 5e-5, "float16": 2e-3}.get(
            "float32" if single else str(want.dtype), 0
        )
        if not np.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"value {place}: other numbers, by {np.abs(got.astype(float) - want.astype(float)).max():.3g}"
    return None


def _recover() -> None:
    """Leave nothing of a call that failed: neither its error, which may come later, nor that it is recorded."""
    _pynative_executor.set_grad_flag(False)
    forget()
    try:
        _pynative_executor.sync()
    except Exception:
        _pynative_executor.clear_res()


def _line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip(" -")]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


# ---- DTensors of every placement ----
def _combinations(name: str, operands: list[np.ndarray], axes: int, limit: int) -> list[Any]:
    """Combinations of placements of the operands: all replicated, every placement of each, and random ones."""
    choices = []
    for operand in operands:
        one: list[Any] = [Replicate(), *(Shard(dim) for dim in range(operand.ndim))]
        if operand.dtype.kind == "f":
            one.append(Partial())
        choices.append(list(itertools.product(one, repeat=axes)))
    rng = random.Random(zlib.crc32(name.encode()))
    rows = [rng.sample(each[1:], len(each) - 1) for each in choices]
    found: dict[tuple[Any, ...], None] = {tuple(each[0] for each in choices): None}
    for i in range(max(map(len, rows))):
        found[tuple(row[i % len(row)] for row in rows)] = None
    most = min(limit, int(np.prod([len(each) for each in choices])))
    while len(found) < most:
        found[tuple(rng.choice(each) for each in choices)] = None
    return list(found)[:most]


def _short(placement: Any) -> str:
    return "R" if placement.is_replicate() else "P" if placement.is_partial() else f"S{placement.dim}"


def _replicated(value: np.ndarray, mesh: Any) -> DTensor:
    return wrap(Tensor(value), TensorSpec.of(mesh, [Replicate()] * mesh.ndim, value.shape))


def _distributed(whole: np.ndarray, mesh: Any, placements: Sequence[Any]) -> DTensor:
    """The parts of a sum are random but on the last rank."""
    spec = TensorSpec.of(mesh, placements, whole.shape)
    local = Tensor(whole)
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            noise = Tensor(np.random.default_rng(7).standard_normal(whole.shape).astype(whole.dtype))
            n, me = mesh.shape[axis], mesh.get_coordinate()[axis]
            local = noise if me < n - 1 else local - noise * (n - 1)
    replicated = TensorSpec.of(mesh, [Replicate()] * mesh.ndim, whole.shape)
    kept = [Replicate() if p.is_partial() else p for p in placements]
    return wrap(execute(local, replicated, replicated.with_placements(kept)), spec)
