"""Make DTensors and modules of them: from whole tensors and from nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor import port
from hp_dtensor.creation.from_local import refuse_cut_graph, refuse_second_call
from hp_dtensor.layout.layout import Layout, as_placements
from hp_dtensor.layout.placements import Placement
from hp_dtensor.layout.spec import TensorSpec, normalize
from hp_dtensor.mesh.device_mesh import DeviceMesh, get_current_mesh
from hp_platform import get_platform


def distribute_tensor(
    tensor: Any,
    device_mesh: DeviceMesh | Layout | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Shard a whole tensor over a mesh.

    Args:
        tensor: the whole tensor, of the same shape on every rank; it is not changed, and the result shares no memory
            with it. On PyTorch it is moved to the mesh's kind of device, except from meta, where the DTensor is as
            well, and the result is a leaf with the tensor's ``requires_grad``. On MindSpore a Parameter becomes a new
            Parameter of the same name.
        device_mesh: the mesh, or a Layout; default the mesh of ``with mesh:``.
        placements: one an axis; default replicated.
        src_data_rank: the index along each axis of the rank whose values count; they are broadcast. None: every rank's
            own values are taken, nothing is communicated (they must agree).

    Raises:
        ValueError: placements that do not fit, or a tensor in a graph, whose gradients would be lost.
    """
    maker, what = port.creation(), "distribute_tensor"
    device_type = maker.check_whole(tensor)
    mesh, target = _layout(device_mesh, placements, len(tensor.shape), what, device_type)
    maker.check_mesh(mesh, what)
    if isinstance(tensor, port.tensors().DTensor):
        if tensor._spec.mesh != mesh:
            raise ValueError(f"distribute_tensor: the DTensor is on {tensor._spec.mesh}, not on {mesh}")
        return tensor.redistribute(mesh, target)
    if (detach := maker.detaches(tensor)) is not None:
        refuse_cut_graph(tuple(tensor.shape), detach)
    return maker.shard(tensor, TensorSpec.of(mesh, target, tuple(tensor.shape)), src_data_rank)


def _layout(
    device_mesh: Any, placements: Any, ndim: int, what: str, device_type: str | None = None
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    current = None if device_mesh is not None else get_current_mesh()
    mesh, target = as_placements(device_mesh, placements, current, what, device_type)
    return mesh, normalize(target, mesh, ndim, what)


def broadcast(whole: Any, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Overwrite a whole tensor with that of the ranks at index ``src_data_rank`` of each axis; None: leave it."""
    if src_data_rank is None or mesh.get_coordinate() is None:
        return
    for axis in range(mesh.ndim):
        if mesh.shape[axis] > 1:
            order = mesh.group_order(axis)
            source = src_data_rank if order is None else order.index(src_data_rank)
            get_platform().collectives.broadcast(whole, source, group=mesh.get_group(axis))


def distribute_module(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, Any, DeviceMesh], None] | None = None,
    input_fn: Callable[[Any, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[Any, Any, DeviceMesh], Any] | None = None,
) -> Any:
    """Turn a module's parameters, and on PyTorch its buffers, into DTensors, in place.

    Args:
        module: the module or Cell; parameters that ``partition_fn`` leaves plain become replicated.
        device_mesh: the mesh; default that of ``with mesh:``.
        partition_fn: called as ``(name, submodule, mesh)`` for every submodule, to distribute its parameters.
        input_fn: called as ``(module, inputs, mesh)`` before forward; returns the inputs.
        output_fn: called as ``(module, outputs, mesh)`` after forward; returns the outputs.

    Raises:
        RuntimeError: it was called on this module before, whose inputs and outputs would be converted twice.
    """
    refuse_second_call(module)
    maker, mesh = port.creation(), device_mesh if device_mesh is not None else get_current_mesh()
    for name, child in maker.submodules(module):
        if partition_fn is not None:
            maker.partition(partition_fn, name, child, mesh)
        maker.replicate_parameters(child, mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: output_fn(mod, outputs, mesh))
    module._distribute_module_applied = True
    return module


# ---- from nothing ----
def _make(
    what: str, size: Any, dtype: Any, device_mesh: Any, placements: Any, requires_grad: bool, value: Any = None
) -> Any:
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(int(s) for s in size)
    mesh, target = _layout(device_mesh, placements, len(shape), what)
    if any(placement.is_partial() for placement in target):
        raise ValueError(f"{what}: placements {target} hold a Partial; make the tensor replicated or sharded")
    return port.creation().make(what, TensorSpec.of(mesh, target, shape), dtype, requires_grad, value)


def zeros(
    *size: Any, requires_grad: bool = False, dtype: Any = None, device_mesh: Any = None, placements: Any = None
) -> Any:
    """Make a DTensor of zeros; ``size`` is the global shape, ``placements`` default replicated."""
    return _make("zeros", size, dtype, device_mesh, placements, requires_grad)


def ones(
    *size: Any, requires_grad: bool = False, dtype: Any = None, device_mesh: Any = None, placements: Any = None
) -> Any:
    """Make a DTensor of ones."""
    return _make("ones", size, dtype, device_mesh, placements, requires_grad)


def empty(
    *size: Any, requires_grad: bool = False, dtype: Any = None, device_mesh: Any = None, placements: Any = None
) -> Any:
    """Make a DTensor of memory as it is."""
    return _make("empty", size, dtype, device_mesh, placements, requires_grad)


def full(
    size: Any,
    fill_value: float,
    *,
    requires_grad: bool = False,
    dtype: Any = None,
    device_mesh: Any = None,
    placements: Any = None,
) -> Any:
    """Make a DTensor filled with ``fill_value``."""
    return _make("full", (size,), dtype, device_mesh, placements, requires_grad, fill_value)


def rand(
    *size: Any, requires_grad: bool = False, dtype: Any = None, device_mesh: Any = None, placements: Any = None
) -> Any:
    """Draw from [0, 1): the part of what one device draws. On MindSpore the ranks' seeds must agree."""
    return _make("rand", size, dtype, device_mesh, placements, requires_grad)


def randn(
    *size: Any, requires_grad: bool = False, dtype: Any = None, device_mesh: Any = None, placements: Any = None
) -> Any:
    """Draw from the standard normal distribution, as ``rand`` draws."""
    return _make("randn", size, dtype, device_mesh, placements, requires_grad)
