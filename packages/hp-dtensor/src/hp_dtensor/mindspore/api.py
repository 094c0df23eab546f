"""DTensors from local parts and whole tensors, and Cells of them, on MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hp_dtensor.creation.creation import (
    broadcast,
    check_inside,
    check_local,
    check_part,
    dtensor_of,
)
from hp_dtensor.layout.placements import Placement, Replicate
from hp_dtensor.layout.spec import TensorSpec, normalize
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.mindspore.backward.autograd import alias, execute, grad_enabled, gradient_as, local_mode
from hp_dtensor.mindspore.dtensor import DTensor, local_view, wrap
from hp_dtensor.mindspore.modules import named_modules, set_local
from hp_platform import get_platform


def from_local(local: Tensor, *layout: Any, **options: Any) -> DTensor:
    """See ``DTensor.from_local``."""
    check_local(local, DTensor, Tensor)
    return dtensor_of(local, _kind(), *layout, **options)


def records(tensor: Tensor) -> bool:
    return grad_enabled() and bool(tensor._requires_grad)


def part_of(local: Tensor, spec: TensorSpec) -> Tensor:
    check_inside(spec.mesh, "from_local")
    check_part(tuple(local.shape), spec)
    return local


def copied(tensor: Tensor) -> Tensor:
    return ops.stop_gradient(tensor).contiguous().copy()


def attached(local: Tensor, spec: TensorSpec, gradient: TensorSpec | None) -> Tensor:
    return alias(local) if gradient is None else gradient_as(local, spec, gradient)


def _kind() -> str:
    return get_platform().devices.kind


def check_whole(tensor: Tensor) -> str:
    del tensor  # no other library's tensors are told apart
    return _kind()


def check_mesh(mesh: DeviceMesh, what: str) -> None:
    check_inside(mesh, what)


def detaches(tensor: Tensor) -> str | None:
    return "ops.stop_gradient()" if grad_enabled() and tensor._requires_grad and not tensor._is_leaf else None


def shard(tensor: Tensor, spec: TensorSpec, src_data_rank: int | None) -> DTensor:
    """See ``Creation``; of a Parameter a new one of the same name is made."""
    local = _local(tensor, spec, src_data_rank)
    if isinstance(tensor, Parameter):
        local = Parameter(local, name=tensor.name, requires_grad=tensor.requires_grad)
    return wrap(local, spec)


def _local(tensor: Tensor, spec: TensorSpec, src_data_rank: int | None) -> Tensor:
    """Return this rank's shard of a global tensor, in its own memory."""
    mesh = spec.mesh
    whole = local_view(tensor).copy().contiguous()
    broadcast(whole, mesh, src_data_rank)
    return execute(whole, spec.with_placements([Replicate()] * mesh.ndim), spec)


def distribute_parameter(
    parameter: Parameter,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Cuts a Parameter over a mesh, in place: whoever holds it holds the distributed one.

    A Parameter without values (``init_empty_weights``) gets its cut only; `init_parameters` gives it values.

    Args:
        parameter: a plain Parameter, or a distributed one, which is redistributed.
        device_mesh: the mesh.
        placements: one an axis.
        src_data_rank: as in `distribute_tensor`.

    Raises:
        ValueError: placements that do not fit.
    """
    normalized = normalize(placements, device_mesh, parameter.ndim, f"parameter {parameter.name!r}")
    spec = TensorSpec.of(device_mesh, normalized, tuple(parameter.shape))
    if isinstance(parameter, DTensor):
        if parameter._spec.mesh != device_mesh:
            raise ValueError(f"parameter {parameter.name!r} is on {parameter._spec.mesh}, not on {device_mesh}")
        if parameter._spec is not spec:
            local = execute(local_view(parameter), parameter._spec, spec)
            set_local(parameter, local)
            wrap(parameter, spec)
        return parameter
    if parameter.has_init:
        return wrap(parameter, spec)
    set_local(parameter, _local(parameter, spec, src_data_rank))
    return wrap(parameter, spec)


def submodules(module: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
    return module.cells_and_names()


def partition(
    partition_fn: Callable[[str, nn.Cell, DeviceMesh], None], name: str, module: nn.Cell, mesh: DeviceMesh
) -> None:
    partition_fn(name, module, mesh)


def replicate_parameters(module: nn.Cell, mesh: DeviceMesh, *, src_data_rank: int | None = 0) -> None:
    for parameter in module._params.values():
        if parameter is not None and not isinstance(parameter, DTensor):
            distribute_parameter(parameter, mesh, [Replicate()] * mesh.ndim, src_data_rank=src_data_rank)


def make(what: str, spec: TensorSpec, dtype: Any, requires_grad: bool, value: Any) -> DTensor:
    """See ``Creation``.

    Raises:
        NotImplementedError: with ``requires_grad``, which tensors don't have here.
    """
    if requires_grad:
        raise NotImplementedError(
            f"{what}: requires_grad=True for a tensor of shape {spec.shape}; on MindSpore a Parameter has gradients:"
            " Parameter(tensor, name=...), or differentiate by an argument with parallelize_value_and_grad"
        )
    dtype = dtype or mindspore.float32
    if what == "empty":
        return wrap(mint.empty(spec.local_shape, dtype=dtype), spec)
    if what not in ("rand", "randn"):
        return wrap(getattr(ops, what)(spec.local_shape, *(() if value is None else (value,)), dtype=dtype), spec)
    with local_mode():
        whole = getattr(ops, what)(*spec.shape, dtype=dtype)
    return wrap(execute(whole, spec.with_placements([Replicate()] * spec.mesh.ndim), spec), spec)


def named_parameters(module: nn.Cell) -> dict[str, Parameter]:
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, cell in named_modules(module).items()
        for name, parameter in cell._params.items()
        if parameter is not None
    }


def distribute(
    module: nn.Cell, placed: Mapping[str, tuple[DeviceMesh, tuple[Placement, ...]]], rest: DeviceMesh
) -> None:
    parameters = named_parameters(module)
    for name, (mesh, placements) in placed.items():
        distribute_parameter(parameters[name], mesh, placements)
    for cell in named_modules(module).values():
        replicate_parameters(cell, rest)


def rank_tensor(ranks: np.ndarray) -> mindspore.Tensor:
    return mindspore.Tensor(ranks.astype(np.int32))
