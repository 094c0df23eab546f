"""Run a redistribution plan on this rank's local tensor.

Note [Even cuts are a transpose]
    An even cut of a contiguous tensor over n ranks is one digit of the element's number: the tensor is ``[O, n, I]``,
    rank ``i`` holds ``[:, i]``. ``O`` is the product of the sizes before the cut (times the split factor of a
    StridedShard), so the pieces lie one after the other exactly if ``O == 1``, and then collectives read and write the
    tensor itself. Two even cuts whose digits nest, ``[O, n, M, n, I]``, are exchanged by one all-to-all with at most
    one transpose before and one after it. Everything else goes by `hp_dtensor.redistribution.executor`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from hp_dtensor.redistribution.executor import BOOL_OPS, PROGRAMS, Run, program_of, wrong_part
from hp_dtensor.redistribution.steps import AllGather, AllReduce, AllToAll, Place, ReduceScatter, Step

if TYPE_CHECKING:
    from hp_dtensor.layout.spec import TensorSpec
from math import prod

from hp_dtensor.layout.placements import Placement, Shard
from hp_dtensor.layout.sharding import ragged_of
from hp_dtensor.redistribution.executor import Arrays, cuts_of, run_of
from hp_dtensor.redistribution.steps import Cut, Slice
from hp_platform import get_platform
from hp_platform.torch.internals import without_torch_function

OVERLAPPED = 1 << 20
"""From so many bytes a rank holds on, an all-to-all that packs leaves a rank's own piece out."""


_ARRAYS = Arrays(
    torch.narrow,
    torch.split,
    torch.cat,
    torch.Tensor.new_empty,
    torch.Tensor.new_full,
    lambda x: x.clone(memory_format=torch.contiguous_format),
)


def run_step(step: Step, place: Place, group: Any, op: str, *, owned: bool) -> Run:
    """Make the function that does a step, the fastest that the step's shards allow.

    Args:
        step: the step.
        place: this rank's.
        group: the process group of the step's axis.
        op: the reduction, for a step that reduces; it may be another than the step's.
        owned: whether the function may overwrite its argument.
    """
    run = _fast(step, place, group, op, owned=owned) if prod(place.whole) else None
    return run_of(step, place, group, op, _ARRAYS) if run is None else run


def _fast(step: Step, place: Place, group: Any, op: str, *, owned: bool) -> Run | None:
    if isinstance(step, Slice):
        return _slice(step.target, place)
    if place.n == 1:
        return None
    if isinstance(step, AllReduce):
        return _all_reduce(op, group) if owned else None
    if isinstance(step, AllGather):
        return _all_gather(Cut.of(step.source, place), place, group)
    if isinstance(step, ReduceScatter):
        return _reduce_scatter(op, Cut.of(step.target, place), place, group)
    if isinstance(step, AllToAll):
        before, after = (cut.blocks for cut in cuts_of(step, place))
        if before is not None and after is not None:
            if after % (before * place.n) == 0 or before % (after * place.n) == 0:
                return _nested_all_to_all(before, after, place, group)
    return None


def _all_reduce(op: str, group: Any) -> Run:
    """Partial to Replicate, in the memory of the argument."""
    send = get_platform().collectives.all_reduce

    def run(local: torch.Tensor) -> torch.Tensor:
        send(local, op, group=group)
        return local

    return run


def _slice(placement: Placement, place: Place) -> Run | None:
    """Replicate to a shard: a copy, so that the whole tensor can be freed."""
    after, contiguous = place.after, torch.contiguous_format
    if not prod(after):
        return None
    cut = Cut.of(placement, place)
    if isinstance(placement, Shard) and not ragged_of(place.bare):
        dim, (start, length) = placement.dim, cut.held[place.me][0]
        return lambda local: local.narrow(dim, start, length).clone(memory_format=contiguous)
    if cut.blocks is None:
        return None
    blocks, n, me = cut.blocks, place.n, place.me
    return lambda local: local.view(blocks, n, -1).select(1, me).clone(memory_format=contiguous).view(after)


