"""Run a redistribution plan on this rank's local tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspore import Tensor
from mindspore import dtype as mstype
from mindspore._c_expression import MixedPrecisionType, NoFallbackGuard  # type: ignore[attr-defined]
from mindspore.graph.api import _pynative_executor  # type: ignore[attr-defined]

from hp_dtensor.mindspore.moves import exchange
from hp_dtensor.mindspore.moves.exchange import Run
from hp_dtensor.redistribution.cuts import Cut, Place
from hp_dtensor.redistribution.planner import plan
from hp_dtensor.redistribution.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Slice, Step
from hp_platform.extend import when_groups_end

if TYPE_CHECKING:
    from hp_dtensor.layout.spec import TensorSpec

__all__ = ["clear_cache", "execute", "own_dtypes"]

_programs: dict[tuple[TensorSpec, TensorSpec], tuple[Run, ...]] = {}
_MAX_PROGRAMS = 8192
_BOOL_OPS = {"sum": "max", "max": "max", "product": "min", "min": "min"}


@contextlib.contextmanager
def own_dtypes() -> Iterator[None]:
    """Inside, operations keep their operands' dtypes: a Cell's ``to_float`` has no effect on them."""
    _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET)
    try:
        yield
    finally:
        _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)


def execute(local: Tensor, spec_from: TensorSpec, spec_to: TensorSpec) -> Tensor:
    """Redistribute the local tensor ``local`` from layout ``spec_from`` to ``spec_to``, without autograd.

    Args:
        local: this rank's part, a plain tensor; not changed.
        spec_from: what ``local`` is.
        spec_to: what is wanted, of the same mesh and shape.

    Returns:
        A plain tensor. It shares memory with ``local`` only where the plan is empty.

    Raises:
        ValueError: if the meshes or the shapes of the two specs differ, or ``local`` has another shape than
            ``spec_from`` says.
        TypeError: for a reduction that booleans don't have (sum and max are "or", product and min "and").
    """
    program = _programs.get((spec_from, spec_to))
    if program is None:
        program = _prepare(spec_from, spec_to)
    if tuple(local.shape) != spec_from.local_shape:
        raise ValueError(
            f"redistribute: the local tensor has shape {tuple(local.shape)}, {spec_from.placements} of shape "
            f"{spec_from.shape} on mesh {spec_from.mesh.shape} gives this rank {spec_from.local_shape}"
        )
    if program:
        with NoFallbackGuard(), own_dtypes():
            for run in program:
                local = run(local)
    return local


@when_groups_end
def clear_cache() -> None:
    """Forget all prepared plans, and with them the process groups that they hold."""
    _programs.clear()


def _prepare(spec_from: TensorSpec, spec_to: TensorSpec) -> tuple[Run, ...]:
    mesh = spec_from.mesh
    if mesh != spec_to.mesh:
        raise ValueError(f"redistribute: the tensor is on {mesh!r}, the target on {spec_to.mesh!r}: one mesh is needed")
    if spec_from.shape != spec_to.shape:
        raise ValueError(f"redistribute: shape {spec_from.shape} cannot become {spec_to.shape}: only placements change")
    coordinate = mesh.get_coordinate()
    program: list[Run] = []
    if coordinate is not None:  # a rank outside the mesh holds nothing and takes part in nothing
        for step in plan(spec_from.placements, spec_to.placements, spec_from.shape, tuple(mesh.shape)):
            place = Place.of(step, spec_from.shape, mesh.shape, coordinate, mesh.group_order(step.axis))
            program.append(_runner(step, place, mesh.get_group(step.axis) if place.n > 1 else None))
    if len(_programs) >= _MAX_PROGRAMS:
        _programs.clear()
    found = _programs[spec_from, spec_to] = tuple(program)
    return found


def _runner(step: Step, place: Place, group: Any) -> Run:
    if isinstance(step, Slice):
        return exchange.slice_(step.target, place)
    if place.n == 1:  # only a RaggedShard is undone or made on an axis of one rank
        return lambda local: local.copy().reshape(place.after)
    if isinstance(step, AllReduce):
        return _reducing(step.op, lambda op: exchange.all_reduce(op, place, group))
    if isinstance(step, ReduceScatter):
        cut = Cut.of(step.target, place)
        return _reducing(step.op, lambda op: exchange.reduce_scatter(op, cut, place, group))
    if isinstance(step, AllGather):
        return exchange.all_gather(Cut.of(step.source, place), place, group)
    if isinstance(step, AllToAll):
        return exchange.all_to_all(step, place, group)
    return exchange.to_partial(step.op, place)


def _reducing(op: str, make: Any) -> Run:
    run = make(op)

    def reduce(local: Tensor) -> Tensor:
        if local.dtype != mstype.bool_:
            return run(local)
        if op not in _BOOL_OPS:
            raise TypeError(f"redistribute: booleans cannot be reduced by {op!r}; convert the tensor first")
        return make(_BOOL_OPS[op])(local.astype(mstype.int32)).astype(mstype.bool_)

    return reduce
