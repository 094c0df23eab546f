"""Redistribution to any layout: on one mesh, to another mesh, and beside what follows.

Note [Every rank of both meshes takes part]
    A transfer is one all-to-all among the ranks of the two meshes. A rank of the target mesh alone has a DTensor on the
    source mesh all the same: its part is empty, of the tensor's dtype and ``requires_grad``, which is what
    ``distribute_tensor`` and ``from_local(..., shape=)`` give outside a mesh. In backward, the gradient goes the same
    way back, so these ranks run backward, too; on a rank outside, operations compute on empty parts.

Note [A pending DTensor]
On a device with streams a redistribution is issued on a side stream, all steps of it, and the current stream waits for
it at the result's first use. Until then the result is of a class of its own: whatever reads it (an operation, an
attribute, a method) comes by that class, which waits and makes it a DTensor like any other. Dispatch looks for DTensor
itself, so all other tensors pay nothing. Only with interception off does an operation pass the class by;
``SkipDTensorDispatch`` therefore waits for everything that is pending when it is entered, and inside it nothing becomes
pending. Autograd runs the redistribution's backward on the side stream, and orders it with the others by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import product
from math import prod
from typing import Any

import torch

from hp_dtensor.layout.placements import Placement
from hp_dtensor.layout.spec import Layout, TensorSpec, as_placements, grad_spec, normalize
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.redistribution.transfer import Box, Move, Transfer, plan_transfer
from hp_dtensor.torch.backward import autograd
from hp_dtensor.torch.backward.autograd import pending_redistributions
from hp_dtensor.torch.dtensor import DTensor, redistribute, wrap
from hp_dtensor.torch.moves.redistribute import as_movable, execute
from hp_dtensor.torch.views.kept import drop
from hp_platform import get_platform
from hp_platform.extend import list_leaves, when_groups_end
from hp_platform.torch.internals import plainly, torch_function_enabled, without_torch_function


class _InDtypes(torch.autograd.Function):
    """A move whose value and whose gradient are sent in dtypes of their own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, src: TensorSpec, dst: TensorSpec, forward: Any, backward: Any) -> Any:
        ctx.layouts, ctx.dtypes = (src, dst, None), (backward or x.dtype, x.dtype)
        return execute(x.to(forward or x.dtype), src, dst).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        drop(None)
        sent, own = ctx.dtypes
        return autograd.moved_back(grad.to(sent), *ctx.layouts).to(own), None, None, None, None


def gradient_as(local: torch.Tensor, spec: TensorSpec, gradient: TensorSpec) -> torch.Tensor:
    """Return a local tensor of layout ``spec`` whose gradient leaves in the layout ``gradient``."""
    return autograd.GradientMoved.apply(local, grad_spec(spec), gradient)


def redistribute_in(
    x: DTensor, spec: TensorSpec, forward_dtype: torch.dtype | None, backward_dtype: torch.dtype | None
) -> DTensor:
    """``x`` in another layout of its mesh, the value and its gradient sent in dtypes of their own.

    Args:
        x: a DTensor.
        spec: the layout.
        forward_dtype: dtype of the result; None: that of ``x``.
        backward_dtype: dtype in which the gradient is sent back; None: that of ``x``.
    """
    if spec is x._spec:  # nothing is sent
        cast: Any = x if forward_dtype is None else x.to(forward_dtype)
        return redistribute(cast, spec)
    with without_torch_function():
        local = plainly(torch.Tensor.view_as, (), (x, x))
        return wrap(_InDtypes.apply(local, x._spec, spec, forward_dtype, backward_dtype), spec)


