"""Making DTensors: from local parts, from whole tensors, from nothing; and Cells of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, mint, nn, ops

from hp_dtensor.from_local import (
    check_inside,
    check_local,
    check_part,
    check_ranks,
    gradient_layout,
    layout_of,
    refuse_cut_graph,
    refuse_second_call,
)
from hp_dtensor.layout.layout import Layout, as_placements
from hp_dtensor.layout.placements import Placement, Replicate
from hp_dtensor.layout.spec import TensorSpec, normalize
from hp_dtensor.mesh.device_mesh import DeviceMesh, get_current_mesh
from hp_dtensor.mindspore.backward.autograd import alias, grad_enabled, gradient_as, local_mode
from hp_dtensor.mindspore.dtensor import DTensor, local_view, wrap
from hp_dtensor.mindspore.moves.redistribute import execute
from hp_dtensor.mindspore.parameter import set_local
from hp_platform import get_platform

__all__ = [
    "distribute_module",
    "distribute_parameter",
    "distribute_tensor",
    "empty",
    "from_local",
    "full",
    "ones",
    "rand",
    "randn",
    "zeros",
]


def from_local(
    local: Tensor,
    device_mesh: DeviceMesh | Layout | None,
    placements: Sequence[Placement] | None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
) -> DTensor:
    """See ``DTensor.from_local``."""
    check_local(local, DTensor, Tensor)
    mesh, wanted = as_placements(
        device_mesh, placements, None if device_mesh is not None else get_current_mesh(), "from_local", _kind()
    )
    recorded = grad_enabled() and bool(local._requires_grad)
    spec = layout_of(tuple(local.shape), mesh, wanted, shape, recorded)
    check_inside(mesh, "from_local")
    check_part(tuple(local.shape), spec)
    if run_check:
        _check(local, spec)
    gradient = gradient_layout(spec, grad_placements)
    return wrap(alias(local) if gradient is None else gradient_as(local, spec, gradient), spec)


def _kind() -> str:
    return get_platform().devices.kind


def _check(local: Tensor, spec: TensorSpec) -> None:
    """Compare shapes and dtypes over all ranks, and replicated values over the axis; communicates."""
    collectives = get_platform().collectives

    def agree(numbers: Sequence[int] | None, group: Any) -> bool:
        value = ops.stop_gradient(local).contiguous() if numbers is None else Tensor(list(numbers), mindspore.int64)
        low, high = value.copy(), value.copy()
        collectives.all_reduce(low, "min", group=group)
        collectives.all_reduce(high, "max", group=group)
        return bool((low == high).all())

    check_ranks(spec, local.dtype, grad_enabled() and bool(local._requires_grad), agree)


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | Layout | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a global tensor over a mesh.

    Args:
        tensor: the whole tensor, of the same shape on every rank; it is not changed. Of a Parameter a new Parameter
            of the same name is made.
        device_mesh: the mesh, or a Layout; default the mesh of ``with mesh:``.
        placements: one an axis; default replicated.
        src_data_rank: the index along each axis of the rank whose values count; they are broadcast. None: every rank's
            own values are taken, nothing is communicated (they must agree).

    Raises:
        ValueError: placements that do not fit, or a tensor in a graph, whose gradients would be lost.
    """
    mesh, wanted = as_placements(
        device_mesh, placements, None if device_mesh is not None else get_current_mesh(), "distribute_tensor", _kind()
    )
    wanted = normalize(wanted, mesh, tensor.ndim, "distribute_tensor")
    check_inside(mesh, "distribute_tensor")
    if isinstance(tensor, DTensor):
        if tensor._spec.mesh != mesh:
            raise ValueError(f"distribute_tensor: the DTensor is on {tensor._spec.mesh}, not on {mesh}")
        return tensor.redistribute(mesh, wanted)
    if grad_enabled() and tensor._requires_grad and not tensor._is_leaf:
        refuse_cut_graph(tuple(tensor.shape), "ops.stop_gradient()")
    spec = TensorSpec.of(mesh, wanted, tuple(tensor.shape))
    local = _local(tensor, spec, src_data_rank)
    if isinstance(tensor, Parameter):
        made = Parameter(local, name=tensor.name, requires_grad=tensor.requires_grad)
        return wrap(made, spec)
    return wrap(local, spec)


def _local(tensor: Tensor, spec: TensorSpec, src_data_rank: int | None) -> Tensor:
    """Return this rank's shard of a global tensor, in its own memory."""
    mesh = spec.mesh
    whole = local_view(tensor).copy()
    if src_data_rank is not None and mesh.get_coordinate() is not None:
        whole = whole.contiguous()
        for axis in range(mesh.ndim):
            if mesh.shape[axis] > 1:
                order = mesh.group_order(axis)
                source = src_data_rank if order is None else order.index(src_data_rank)
                get_platform().collectives.broadcast(whole, source, group=mesh.get_group(axis))
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
    wanted = normalize(placements, device_mesh, parameter.ndim, f"parameter {parameter.name!r}")
    spec = TensorSpec.of(device_mesh, wanted, tuple(parameter.shape))
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


