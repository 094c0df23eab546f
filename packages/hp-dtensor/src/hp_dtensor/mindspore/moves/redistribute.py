"""Run a redistribution plan on this rank's local tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mindspore import Tensor, mint, ops
from mindspore import dtype as mstype
from mindspore._c_expression import MixedPrecisionType, NoFallbackGuard
from mindspore.graph.api import _pynative_executor

from hp_dtensor.redistribution.executor import BOOL_OPS, PROGRAMS, Arrays, Run, program_of, run_of, wrong_part
from hp_dtensor.redistribution.steps import AllReduce, AllToAll, Place, ReduceScatter, Slice, Step

if TYPE_CHECKING:
    from hp_dtensor.layout.spec import TensorSpec


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
    program = PROGRAMS.get((spec_from, spec_to))
    if program is None:
        program = program_of(spec_from, spec_to, _runner)
    if tuple(local.shape) != spec_from.local_shape:
        raise wrong_part(local.shape, spec_from)
    if program:
        with NoFallbackGuard(), own_dtypes():
            local = local.contiguous()
            for run in program:
                local = run(local)
    return local


# A write into a view does not reach its base on MindSpore; nothing here writes.
_ARRAYS = Arrays(
    mint.narrow,
    lambda x, sizes: [mint.narrow(x, 0, sum(sizes[:index]), size) for index, size in enumerate(sizes)],
    lambda pieces, dim: mint.cat(list(pieces), dim),
    lambda like, shape: mint.empty(tuple(shape), dtype=like.dtype),
    lambda like, shape, value: ops.full(tuple(shape), value, dtype=like.dtype),
    Tensor.copy,
)


def _runner(step: Step, place: Place, group: Any, owned: bool) -> Run:
    def make(op: str) -> Run:
        run = run_of(step, place, group, op, _ARRAYS)
        # MindSpore refuses to assign to the view that a reshape gives.
        return (lambda local: run(local).copy()) if isinstance(step, (Slice, ReduceScatter, AllToAll)) else run

    return _reducing(step.op, make) if isinstance(step, (AllReduce, ReduceScatter)) and place.n > 1 else make("")


def _reducing(op: str, make: Callable[[str], Run]) -> Run:
    run = make(op)

    def reduce(local: Tensor) -> Tensor:
        if local.dtype != mstype.bool_:
            return run(local)
        if op not in BOOL_OPS:
            raise TypeError(f"redistribute: booleans cannot be reduced by {op!r}; convert the tensor first")
        return make(BOOL_OPS[op])(local.astype(mstype.int32)).astype(mstype.bool_)

    return reduce
