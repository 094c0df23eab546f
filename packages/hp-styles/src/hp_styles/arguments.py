"""Checks of the arguments that styles have in common: meshes and placements of other libraries have the same names."""

from __future__ import annotations

from typing import Any

from hp_dtensor import DeviceMesh, Placement
from hp_dtensor.extend import kind_of

__all__ = ["check_mesh", "check_placements"]


def check_mesh(mesh: Any, what: str) -> None:
    """Refuses what is no mesh of hp_dtensor.

    Args:
        mesh: the value.
        what: the function or the style, for the error.

    Raises:
        TypeError: it is of another type.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{what}: device_mesh must be a DeviceMesh of hp_dtensor, got {kind_of(mesh)}; create it with"
            " hp_dtensor.init_device_mesh, whose arguments are those of torch's"
        )


def check_placements(style: Any, **layouts: Any) -> None:
    """Refuses what is no placement of hp_dtensor.

    Args:
        style: that the layouts are arguments of.
        layouts: by the argument's name: a placement, several, by name or not, or None.

    Raises:
        TypeError: one is of another type.
    """
    for name, layout in layouts.items():
        if hasattr(layout, "values"):
            layout = tuple(layout.values())
        for value in layout if isinstance(layout, (tuple, list)) else (layout,):
            if value is not None and not isinstance(value, Placement):
                raise TypeError(
                    f"{type(style).__name__}: {name} has {value!r}, a {kind_of(value)}, which is not a placement of"
                    " hp_dtensor: from hp_dtensor import Shard, Replicate"
                )
