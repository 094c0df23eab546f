"""The tensors of a Cell: gathered full, exported by part, and filled, one at a time to bound memory.

As in `hp_fsdp.torch.state_dict` the owners of a ragged tensor broadcast their shards; here these are then concatenated,
because writes into views do not reach their base.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, _no_grad, mint, nn, ops
from mindspore.nn.cell import _IncompatibleKeys

from hp_dtensor import Replicate
from hp_dtensor.extend import TensorSpec
from hp_dtensor.mindspore.extend import DTensor, autograd, execute, local_mode, local_view, set_local, wrap
from hp_fsdp.groups.managed_params import groups_in, spec_of
from hp_fsdp.mindspore.groups.parameter import copy_range, on_host, to_device, to_host
from hp_fsdp.port import Broadcaster
from hp_fsdp.state_dict.model import pieces_along, ragged_axis
from hp_platform import get_platform

incompatible_keys = _IncompatibleKeys


def entries(model: nn.Cell) -> dict[str, Any]:
    for group in groups_in(cell for _, cell in model.cells_and_names()):
        group.reshard()
    return dict(model.state_dict(keep_vars=True))


def parameters(model: nn.Cell) -> Iterator[tuple[str, Parameter]]:
    return ((name, value) for name, value in entries(model).items() if isinstance(value, Parameter))


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def full(tensor: Tensor, *, on_host: bool) -> Tensor:
    gathered = gather_full(tensor)
    return _on_host(gathered) if on_host else gathered


def part(tensor: Tensor, *, on_host: bool) -> Tensor:
    spec = spec_of(tensor)
    local = _on_host(tensor) if on_host else local_view(tensor)
    return local if spec is None else wrap(local, spec)


def load_extra(model: nn.Cell, extra: dict[str, Any]) -> None:
    model.load_state_dict(extra, strict=False)


def _on_host(tensor: Tensor) -> Tensor:
    """Copy to the host."""
    return Tensor(local_view(tensor).asnumpy())


def gather_full(tensor: Tensor) -> Tensor:
    """Return the full value, plain, in memory of its own; every rank of the tensor's mesh has to call it.

    Args:
        tensor: a DTensor, or a plain tensor, which is copied.
    """
    spec = spec_of(tensor)
    local = local_view(tensor)
    if spec is None:
        return local.copy()
    with _no_grad(), local_mode():
        full, own = to_device(local), spec
        axis = ragged_axis(spec)
        if axis is not None and spec.mesh.size(axis) > 1 and spec.mesh.group_order(axis) is None:
            own, full = _gathered_along(spec, full, axis)
        full = execute(full, own, spec.with_placements([Replicate()] * spec.mesh.ndim))
        return full.copy() if full.data_ptr() == local.data_ptr() else full


def _gathered_along(spec: TensorSpec, local: Tensor, axis: int) -> tuple[TensorSpec, Tensor]:
    """Replicate over the ragged axis."""
    inner, sizes = pieces_along(spec, axis)
    me, group = spec.mesh.get_local_rank(axis), spec.mesh.get_group(axis)
    pieces = []
    for rank, size in enumerate(sizes):
        if size:
            piece = local.reshape(-1).copy() if rank == me else mint.empty((size,), dtype=local.dtype)
            get_platform().collectives.broadcast(piece, rank, group=group)
            pieces.append(piece)
    flat = ops.concat(pieces) if len(pieces) > 1 else pieces[0] if pieces else mint.empty((0,), dtype=local.dtype)
    return inner, flat.reshape(inner.local_shape)


def fill(name: str, target: Tensor, source: Any, parameter: Any = None) -> None:
    """Write a value into a tensor, each rank its part.

    Args:
        name: for errors.
        target: a Parameter or a tensor, plain or a DTensor, that holds this rank's part.
        source: a full plain tensor, the same on every rank, or a DTensor in any layout of the same mesh.
        parameter: the parameter whose layout the target has. Default: the target's own.

    Raises:
        TypeError: ``source`` is not a tensor.
        ValueError: it has another shape.
    """
    if not isinstance(source, Tensor):
        raise TypeError(f"load: {name!r} must be a tensor, got {type(source).__name__}")
    spec = spec_of(target if parameter is None else parameter)
    shape = tuple(target.shape) if spec is None else spec.shape
    if tuple(source.shape) != shape:
        raise ValueError(
            f"load: {name!r} has shape {tuple(source.shape)}, the model's is {shape}. Shards of another number of"
            " ranks are loaded by way of full_state_dict=True"
        )
    with _no_grad():
        if isinstance(source, DTensor):
            moved = source if spec is None or source._spec is spec else source.redistribute(spec.mesh, spec.placements)
            part = gather_full(source) if spec is None else local_view(moved).copy()
        else:
            part = local_view(source).copy() if spec is None else part_of(source, spec)
        with local_mode():
            write(target, part.astype(target.dtype))
    autograd.forget()


def write(target: Any, part: Tensor) -> None:
    """Give a tensor other values, in its own memory if it has some, which compiled optimizers go on reading.

    Args:
        target: a Parameter or a tensor, in local mode.
        part: plain, of the same dtype, in memory of its own.
    """
    if isinstance(target, Parameter) and not (target.has_init or on_host(target)) and part.numel():
        ops.assign(target, part)
        return
    set_local(target, to_host(part, target.is_pinned()) if on_host(target) else part)
    if isinstance(target, Parameter):
        target.init = None  # its initializer is not needed any more


def part_of(source: Tensor, spec: TensorSpec) -> Tensor:
    """Return this rank's part of a full tensor, in memory of its own."""
    with local_mode():
        part = execute(local_view(source), spec.with_placements([Replicate()] * spec.mesh.ndim), spec)
        return copy_range(part, 0, part.numel(), spec.local_shape)