def _all_gather(cut: Cut, place: Place, group: Any) -> Run | None:
    """Gather a shard."""
    if cut.blocks is None:
        return None
    send = get_platform().collectives.all_gather
    after, n, rows = place.after, place.n, cut.blocks
    stack = _stack(prod(after), rows, n)
    flat = rows > 1 or not _concatenate(place.before, after, n)

    def even(local: torch.Tensor) -> torch.Tensor:
        out = local.new_empty(after if rows == 1 else stack)
        if flat:
            send(out.view(-1), local.view(-1), group=group)
        else:
            send(out, local, group=group)
        return out if rows == 1 else out.transpose(0, 1).contiguous().view(after)

    return even


def _reduce_scatter(op: str, cut: Cut, place: Place, group: Any) -> Run | None:
    """Partial to a shard."""
    if cut.blocks is None:
        return None
    send = get_platform().collectives.reduce_scatter
    after, n, rows = place.after, place.n, cut.blocks
    stack = _stack(prod(place.whole), rows, n)
    flat = rows > 1 or not _concatenate(after, place.whole, n)
    strides = (stack[2], n * stack[2], 1)

    def even(local: torch.Tensor) -> torch.Tensor:
        if rows > 1:
            local = local.as_strided(stack, strides).contiguous()
        out = local.new_empty(after)
        if flat:
            send(out.view(-1), local.view(-1), op, group=group)
        else:
            send(out, local, op, group=group)
        return out

    return even


def _nested_all_to_all(source: int, target: int, place: Place, group: Any) -> Run:
    send = get_platform().collectives.all_to_all
    before, after, n = place.before, place.after, place.n
    if source < target:  # [source, n, middle, n, I] with the first n cut: [source, middle, n, I] is sent
        rows, columns = target // n, source
    else:  # [target, n, middle, n, I] with the second n cut: [target, n, middle, I] is sent
        rows, columns = target, source // n
    packed, received = _stack(prod(before), rows, n), _stack(prod(after), columns, n)
    strides = (packed[2], n * packed[2], 1)
    flat_in, flat_out = rows == 1 and before[0] % n > 0, columns == 1 and after[0] % n > 0
    me, piece = place.me, prod(before) // n
    others = slice(1, n) if me == 0 else slice(0, n - 1)
    sizes = [piece] * n
    sizes_of_others = [0 if peer == me else piece for peer in range(n)]

    def keeping_own(local: torch.Tensor) -> torch.Tensor:
        """Copy this rank's own chunk to its place while those of others are in flight."""
        pieces = local.as_strided(packed, strides)
        out = local.new_empty(received)
        if me in (0, n - 1):
            sent = pieces[others].contiguous()
            args = out[others].view(-1), sent.view(-1), sizes_of_others, sizes_of_others
            work: Any = send(*args, group=group, async_op=True)
            out[me].view(packed[1:]).copy_(pieces[me])
            work.wait()
        else:  # its own piece stands between those of others
            send(out.view(-1), pieces.contiguous().view(-1), sizes, sizes, group=group)
        return out

    def run(local: torch.Tensor) -> torch.Tensor:
        if rows > 1 and local.numel() * local.element_size() >= OVERLAPPED:
            out = keeping_own(local)
            return out.view(after) if columns == 1 else out.transpose(0, 1).contiguous().view(after)
        if rows > 1:
            local = local.as_strided(packed, strides).contiguous()
        elif flat_in:
            local = local.view(-1)
        out = local.new_empty(after if columns == 1 else received)
        send(out.view(-1) if flat_out else out, local, group=group)
        return out if columns == 1 else out.transpose(0, 1).contiguous().view(after)

    return run


def _stack(elements: int, rows: int, n: int) -> tuple[int, int, int]:
    """Return the shape of ``n`` consecutive shards of so many rows."""
    return n, rows, elements // (n * rows)


def _concatenate(piece: tuple[int, ...], whole: tuple[int, ...], n: int) -> bool:
    """Tell whether ``n`` pieces make the whole on dim 0, in shape too; if not, collectives get flat views."""
    return bool(piece) and len(piece) == len(whole) and piece[0] * n == whole[0]


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
    with without_torch_function():
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
        return run_step(step, place, group, op, owned=owned)

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
