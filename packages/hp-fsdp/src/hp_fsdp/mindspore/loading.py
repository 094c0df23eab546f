"""What MindSpore supplies to ``load_state_dict`` of a sharded Cell: see `hp_fsdp.loading`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mindspore import Tensor, _no_grad, nn

from hp_dtensor import DeviceMesh
from hp_dtensor.mindspore.extend import DTensor, autograd, local_mode, local_view, wrap
from hp_fsdp.mindspore.whole import part_of, whole, write
from hp_fsdp.norms import spec_of
from hp_platform import get_platform

__all__ = ["Tensor", "has_memory", "is_checked", "part", "refuse_hooks", "somewhere", "write_parts"]


def is_checked(target: Any) -> bool:
    """Tell whether a plain tensor takes its own shape only; each does."""
    return True


def has_memory(target: Any) -> bool:
    """Tell whether a tensor can be written; one without values gets them."""
    return True


def somewhere(mesh: DeviceMesh, here: bool) -> bool:
    """Tell whether a condition holds on any rank of a mesh; waits for all."""
    with _no_grad(), local_mode():
        told = Tensor(np.array([int(here)], np.int64))
        for axis in range(mesh.ndim):
            get_platform().collectives.all_reduce(told, "max", group=mesh.get_group(axis))
        return bool(told.asnumpy()[0])


def part(target: Any, value: Tensor) -> Tensor:
    """Give this rank's part of a value, as the target is laid out, and with its layout."""
    spec = spec_of(target)
    with _no_grad():
        if isinstance(value, DTensor):
            if spec is None:
                return whole(value)
            return value if value._spec is spec else value.redistribute(spec.mesh, spec.placements)
        if spec is None:
            return value
        if tuple(value.shape) != spec.shape and tuple(value.shape) == spec.local_shape:
            return wrap(local_view(value).copy(), spec)
        return wrap(part_of(value.reshape(spec.shape), spec), spec)


def write_parts(own: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Gives distributed tensors of a model their values.

    Args:
        own: the model's tensors, by name.
        parts: what `part` gave for some of the names.
    """
    pairs = {id(own[name]): (own[name], value) for name, value in parts.items()}
    with _no_grad(), local_mode():
        for target, value in pairs.values():
            write(target, local_view(value).astype(target.dtype).copy())
    autograd.forget()


def refuse_hooks(cell: nn.Cell) -> None:
    """Refuses Cells that change a state before it is loaded: they would not see the sharded parameters in it.

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
