"""Whole tensors of distributed ones, and back: one tensor at a time, so that memory stays bounded.

As in `hp_fsdp.torch.whole`, owners of a ragged piece broadcast what they have; the pieces are then put together, for
writes into views do not reach their base.
"""

from __future__ import annotations

import pickle
from math import prod
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, _no_grad, mint, ops

from hp_dtensor import RaggedShard, Replicate
from hp_dtensor.extend import TensorSpec
from hp_dtensor.mindspore.extend import DTensor, autograd, execute, local_mode, local_view, set_local
from hp_fsdp.from_rank0 import Wire
from hp_fsdp.mindspore.host import on_host, to_device, to_host
from hp_fsdp.mindspore.parameter import run_of
from hp_fsdp.norms import spec_of
from hp_platform import get_platform

__all__ = ["WIRE", "fill", "part_of", "whole", "write"]


def whole(tensor: Tensor) -> Tensor:
    """The whole value, plain, in memory of its own; every rank of the tensor's mesh has to call it.

    Args:
        tensor: a DTensor, or a plain tensor, which is copied.
    """
    spec = spec_of(tensor)
    local = local_view(tensor)
    if spec is None:
        return local.copy()
    with _no_grad(), local_mode():
        made, own = to_device(local), spec
        axis = _ragged_axis(spec)
        if axis is not None and spec.mesh.size(axis) > 1 and spec.mesh.group_order(axis) is None:
            own = spec.with_placements([Replicate() if at == axis else p for at, p in enumerate(spec.placements)])
            made = _joined(made, spec, axis).reshape(own.local_shape)
        made = execute(made, own, spec.with_placements([Replicate()] * spec.mesh.ndim))
        return made.copy() if made.data_ptr() == local.data_ptr() else made


def _ragged_axis(spec: TensorSpec) -> int | None:
    """The mesh axis over which a tensor is cut in runs of its flattened elements; None where there is none."""
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, RaggedShard) and len(placement.dims) == len(spec.shape):
            return axis
    return None


def _joined(local: Tensor, spec: TensorSpec, axis: int) -> Tensor:
    """All pieces along the ragged axis, flat."""
    placement = spec.placements[axis]
    assert isinstance(placement, RaggedShard)
    inner = spec.with_placements([Replicate() if at == axis else p for at, p in enumerate(spec.placements)])
    numel, total = prod(inner.local_shape), sum(placement.units)
    sizes = [numel * unit // total if total else 0 for unit in placement.units]
    me, group = spec.mesh.get_local_rank(axis), spec.mesh.get_group(axis)
    pieces = []
    for rank, size in enumerate(sizes):
        if size:
            piece = local.reshape(-1).copy() if rank == me else mint.empty((size,), dtype=local.dtype)
            get_platform().collectives.broadcast(piece, rank, group=group)
            pieces.append(piece)
    return ops.concat(pieces) if len(pieces) > 1 else pieces[0] if pieces else mint.empty((0,), dtype=local.dtype)


def fill(name: str, target: Tensor, source: Any, spec: TensorSpec | None) -> None:
    """Gives a tensor its part of a value.

    Args:
        name: for errors.
        target: a Parameter or a tensor, plain or a DTensor, that holds this rank's part.
        source: a whole plain tensor, the same on every rank, or a DTensor in any layout of the same mesh.
        spec: the layout of which the part is; None: the target holds the whole.

    Raises:
        TypeError: ``source`` is no tensor.
        ValueError: it has another shape.
    """
    if not isinstance(source, Tensor):
        raise TypeError(f"load: {name!r} must be a tensor, got {type(source).__name__}")
    wanted = tuple(target.shape) if spec is None else spec.shape
    if tuple(source.shape) != wanted:
        raise ValueError(
            f"load: {name!r} has shape {tuple(source.shape)}, the model's is {wanted}. Shards of another number of"
            " ranks are loaded by way of full_state_dict=True"
        )
    with _no_grad():
        if isinstance(source, DTensor):
            moved = source if spec is None or source._spec is spec else source.redistribute(spec.mesh, spec.placements)
            part = whole(source) if spec is None else local_view(moved).copy()
        else:
            part = local_view(source).copy() if spec is None else part_of(source, spec)
        with local_mode():
            write(target, part.astype(target.dtype))
    autograd.forget()


def write(target: Any, part: Tensor) -> None:
    """Gives a tensor other values, in its memory where it has some: compiled optimizers go on reading that.

    Args:
        target: a Parameter or a tensor, in local mode.
        part: plain, of the same dtype, in memory of its own.
    """
    if isinstance(target, Parameter) and not (target.has_init or on_host(target)) and part.numel():
        ops.assign(target, part)
        return
    set_local(target, to_host(part, target.is_pinned()) if on_host(target) else part)
    if isinstance(target, Parameter):
        target.init = None  # an initializer that was to give it values is not needed any more


def part_of(source: Tensor, spec: TensorSpec) -> Tensor:
    """This rank's part of a whole tensor, in memory of its own."""
    with local_mode():
        made = execute(local_view(source), spec.with_placements([Replicate()] * spec.mesh.ndim), spec)
        return run_of(made, 0, made.numel(), spec.local_shape)


# ---- what rank 0 sends ----
def _tell(value: Any) -> Any:
    groups = get_platform().groups
    first = groups.rank() == 0
    data = np.frombuffer(pickle.dumps(value), np.uint8) if first else np.zeros(0, np.uint8)
    length = Tensor(np.array([data.size], np.int64))
    get_platform().collectives.broadcast(length, 0, group=groups.default_group())
    made = Tensor(data.copy() if first else np.zeros(int(length.asnumpy()[0]), np.uint8))
    get_platform().collectives.broadcast(made, 0, group=groups.default_group())
    return pickle.loads(made.asnumpy().tobytes())


def _send(tensor: Any, shape: tuple[int, ...], dtype: Any) -> Tensor:
    made = mint.empty(shape, dtype=dtype) if tensor is None else to_device(local_view(tensor)).copy()
    if made.numel():
        groups = get_platform().groups
        get_platform().collectives.broadcast(made, 0, group=groups.default_group())
    return made


WIRE = Wire(lambda value: isinstance(value, Tensor), _tell, _send)
"""How rank 0's values travel."""
