"""Run a redistribution plan on this rank's local tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from hp_dtensor.redistribution.executor import BOOL_OPS, PROGRAMS, Run, program_of, wrong_part
from hp_dtensor.redistribution.steps import AllGather, AllReduce, AllToAll, Place, ReduceScatter, Step
from hp_dtensor.torch.moves import exchange

if TYPE_CHECKING:
    from hp_dtensor.layout.spec import TensorSpec


_detach = torch.Tensor.detach

_NATIVE = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8)
)
"""What every backend can send and reduce; other types travel as one of these."""
_SAME_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def execute(local: torch.Tensor, spec_from: TensorSpec, spec_to: TensorSpec) -> torch.Tensor:
    """Redistribute the local tensor ``local`` from layout ``spec_from`` to ``spec_to``, without autograd.

    Args:
        local: this rank's part; not changed. A DTensor is taken as the local tensor that it is.
        spec_from: what ``local`` is.
        spec_to: what is wanted, of the same mesh and shape.

    Returns:
        A plain contiguous tensor. It shares memory with ``local`` only where the plan is empty.

    Raises:
        ValueError: if the meshes or the shapes of the two specs differ, or ``local`` has another shape than
            ``spec_from`` says.
        TypeError: for a reduction that the dtype doesn't have (of bool, sum and max are "or", product and min "and").
    """
    program = PROGRAMS.get((spec_from, spec_to))
    if program is None:
        program = program_of(spec_from, spec_to, _runner)
    with torch._C.DisableTorchFunctionSubclass():
        local = _detach(local)
        if type(local) is not torch.Tensor:
            return _in_graph(local, spec_from, spec_to)
        if local.shape != spec_from.local_shape:
            raise wrong_part(local.shape, spec_from)
        local = local.contiguous()
        for run in program:
            local = run(local)
        return local


_layouts: dict[str, TensorSpec] = {}


def _in_graph(local: torch.Tensor, spec_from: TensorSpec, spec_to: TensorSpec) -> torch.Tensor:
    """``execute`` as one operator, for a tensor that stands for another one while a graph is made.

    Its layouts are texts, with this rank's place: ranks share compiled graphs on disk, and their parts may differ.
    """
    place = spec_from.mesh.get_coordinate()
    names = f"{spec_from!r} at {place}", f"{spec_to!r} at {place}"
    _layouts.update(zip(names, (spec_from, spec_to), strict=True))
    return _operator()(local, *names)


@cache
def _operator() -> Any:
    """``hp_dtensor::redistribute``: Note [Compiled regions run on local tensors] in `compiling`."""

    def run(local: torch.Tensor, have: str, want: str) -> torch.Tensor:
        moved = execute(local, _layouts[have], _layouts[want])
        return moved.clone() if moved.data_ptr() == local.data_ptr() else moved

    def shaped(local: torch.Tensor, have: str, want: str) -> torch.Tensor:
        return local.new_empty(_layouts[want].local_shape)

    library = torch.library.Library("hp_dtensor", "DEF")
    _kept.append(library)
    library.define("redistribute(Tensor local, str have, str want) -> Tensor")
    library.impl("redistribute", run, "CompositeExplicitAutograd")
    torch.library.register_fake("hp_dtensor::redistribute", shaped, lib=library)
    return torch.ops.hp_dtensor.redistribute.default


_kept: list[Any] = []  # a library that is collected takes its operators along


def _runner(step: Step, place: Place, group: Any, owned: bool) -> Run:
    """Make the function that does a step. ``owned``: its argument may be overwritten."""

    def make(op: str) -> Run:
        return exchange.run_step(step, place, group, op, owned=owned)

    if isinstance(step, (AllReduce, ReduceScatter)) and place.n > 1:
        return _reducing(make, step.op)
    return as_movable(make("")) if isinstance(step, (AllGather, AllToAll)) else make("")


def _reducing(make: Callable[[str], Run], op: str) -> Run:
    run = make(op)

    def reduce(local: torch.Tensor) -> torch.Tensor:
        dtype = local.dtype
        if dtype in _NATIVE:
            return run(local)
        if dtype is torch.bool and op in BOOL_OPS:
            return make(BOOL_OPS[op])(local.view(torch.uint8)).view(torch.bool)
        if dtype.is_complex and op in ("sum", "avg"):
            return run(local)
        if dtype in (torch.int16, torch.uint16):
            return run(local.to(torch.int32)).to(dtype)
        raise TypeError(f"redistribute: a {dtype} tensor cannot be reduced by {op!r}; convert it first")

    return reduce


def as_movable(run: Run) -> Run:
    """``run``, which only moves elements, for every dtype: those that backends can't send travel as another."""

    def move(local: torch.Tensor) -> torch.Tensor:
        dtype = local.dtype
        if dtype in _NATIVE or dtype.is_complex:
            return run(local)
        return run(local.view(_SAME_BITS[dtype.itemsize])).view(dtype)

    return move