class PendingDTensor(DTensor):
    """A DTensor that is being made; a DTensor from its first use on. See Note [A pending DTensor]."""

    def __getattribute__(self, name: str) -> Any:
        finish(self)
        return getattr(self, name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        finish(self)
        return repr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in list_leaves((args, kwargs)):
            if type(each) is PendingDTensor:
                finish(each)
        return func(*args, **(kwargs or {}))


def possible(x: DTensor) -> bool:
    """Tell whether something can run beside the current stream on the device of ``x``, here."""
    devices = get_platform().devices
    return devices.capabilities.streams and x.device.type == devices.kind and torch_function_enabled()


def aside(x: DTensor, run: Callable[[], DTensor]) -> DTensor:
    """Run ``run`` on ``x`` on a side stream.

    Args:
        x: what ``run`` reads.
        run: makes a new DTensor.

    Returns:
        The DTensor, pending.
    """
    devices = get_platform().devices
    module = devices.device_module()
    side = _side_stream(devices.current_device())
    side.wait_stream(module.current_stream())
    with module.stream(side):
        result = run()
        event = side.record_event()
    _keep(x, side)
    result._ready = event  # type: ignore[attr-defined]
    result.__class__ = PendingDTensor
    key = id(result)
    reference = weakref.ref(result, lambda _: pending_redistributions.pop(key, None))

    def ended() -> None:
        found = reference()
        if found is not None:
            finish(found)

    pending_redistributions[key] = ended
    return result


def finish(x: torch.Tensor) -> None:
    """Make the current stream wait for ``x`` if it is pending."""
    if type(x) is not PendingDTensor:
        return
    x.__class__ = DTensor  # type: ignore[assignment]
    pending_redistributions.pop(id(x), None)
    current = get_platform().devices.device_module().current_stream()
    current.wait_event(vars(x).pop("_ready"))
    _keep(x, current)


def _keep(x: torch.Tensor, stream: Any) -> None:
    """Keep the memory of ``x``, even if it is freed, until the work queued on ``stream`` has used it."""
    plainly(torch.Tensor.record_stream, (), (x, stream))


@cache
def _side_stream(device: Any) -> Any:
    return get_platform().devices.stream()


_MAX_BOXES = 64
"""Up to so many boxes of a move are copied one by one; more are copied through their elements' indices."""


def relayout(
    x: DTensor,
    device_mesh: DeviceMesh | Layout | None,
    placements: Sequence[Placement] | None,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """See ``DTensor.redistribute``."""
    if async_op and possible(x):
        return aside(x, lambda: relayout(x, device_mesh, placements, False, forward_dtype, backward_dtype))
    have = x._spec
    if forward_dtype is not None or backward_dtype is not None:
        mesh, target = as_placements(device_mesh, placements, have.mesh, "redistribute")
        if mesh != have.mesh:
            raise NotImplementedError(
                f"redistribute: forward_dtype and backward_dtype together with another mesh, {mesh} for {have.mesh},"
                " are not supported; cast first: x.to(dtype).redistribute(mesh, placements)"
            )
        spec = have.with_placements(normalize(target, mesh, len(have.shape), "redistribute"))
        return redistribute_in(x, spec, forward_dtype, backward_dtype)
    if device_mesh is have.mesh and isinstance(placements, (list, tuple)) and tuple(placements) == have.placements:
        return redistribute(x, have)
    mesh, target = as_placements(device_mesh, placements, have.mesh, "redistribute")
    target = normalize(target, mesh, len(have.shape), "redistribute")
    if mesh == have.mesh:
        return redistribute(x, have.with_placements(target))
    if mesh.device_type != have.mesh.device_type:
        raise ValueError(
            f"redistribute: the tensor is on {have.mesh}, asked for {mesh}: a mesh of {mesh.device_type}; meshes of one"
            " kind of device are needed"
        )
    if mesh.shape == have.mesh.shape and (mesh.ranks == have.mesh.ranks).all():  # the names alone differ
        result = redistribute(x, have.with_placements(target))
        vars(result).pop("_moved_from", None)
        return wrap(result, TensorSpec.of(mesh, target, have.shape))
    plan_transfer(Layout.of(have.mesh, have.placements), Layout.of(mesh, target), have.shape)  # for its errors
    spec = TensorSpec.of(mesh, target, have.shape)
    with without_torch_function():
        return wrap(_move(plainly(torch.Tensor.view_as, (), (x, x)), have, spec), spec)


class _Transfer(torch.autograd.Function):
    """Moves a local tensor from a layout on one mesh to a layout on another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, src: TensorSpec, dst: TensorSpec) -> torch.Tensor:
        ctx.layouts = src, dst
        return execute_transfer(x, src, dst).detach()  # no view of a buffer: it may be written

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        drop(None)
        src, dst = ctx.layouts
        scale = _ranks_averaged(dst) / _ranks_averaged(src)
        moved = autograd.read_in_parts(_move(grad, autograd.grad_spec(dst), autograd.grad_spec(src)), src)
        return (moved if scale == 1.0 else moved * scale), None, None


def _move(local: torch.Tensor, src: TensorSpec, dst: TensorSpec) -> torch.Tensor:
    if torch.is_grad_enabled() and local.requires_grad:
        return _Transfer.apply(local, src, dst)
    return execute_transfer(local, src, dst)


def _ranks_averaged(spec: TensorSpec) -> int:
    return prod(n for n, p in zip(spec.mesh.shape, spec.placements, strict=True) if p.is_partial("avg"))


def execute_transfer(local: torch.Tensor, src: TensorSpec, dst: TensorSpec) -> torch.Tensor:
    """Redistribute the local tensor ``local`` from layout ``src`` to ``dst`` on another mesh, without autograd.

    Collective over the ranks of both meshes; others return an empty part and do nothing.

    Args:
        local: this rank's part, empty outside the mesh of ``src``; not changed. Of one dtype on all ranks.
        src: what ``local`` is.
        dst: what is wanted, on another mesh.

    Returns:
        A plain contiguous tensor that shares no memory with ``local``.

    Raises:
        ValueError: if placements don't fit, or ``local`` has another shape than ``src`` says; before anything is sent.
    """
    with without_torch_function(), torch.no_grad():
        local = local.detach()
        if tuple(local.shape) != tuple(src.local_shape):
            raise ValueError(
                f"redistribute: the local tensor has shape {tuple(local.shape)}, {src.placements} of shape {src.shape} "
                f"on {src.mesh} gives rank {src.mesh.get_rank()} {tuple(src.local_shape)}"
            )
        program = _program(src, dst)
        local = program.exchange(execute(local, src, program.sent))
        return execute(local, program.received, dst)


class _Program:
    """A transfer as this rank does it."""

    def __init__(self, src: TensorSpec, dst: TensorSpec) -> None:
        way: Transfer = plan_transfer(
            Layout.of(src.mesh, src.placements), Layout.of(dst.mesh, dst.placements), src.shape
        )
        assert way.sent.placements is not None and way.received.placements is not None
        self.sent = src.with_placements(way.sent.placements)
        self.received = dst.with_placements(way.received.placements)
        self.rank = me = src.mesh.get_rank()
        self.ranks = way.ranks if me in way.ranks and way.sends else ()
        gives, gets = src.mesh.get_coordinate() is not None, dst.mesh.get_coordinate() is not None
        self.moves_from = way.moves_from(me) if gives else ()
        self.moves_to = way.moves_to(me) if gets else ()
        self.view = way.view(way.sent, me) if gives else (0,)
        self.after = way.view(way.received, me) if gets else ()
        self.fill = way.fill(me) if gets else None

    def exchange(self, local: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard in the received layout."""
        out = as_movable(self._exchange)(local)
        return out if self.fill is None else out.fill_(self.fill)

    def _exchange(self, local: torch.Tensor) -> torch.Tensor:
        make = local.new_empty if self.moves_to else local.new_zeros  # of a scalar a rank outside holds a zero
        out = make(self.received.local_shape)
        whole = local.contiguous().view(self.view) if self.moves_from else local
        parts = out.view(self.after) if self.moves_to else out
        for move in self.moves_to:
            if move.source == self.rank:
                _write(parts, move, _read(whole, move))
        if not self.ranks:
            return out
        outgoing = {move.destination: move for move in self.moves_from if move.destination != self.rank}
        incoming = {move.source: move for move in self.moves_to if move.source != self.rank}
        sizes_out = [outgoing[rank].elements if rank in outgoing else 0 for rank in self.ranks]
        sizes_in = [incoming[rank].elements if rank in incoming else 0 for rank in self.ranks]
        packed = [_read(whole, outgoing[rank]).reshape(-1) for rank in self.ranks if rank in outgoing]
        sent = packed[0].contiguous() if len(packed) == 1 else torch.cat(packed) if packed else local.new_empty(0)
        got = local.new_empty(sum(sizes_in))
        platform = get_platform()
        platform.collectives.all_to_all(got, sent, sizes_in, sizes_out, group=platform.groups.new_group(self.ranks))
        for rank, piece in zip(self.ranks, got.split(sizes_in), strict=True):
            if rank in incoming:
                _write(parts, incoming[rank], piece.view(incoming[rank].sizes))
        return out


@lru_cache(maxsize=1024)
def _program(src: TensorSpec, dst: TensorSpec) -> _Program:
    return _Program(src, dst)


when_groups_end(_program.cache_clear)


# ---- copies ----
def _read(whole: torch.Tensor, move: Move) -> torch.Tensor:
    """Return the elements of a move, of shape ``move.sizes``; a view if they are one box."""
    if _boxes(move.taken) == 1:
        return _narrow(whole, [runs[0] for runs in move.taken])
    if _boxes(move.taken) > _MAX_BOXES:
        return whole[_grid(move.taken, whole.device)]
    piece = whole.new_empty(move.sizes)
    for inside, outside in _each_box(move.taken):
        _narrow(piece, inside).copy_(_narrow(whole, outside))
    return piece


def _write(parts: torch.Tensor, move: Move, piece: torch.Tensor) -> None:
    if _boxes(move.put) > _MAX_BOXES:
        parts[_grid(move.put, parts.device)] = piece
        return
    for inside, outside in _each_box(move.put):
        _narrow(parts, outside).copy_(_narrow(piece, inside))


def _boxes(box: Box) -> int:
    return prod(map(len, box))


def _each_box(box: Box) -> Iterator[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
    """For each box: where it lies in the move's piece, and where in the local tensor."""
    placed = []
    for runs in box:
        offset, found = 0, []
        for start, length in runs:
            found.append(((offset, length), (start, length)))
            offset += length
        placed.append(found)
    for each in product(*placed):
        yield [inside for inside, _ in each], [outside for _, outside in each]


def _narrow(tensor: torch.Tensor, box: Sequence[tuple[int, int]]) -> torch.Tensor:
    for dim, (start, length) in enumerate(box):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def _grid(box: Box, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the indices of all elements, one tensor per group of dims, which broadcast with each other."""
    found = []
    for run, runs in enumerate(box):
        index = torch.cat([torch.arange(start, start + length, device=device) for start, length in runs])
        found.append(index.view(*[-1 if other == run else 1 for other in range(len(box))]))
    return tuple(found)
