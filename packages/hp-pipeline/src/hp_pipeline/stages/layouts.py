"""Distributed tensors between stages: their local tensors are sent, and the receiver puts them on its own mesh.

Note [What a distributed tensor becomes]
    A stage's rank sends its local tensor to the rank of the next stage that has the same place in that stage's mesh.
    ``to_local`` and ``from_local`` are in the graphs of the two stages, so that the gradient of the local tensor goes
    back as it is: what ``from_local`` hands back of a layout is what ``to_local`` expects of it, partial sums
    included. Nothing here names a library's class: a distributed tensor is what has placements and a mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from hp_pipeline.port import port


@dataclass(frozen=True)
class TensorLayout:
    """A distributed tensor but for its local tensor and its mesh.

    Attributes:
        kind: its class.
        placements: on its mesh.
        shape: the global shape.
        axes: sizes and names of the mesh's axes.
        place: of the sender on them.
        dtype: as the port describes it.
    """

    kind: type
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    axes: tuple[Any, ...]
    place: tuple[int, ...] | None
    dtype: Any

    @classmethod
    def of(cls, tensor: Any) -> TensorLayout:
        """Describe a distributed tensor."""
        mesh = tensor.device_mesh
        shape, dtype = port().describe(tensor)
        return cls(type(tensor), tuple(tensor.placements), tuple(shape), axes_of(mesh), place_of(mesh), dtype)

    def wrapped(self, local: Any, mesh: Any) -> Any:
        """Return the tensor on a mesh of the same axes."""
        stride = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return self.kind.from_local(local, mesh, self.placements, shape=self.shape, stride=tuple(stride))

    def __str__(self) -> str:
        """Write placements and axes."""
        sizes, names = self.axes
        return f"placements {self.placements} on a mesh of {sizes}" + (f" named {names}" if names else "")


def distributed(value: Any) -> bool:
    """Tell a distributed tensor that can be sent from other values."""
    return port().is_tensor(value) and hasattr(value, "placements") and port().sends_distributed()


def mesh_like(layout: TensorLayout, declared: Any, parameters: Iterable[Any]) -> Any:
    """Find the receiver's mesh for a layout: the declared one, or one that its parameters are on, or axes of these.

    Raises:
        ValueError: there is none with these axes, or this rank has another place on it than the sender on its own.
    """
    sizes, names = layout.axes
    meshes = list(_meshes(declared, parameters))
    for mesh in meshes:
        own = mesh
        if names and own.mesh_dim_names and names != own.mesh_dim_names and set(names) <= set(own.mesh_dim_names):
            own = mesh[names if len(names) > 1 else names[0]]
        if axes_of(own) != layout.axes:
            continue
        if layout.place is not None and place_of(own) != layout.place:
            raise ValueError(
                f"the stage receives a {layout.kind.__name__} of {layout} from the rank at {layout.place} of it, but"
                f" this rank is at {place_of(own)} of {own}. The group of a pipeline must join ranks of the same place."
            )
        return own
    raise ValueError(
        f"the stage receives a {layout.kind.__name__} of {layout}, and has no such mesh (known:"
        f" {', '.join(map(str, meshes)) or 'none'}). Pass"
        " PipelineStage(..., mesh=) with the stage's own mesh of these axes, or return a plain tensor from the stage"
        " before."
    )


def _meshes(declared: Any, parameters: Iterable[Any]) -> Iterator[Any]:
    if declared is not None:
        yield declared
        return
    seen: list[Any] = []
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh not in seen:
            seen.append(mesh)
            yield mesh


def axes_of(mesh: Any) -> tuple[Any, ...]:
    """Return the sizes and names of a mesh's axes."""
    names = mesh.mesh_dim_names
    return tuple(mesh.shape), None if names is None else tuple(names)


def place_of(mesh: Any) -> tuple[int, ...] | None:
    """Return this rank's place on a mesh, None outside of it."""
    place = mesh.get_coordinate()
    return None if place is None else tuple(place)
