"""The layouts of gradients.

Note [Gradient layouts]
On each mesh axis the placement of a value determines that of its gradient: Shard for Shard, Replicate for Partial, and
Replicate for Replicate, unless the result of the operation *varies* over the axis (it is Shard or Partial there). Then
each rank computes only its term of the gradient, which is Partial. So the backward of a redistribution is again a
redistribution, between the placements of the gradients, without a scale factor. These are the transpose rules of JAX's
``shard_map`` (``pvary``, ``psum``), applied to each operation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hp_dtensor.layout.placements import Partial, Placement, Replicate
from hp_dtensor.layout.spec import TensorSpec, normalize


@functools.lru_cache(maxsize=16384)
def grad_spec(spec: TensorSpec, vary: tuple[bool, ...] | None = None) -> TensorSpec:
    """Return the layout of a value's gradient; see Note [Gradient layouts]."""
    placements: list[Placement] = []
    for axis, placement in enumerate(spec.placements):
        if vary is not None and vary[axis] and placement.is_replicate():
            placements.append(Partial())
        else:
            placements.append(Replicate() if placement.is_partial() else placement)
    return spec.with_placements(placements)


@functools.lru_cache(maxsize=16384)
def backward_scale(src: TensorSpec, dst: TensorSpec) -> float:
    """Return the gradient scale of a redistribution: 1, except that each term of ``Partial("avg")`` gets 1/n."""
    scale = 1.0
    for axis, (a, b) in enumerate(zip(src.placements, dst.placements, strict=True)):
        ranks = src.mesh.shape[axis]
        if a.is_partial("avg") and not b.is_partial("avg"):
            scale /= ranks
        if b.is_partial("avg") and not a.is_partial("avg"):
            scale *= ranks
    return scale


def varying(spec: TensorSpec, grad_placements: Sequence[Placement]) -> tuple[bool, ...] | None:
    """By axis, whether a local part whose gradient has ``grad_placements`` varies; None where none does.

    Raises:
        ValueError: gradients of that layout can't come from a tensor of layout ``spec``.
    """
    placements = normalize(grad_placements, spec.mesh, len(spec.shape), "to_local: grad_placements")
    vary = tuple(p.is_replicate() and g.is_partial() for p, g in zip(spec.placements, placements, strict=True))
    for axis, (natural, grad) in enumerate(zip(grad_spec(spec).placements, placements, strict=True)):
        if natural != grad and not vary[axis]:
            raise ValueError(
                f"to_local: grad_placements[{axis}] is {grad!r} for a tensor placed {spec.placements[axis]!r}; "
                f"it may be {natural!r}" + (" or Partial()" if spec.placements[axis].is_replicate() else "")
            )
    return vary if any(vary) else None
