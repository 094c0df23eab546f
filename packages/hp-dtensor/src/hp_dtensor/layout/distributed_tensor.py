"""DistributedTensor: what a DTensor of any framework says about its layout."""

from __future__ import annotations

from typing import Any

from hp_dtensor.layout.placements import Placement, Replicate
from hp_dtensor.layout.spec import Layout, TensorSpec
from hp_dtensor.mesh.device_mesh import DeviceMesh


class DistributedTensor:
    """Base of a framework's DTensor, before its class of tensors."""

    __slots__ = ()
    _spec: TensorSpec
    shape: Any
    redistribute: Any

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements, one per axis."""
        return self._spec.placements

    @property
    def sharding(self) -> Layout:
        """The Layout: mesh and placements. ``layout`` is torch's own attribute, ``torch.strided``."""
        return Layout.of(self._spec.mesh, self._spec.placements, len(self._spec.shape))

    def is_partial(self) -> bool:
        """Return True if on some axis the value is a reduction of one term per rank."""
        return self._spec.partial

    def reduce_partial(self) -> Any:
        """Return this tensor with every ``Partial`` axis reduced to ``Replicate``."""
        return self.redistribute(placements=[Replicate() if p.is_partial() else p for p in self._spec.placements])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def _described(self, local: str, *, parameter: bool) -> str:
        """Return the ``repr`` of a DTensor whose local tensor has the ``repr`` ``local``."""
        name = "Parameter(DTensor)" if parameter else "DTensor"
        spec = self._spec
        return f"{name}(shape={tuple(spec.shape)}, placements={spec.placements}, mesh={spec.mesh!r}, local={local})"