def distribute_module(
    module: nn.Cell,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Cell, DeviceMesh], None] | None = None,
    input_fn: Callable[[nn.Cell, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[nn.Cell, Any, DeviceMesh], Any] | None = None,
) -> nn.Cell:
    """Turn a Cell's parameters into DTensors, in place.

    Args:
        module: the Cell; parameters that ``partition_fn`` leaves plain become replicated.
        device_mesh: the mesh; default that of ``with mesh:``.
        partition_fn: called as ``(name, cell, mesh)`` for every Cell inside, to distribute its parameters
            (`distribute_parameter`).
        input_fn: called as ``(cell, inputs, mesh)`` before construct; returns the inputs.
        output_fn: called as ``(cell, outputs, mesh)`` after construct; returns the outputs.

    Raises:
        RuntimeError: it was called on this Cell before, whose inputs and outputs would be converted twice.
    """
    refuse_second_call(module)
    mesh = device_mesh if device_mesh is not None else get_current_mesh()
    for name, child in module.cells_and_names():
        if partition_fn is not None:
            partition_fn(name, child, mesh)
        replicate_parameters(child, mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda cell, inputs: input_fn(cell, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda cell, inputs, outputs: output_fn(cell, outputs, mesh))
    module._distribute_module_applied = True
    return module


def replicate_parameters(module: nn.Cell, mesh: DeviceMesh, *, src_data_rank: int | None = 0) -> None:
    """Turn the plain parameters of the Cell itself, not of its children, into replicated DTensors."""
    for parameter in module._params.values():
        if parameter is not None and not isinstance(parameter, DTensor):
            distribute_parameter(parameter, mesh, [Replicate()] * mesh.ndim, src_data_rank=src_data_rank)


# ---- factories ----
def _make(
    what: str,
    size: Any,
    dtype: Any,
    device_mesh: Any,
    placements: Any,
    make: Callable[..., Tensor],
    drawn: bool = False,
) -> DTensor:
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(int(s) for s in size)
    mesh, wanted = as_placements(device_mesh, placements, None if device_mesh is not None else get_current_mesh(), what)
    wanted = normalize(wanted, mesh, len(shape), what)
    if any(placement.is_partial() for placement in wanted):
        raise ValueError(f"{what}: placements {wanted} hold a Partial; make the tensor replicated or sharded")
    spec = TensorSpec.of(mesh, wanted, shape)
    dtype = dtype or mindspore.float32
    if not drawn:
        return wrap(make(spec.local_shape, dtype), spec)
    with local_mode():
        whole = make(shape, dtype)
    return wrap(execute(whole, spec.with_placements([Replicate()] * mesh.ndim), spec), spec)


def zeros(*size: Any, dtype: Any = None, device_mesh: Any = None, placements: Any = None) -> DTensor:
    """Return a DTensor of zeros; ``size`` is the global shape, ``placements`` default to replicated."""
    return _make("zeros", size, dtype, device_mesh, placements, ops.zeros)


def ones(*size: Any, dtype: Any = None, device_mesh: Any = None, placements: Any = None) -> DTensor:
    """Return a DTensor of ones."""
    return _make("ones", size, dtype, device_mesh, placements, ops.ones)


def empty(*size: Any, dtype: Any = None, device_mesh: Any = None, placements: Any = None) -> DTensor:
    """Return a DTensor of uninitialized memory."""
    return _make("empty", size, dtype, device_mesh, placements, lambda shape, dtype: mint.empty(shape, dtype=dtype))


def full(
    size: Any, fill_value: float, *, dtype: Any = None, device_mesh: Any = None, placements: Any = None
) -> DTensor:
    """Return a DTensor filled with ``fill_value``."""
    return _make(
        "full", (size,), dtype, device_mesh, placements, lambda shape, dtype: ops.full(shape, fill_value, dtype=dtype)
    )


def rand(*size: Any, dtype: Any = None, device_mesh: Any = None, placements: Any = None) -> DTensor:
    """Uniform on [0, 1): the part of what ``ops.rand`` draws on a single device; the ranks' seeds must agree."""
    return _make("rand", size, dtype, device_mesh, placements, lambda s, d: ops.rand(*s, dtype=d), drawn=True)


def randn(*size: Any, dtype: Any = None, device_mesh: Any = None, placements: Any = None) -> DTensor:
    """Return this rank's shard of what ``ops.randn`` draws on a single device; the ranks' seeds must agree."""
    return _make("randn", size, dtype, device_mesh, placements, lambda s, d: ops.randn(*s, dtype=d), drawn=True)
