"""What is asked of the parts and whole tensors that become DTensors; the same on every framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Placement, RaggedShard
from hp_dtensor.spec import TensorSpec, normalize

__all__ = ["check_part", "check_ranks", "layout_of", "refuse_cut_graph"]

_MOST_DIMS = 16
"""Of what ranks compare."""


def layout_of(
    local: tuple[int, ...],
    mesh: DeviceMesh,
    wanted: Sequence[Placement],
    shape: Sequence[int] | None,
    requires_grad: bool,
) -> TensorSpec:
    """The layout of a DTensor whose local part has shape ``local``; see ``DTensor.from_local``.

    Raises:
        NotImplementedError: a part of a maximum or the like that requires gradients.
        ValueError: placements that don't fit, or a global shape that is not known.
    """
    for placement in wanted if requires_grad else ():
        if placement.is_partial() and not placement.is_partial("sum") and not placement.is_partial("avg"):
            raise NotImplementedError(
                f"from_local: a local tensor that requires gradients as {placement!r}: which rank's part counts is not"
                " known in backward; detach() it, or reduce the whole (a max or prod of a DTensor has its gradient)"
            )
    ragged = any(isinstance(p, RaggedShard) for p in wanted)
    if ragged and shape is None:
        raise ValueError("from_local: a RaggedShard needs shape=, the global shape")
    wanted = normalize(wanted, mesh, len(shape) if shape is not None else len(local), "from_local")
    if shape is None:
        if mesh.get_coordinate() is None and not prod(local):
            raise ValueError(
                f"from_local: rank {mesh.get_rank()} is not in {mesh}, and a local tensor of shape {local}"
                " doesn't tell the global shape; give shape="
            )
        sizes = list(local)
        for axis, placement in enumerate(wanted):
            if not (placement.is_replicate() or placement.is_partial()):
                sizes[placement.dim] *= mesh.shape[axis]  # type: ignore[attr-defined]
        shape = sizes
    return TensorSpec.of(mesh, wanted, tuple(int(size) for size in shape))


def check_part(local: tuple[int, ...], spec: TensorSpec) -> None:
    """Compare a local part's shape with what its layout gives this rank.

    Raises:
        ValueError: they differ.
    """
    mesh = spec.mesh
    if local != spec.local_shape:
        raise ValueError(
            f"from_local: a tensor of global shape {spec.shape} placed {spec.placements} on {mesh.shape} has"
            f" {spec.local_shape} on rank {mesh.get_rank()} at {mesh.get_coordinate()}, got {local}"
        )


def check_ranks(
    spec: TensorSpec, dtype: Any, requires_grad: bool, agree: Callable[[Sequence[int] | None, Any], bool]
) -> None:
    """Compare shapes and dtypes over all ranks, and replicated values over theirs. Communicates.

    Args:
        spec: the layout of the DTensor that is to be made.
        dtype: the local part's; its text is compared.
        requires_grad: the local part's.
        agree: tells whether all ranks of a group have the same numbers; None stands for the local part's values.

    Raises:
        ValueError: ranks disagree.
    """
    shape = [len(spec.shape), *spec.shape, *(0,) * (_MOST_DIMS - len(spec.shape))]
    kind = [*str(dtype).encode().ljust(_MOST_DIMS * 2, b" "), requires_grad]
    for axis in range(spec.mesh.ndim):
        group = spec.mesh.get_group(axis)
        for what, mine in (("the global shape", shape), ("the dtype or requires_grad", kind)):
            if not agree(mine, group):
                raise ValueError(
                    f"from_local: ranks along axis {axis} disagree on {what}; this rank has shape {spec.shape},"
                    f" {dtype}, requires_grad={requires_grad}"
                )
        if spec.placements[axis].is_replicate() and not agree(None, group):
            raise ValueError(
                f"from_local: values differ between ranks along axis {axis}, where the placement is Replicate()"
            )


def refuse_cut_graph(shape: tuple[int, ...], detach: str) -> None:
    """What `distribute_tensor` says of a tensor in a graph.

    Args:
        shape: the tensor's.
        detach: the framework's call that leaves the graph.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"distribute_tensor: a tensor of shape {shape} that was computed from others would be cut off from their"
        f" gradients; take each rank's own and redistribute that, DTensor.from_local(tensor, mesh), or {detach} it"
    )
