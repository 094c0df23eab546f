"""Whole tensors of a sharded model: out of it and into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mindspore import Parameter, Tensor, _no_grad, mint, nn

from hp_dtensor.mindspore import autograd
from hp_dtensor.mindspore.autograd import local_mode
from hp_dtensor.mindspore.dtensor import DTensor, local_view, wrap
from hp_dtensor.mindspore.parameter import set_local
from hp_dtensor.mindspore.redistribute import execute
from hp_dtensor.placements import Replicate
from hp_fsdp.mindspore.bucket import Bucket
from hp_fsdp.mindspore.module import group_of
from hp_fsdp.mindspore.parameter import run_of
from hp_fsdp.state_options import StateDictOptions
from hp_platform import get_platform

__all__ = ["full_state_dict", "get_model_state_dict", "load_full_state_dict", "set_model_state_dict"]


def get_model_state_dict(model: nn.Cell, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """The model's state, by the names of the unsharded Cell.

    Args:
        model: holds sharded Cells, or is one.
        options: ``full_state_dict`` gives whole tensors, with ``cpu_offload`` on rank 0 only.

    Raises:
        NotImplementedError: without ``full_state_dict``, or with ``ignore_frozen_params``.
    """
    options = StateDictOptions.of(options)
    if not options.full_state_dict or options.ignore_frozen_params:
        raise NotImplementedError(
            "get_model_state_dict: on MindSpore only whole tensors of all parameters, get_model_state_dict(model,"
            " options=StateDictOptions(full_state_dict=True)); cell.state_dict() has the sharded ones"
        )
    return full_state_dict(model, rank0_only=options.cpu_offload, cpu=options.cpu_offload)


def set_model_state_dict(
    model: nn.Cell, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> None:
    """Loads whole tensors, the same on every rank, of which each takes its part.

    Args:
        model: holds sharded Cells, or is one.
        model_state_dict: whole tensors by the names of the unsharded Cell.
        options: ``full_state_dict`` must be True.

    Raises:
        NotImplementedError: without ``full_state_dict``, or with ``broadcast_from_rank0`` or ``ignore_frozen_params``.
        ValueError: see `load_full_state_dict`.
    """
    options = StateDictOptions.of(options)
    if not options.full_state_dict or options.broadcast_from_rank0 or options.ignore_frozen_params:
        raise NotImplementedError(
            "set_model_state_dict: on MindSpore only whole tensors that every rank has: options=StateDictOptions("
            "full_state_dict=True), without broadcast_from_rank0 and ignore_frozen_params"
        )
    load_full_state_dict(model, model_state_dict, strict=options.strict)


def full_state_dict(model: nn.Cell, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, Tensor]:
    """The model's state as whole plain tensors: names, order and values of an unsharded Cell's ``state_dict()``.

    One all-gather for each bucket of parameters; every rank has to call it. Tied parameters appear under each name, as
    one tensor.

    Args:
        model: holds sharded Cells, or is one.
        rank0_only: other ranks than the first take part and get an empty dictionary. Default False: all get the same.
        cpu: put the tensors on the host.
    """
    keep = not rank0_only or get_platform().groups.rank() == 0
    buckets = _buckets(model)
    own = _state(model)
    whole: dict[int, Any] = {}
    with _no_grad():
        for bucket in buckets:
            for parameter, tensor in _gathered(bucket):
                whole[id(parameter)] = _own(tensor, cpu) if keep else None
        for value in own.values():
            if isinstance(value, Tensor) and id(value) not in whole:
                tensor = value.full_tensor() if isinstance(value, DTensor) else value
                whole[id(value)] = _own(tensor, cpu) if keep else None
    return {name: whole.get(id(value), value) for name, value in own.items()} if keep else {}


def load_full_state_dict(model: nn.Cell, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Loads whole tensors into a sharded model: each rank takes its part. Nothing is communicated.

    Args:
        model: holds sharded Cells, or is one.
        state: what ``full_state_dict`` gave, or an unsharded Cell's ``state_dict()``; the same on every rank.
        strict: every name must be in both. Default True.

    Raises:
        ValueError: with ``strict``, names that are missing or not known; a tensor of another shape.
    """
    owners = {
        id(parameter.parameter): (bucket, index)
        for bucket in _buckets(model)
        for index, parameter in enumerate(bucket.parameters)
    }
    own = _state(model)
    missing, unknown = [name for name in own if name not in state], [name for name in state if name not in own]
    if strict and (missing or unknown):
        raise ValueError(
            f"load_full_state_dict: {len(missing)} names are missing ({', '.join(missing[:5])}), {len(unknown)} are not"
            f" known ({', '.join(unknown[:5])}). Use strict=False to load the rest"
        )
    with _no_grad():
        for name, target in own.items():
            source = state.get(name)
            if not isinstance(target, Tensor) or source is None:
                continue
            if tuple(source.shape) != tuple(target.shape):
                raise ValueError(
                    f"load_full_state_dict: {name!r} has shape {tuple(source.shape)}, the model's is"
                    f" {tuple(target.shape)}"
                )
            bucket, index = owners.get(id(target), (None, 0))
            with local_mode():
                if bucket is not None:
                    part = _part(source, bucket.parameters[index].inner)
                    part = run_of(part, *bucket.layout.part(index, bucket.axes.shard_rank))
                else:
                    part = _part(source, target._spec if isinstance(target, DTensor) else None).copy()
                set_local(target, part.astype(target.dtype))
                if isinstance(target, Parameter):
                    target.init = None  # an initializer that was to give it values is not needed any more
    autograd.forget()


def _state(model: nn.Cell) -> dict[str, Any]:
    return dict(model.state_dict(keep_vars=True))


def _buckets(model: nn.Cell) -> list[Bucket]:
    """The buckets under ``model``, with the sharded parameters registered."""
    found = []
    for _, cell in model.cells_and_names():
        group = group_of(cell)
        if group is not None:
            group.reshard()
            found += group.buckets
    return found


def _gathered(bucket: Bucket) -> Iterator[tuple[Any, Tensor]]:
    """Each sharded parameter with its whole value, of which it does not own the memory."""
    full = piece = bucket.piece()
    if bucket.axes.shard_size > 1:
        full = mint.empty((bucket.layout.total,), dtype=bucket.dtype)
        get_platform().collectives.all_gather(full, piece, group=bucket.axes.shard_group)
    for parameter, offset in zip(bucket.parameters, bucket.layout.offsets):
        tensor = mint.narrow(full, 0, offset, parameter.numel).reshape(parameter.shape)
        if parameter.inner is not None:
            tensor = wrap(tensor, parameter.inner).full_tensor()
        yield parameter.parameter, tensor


def _own(tensor: Tensor, cpu: bool) -> Tensor:
    return Tensor(tensor.asnumpy()) if cpu else local_view(tensor).copy()


def _part(whole: Tensor, spec: Any) -> Tensor:
    if spec is None:
        return local_view(whole)
    return execute(local_view(whole), spec.with_placements([Replicate()] * spec.mesh.ndim), spec)