def _broadcast_object(value: Any) -> Any:
    groups = get_platform().groups
    first = groups.rank() == 0
    data = np.frombuffer(pickle.dumps(value), np.uint8) if first else np.zeros(0, np.uint8)
    length = Tensor(np.array([data.size], np.int64))
    get_platform().collectives.broadcast(length, 0, group=groups.default_group())
    content = Tensor(data.copy() if first else np.zeros(int(length.asnumpy()[0]), np.uint8))
    get_platform().collectives.broadcast(content, 0, group=groups.default_group())
    return pickle.loads(content.asnumpy().tobytes())


def _broadcast_tensor(tensor: Any, shape: tuple[int, ...], dtype: Any) -> Tensor:
    sent = mint.empty(shape, dtype=dtype) if tensor is None else to_device(local_view(tensor)).copy()
    if sent.numel():
        groups = get_platform().groups
        get_platform().collectives.broadcast(sent, 0, group=groups.default_group())
    return sent


def broadcaster(model: nn.Cell) -> Broadcaster:
    """Return the way from rank 0 to all others."""
    return Broadcaster(is_tensor, _broadcast_object, _broadcast_tensor)


def takes_own_shape_only(target: Any) -> bool:
    return True


def has_memory(target: Any) -> bool:
    """Tell whether a tensor can be written; one without values gets them."""
    return True


def laid_out_like(target: Any, value: Tensor) -> Tensor:
    spec = spec_of(target)
    with _no_grad():
        if isinstance(value, DTensor):
            if spec is None:
                return gather_full(value)
            return value if value._spec is spec else value.redistribute(spec.mesh, spec.placements)
        if spec is None:
            return value
        if tuple(value.shape) != spec.shape and tuple(value.shape) == spec.local_shape:
            return wrap(local_view(value).copy(), spec)
        return wrap(part_of(value.reshape(spec.shape), spec), spec)


def write_parts(own: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Give distributed tensors of a model their values.

    Args:
        own: the model's tensors, by name.
        parts: results of `laid_out_like` for some of the names.
    """
    pairs = {id(own[name]): (own[name], value) for name, value in parts.items()}
    with _no_grad(), local_mode():
        for target, value in pairs.values():
            write(target, local_view(value).astype(target.dtype).copy())
    autograd.forget()


def refuse_hooks(cell: nn.Cell) -> None:
    """Refuse Cells that change a state before it is loaded: they would not see the sharded parameters in it.

    Raises:
        NotImplementedError: a Cell has such a hook, or a method.
    """
    for name, each in cell.cells_and_names():
        own = type(each)._load_from_state_dict is not nn.Cell._load_from_state_dict
        if own or each._load_state_dict_pre_hooks:
            raise NotImplementedError(
                f"load_state_dict: {name or 'the Cell'}, a {type(each).__name__}, changes a state before it is loaded"
                f" ({'_load_from_state_dict' if own else 'a hook'}), which is not supported with sharded parameters:"
                " change the state yourself, and load it with set_model_state_dict(model, state)"
            )
