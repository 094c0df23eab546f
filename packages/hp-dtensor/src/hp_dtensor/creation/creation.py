"""DTensors made from whole tensors, local parts and nothing: checks, layouts of the results, modules of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from hp_dtensor import port
from hp_dtensor.layout.placements import Partial, Placement, RaggedShard, kind_of
from hp_dtensor.layout.spec import Layout, TensorSpec, as_placements, grad_spec, normalize
from hp_dtensor.mesh.device_mesh import DeviceMesh, get_current_mesh
from hp_platform import get_platform
from hp_platform.extend import reduce_numbers, when_groups_end


class GraphError(ValueError, RuntimeError):
    """A tensor that would be detached from its graph."""


class NotLocalError(TypeError, RuntimeError):
    """An argument is not a plain tensor."""


_MOST_DIMS = 16
"""The number of dims up to which ranks compare shapes."""


def check_local(local: Any, dtensor: type, tensor: type) -> None:
    """Check that ``from_local`` is passed a plain tensor.

    Raises:
        NotLocalError: it is a DTensor, or not a tensor.
    """
    if isinstance(local, dtensor):
        raise NotLocalError("from_local takes a plain tensor, got a DTensor; use redistribute to change its layout")
    if not isinstance(local, tensor):
        raise NotLocalError(f"from_local takes a plain tensor, this rank's local tensor, got a {kind_of(local)}")


def dtensor_of(
    local: Any,
    kind: str,
    device_mesh: DeviceMesh | Layout | None,
    placements: Sequence[Placement] | None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
) -> Any:
    """Make a DTensor of a plain local tensor; see ``DTensor.from_local``.

    Args:
        local: this rank's local tensor.
        kind: of device of a default mesh.
        device_mesh: the mesh, or a ``Layout``.
        placements: one per axis.
        run_check: compare ranks first.
        shape: global shape.
        grad_placements: layout in which the local tensor gets its gradient.
    """
    f = port.creation()
    around = None if device_mesh is not None else get_current_mesh()
    mesh, target = as_placements(device_mesh, placements, around, "from_local", kind)
    spec = layout_of(tuple(local.shape), mesh, target, shape, f.records(local))
    local = f.part_of(local, spec)
    if run_check:
        check_ranks(spec, local.dtype, f.records(local), functools.partial(_same_values, local))
    return port.tensors().wrap(f.attached(local, spec, gradient_layout(spec, grad_placements)), spec)


def _same_values(local: Any, group: Any) -> bool:
    """Tell whether the local tensors of all ranks of a group have the same values."""
    collectives, copied = get_platform().collectives, port.creation().copied
    low, high = copied(local), copied(local)
    collectives.all_reduce(low, "min", group=group)
    collectives.all_reduce(high, "max", group=group)
    return bool((low == high).all())


def gradient_layout(spec: TensorSpec, grad_placements: Sequence[Placement] | None) -> TensorSpec | None:
    """Return the layout in which a local tensor receives its gradient, or None if the gradient arrives in it already.

    Args:
        spec: the layout of the DTensor.
        grad_placements: the user's argument; None leaves the gradient in the layout in which it arrives.

    Raises:
        ValueError: the local tensor's gradient would have another shape in that layout.
    """
    if grad_placements is None:
        return None
    natural, what = grad_spec(spec), "from_local: grad_placements"
    requested = normalize(grad_placements, spec.mesh, len(spec.shape), what)
    for axis, (arrives, asked) in enumerate(zip(natural.placements, requested, strict=True)):
        if arrives != asked and not (arrives.is_replicate() and asked.is_partial("sum")):
            allowed = "Replicate() or Partial()" if arrives.is_replicate() else repr(arrives)
            raise ValueError(
                f"{what}[{axis}] is {asked!r} for a local tensor placed {spec.placements[axis]!r}; its gradient may"
                f" be {allowed}"
            )
    return None if requested == natural.placements else natural.with_placements(requested)


def layout_of(
    local: tuple[int, ...],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    requires_grad: bool,
) -> TensorSpec:
    """Return the layout of a DTensor whose local tensor has shape ``local``; see ``DTensor.from_local``.

    Raises:
        NotImplementedError: a local tensor of a partial max, min or product that requires gradients.
        ValueError: placements that don't fit, or a global shape that cannot be inferred.
    """
    arguments = local, mesh, placements, shape if shape is None else tuple(shape), requires_grad
    try:
        return _layouts(*arguments)
    except TypeError:  # a value without a hash is not a placement; raise its error
        return _layouts.__wrapped__(*arguments)


@functools.lru_cache(1024)
def _layouts(
    local: tuple[int, ...],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    requires_grad: bool,
) -> TensorSpec:
    for placement in placements if requires_grad else ():
        if placement.is_partial() and not placement.is_partial("sum") and not placement.is_partial("avg"):
            raise NotImplementedError(
                f"from_local: a local tensor that requires gradients as {placement!r} has no known gradient,"
                " because backward cannot tell which rank's value counts; take it out of the graph (detach(), on"
                " MindSpore ops.stop_gradient()), or reduce a DTensor instead (its max or prod has a gradient)"
            )
    ops = {placement.reduce_op for placement in placements if isinstance(placement, Partial)}
    if len(ops) > 1 and ops != {"sum", "avg"}:
        raise ValueError(
            f"from_local: placements {tuple(placements)} mix partial {' and '.join(sorted(ops))}, whose order of"
            " reduction matters; reduce one of them first"
        )
    ragged = any(isinstance(p, RaggedShard) for p in placements)
    if ragged and shape is None:
        raise ValueError("from_local: a RaggedShard needs shape=, the global shape")
    placements = normalize(placements, mesh, len(shape) if shape is not None else len(local), "from_local")
    if shape is None:
        if mesh.get_coordinate() is None and not prod(local):
            raise ValueError(
                f"from_local: rank {mesh.get_rank()} is not in {mesh}, and the global shape cannot be inferred from a"
                f" local tensor of shape {local}; pass shape="
            )
        sizes = list(local)
        for axis, placement in enumerate(placements):
            if not (placement.is_replicate() or placement.is_partial()):
                sizes[placement.dim] *= mesh.shape[axis]  # type: ignore[attr-defined]
        shape = sizes
    return TensorSpec.of(mesh, placements, tuple(int(size) for size in shape))


when_groups_end(_layouts.cache_clear)


def check_inside(mesh: DeviceMesh, what: str) -> None:
    """Check that this rank is in the mesh, on a framework where ranks outside cannot have empty local tensors.

    Raises:
        NotImplementedError: this rank is not in the mesh.
    """
    if mesh.get_coordinate() is None:
        raise NotImplementedError(
            f"{what}: rank {mesh.get_rank()} is not in {mesh}, and a rank outside a mesh cannot have an empty"
            " local tensor on this framework; call it only on the ranks of the mesh"
        )


def check_part(local: tuple[int, ...], spec: TensorSpec) -> None:
    """Check that a local tensor has the shape that its layout implies on this rank.

    Raises:
        ValueError: it has another shape.
    """
    mesh = spec.mesh
    if local != spec.local_shape:
        raise ValueError(
            f"from_local: a tensor of global shape {spec.shape} placed {spec.placements} on {mesh.shape} has local"
            f" shape {spec.local_shape} on rank {mesh.get_rank()} at {mesh.get_coordinate()}, got {local}"
        )


def check_ranks(spec: TensorSpec, dtype: Any, requires_grad: bool, same_values: Callable[[Any], bool]) -> None:
    """Compare shapes and dtypes over all ranks, and replicated values over the axis; communicates.

    Args:
        spec: the layout of the future DTensor.
        dtype: the local tensor's dtype, compared as text.
        requires_grad: the local tensor's.
        same_values: tells whether the local tensors of all ranks of a group have the same values.

    Raises:
        ValueError: ranks disagree.
    """
    shape = [len(spec.shape), *spec.shape, *(0,) * (_MOST_DIMS - len(spec.shape))]
    kind = [*str(dtype).encode().ljust(_MOST_DIMS * 2, b" "), requires_grad]
    for axis in range(spec.mesh.ndim):
        group = spec.mesh.get_group(axis)
        for what, numbers in (("the global shape", shape), ("the dtype or requires_grad", kind)):
            if reduce_numbers(numbers, "min", group) != reduce_numbers(numbers, "max", group):
                raise ValueError(
                    f"from_local: ranks along axis {axis} disagree on {what}; this rank has shape {spec.shape},"
                    f" {dtype}, requires_grad={requires_grad}"
                )
        if spec.placements[axis].is_replicate() and not same_values(group):
            raise ValueError(
                f"from_local: values differ between ranks along axis {axis}, where the placement is Replicate()"
            )


def refuse_cut_graph(shape: tuple[int, ...], detach: str) -> None:
    """Return the error for a tensor in a graph that `distribute_tensor` would detach.

    Args:
        shape: the tensor's shape.
        detach: the framework's call that detaches, for the advice.

    Raises:
        GraphError: always.
    """
    raise GraphError(
        f"distribute_tensor: a tensor of shape {shape} that was computed from others would be detached from their"
        f" gradients; redistribute each rank's own tensor instead, DTensor.from_local(tensor, mesh), or {detach} it"
    )


def refuse_second_call(module: Any) -> None:
    """Check that `distribute_module` was not called on a module before.

    Raises:
        RuntimeError: it was, so inputs and outputs would be converted twice.
    """
    if getattr(module, "_distribute_module_applied", False):
        raise RuntimeError(
            f"distribute_module: this {type(module).__name__} is distributed already, and its inputs and outputs would"
            " be converted a second time; call it once, with all functions"
        )


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
