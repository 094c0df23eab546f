"""The process groups of a mesh: the default group, and the options of the axes' groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hp_dtensor.mesh.axes import MeshValueError
from hp_platform import get_platform
from hp_platform.extend import inside_launcher, launch_command, launcher_place


def start() -> None:
    """Use the device that the launcher assigned, unless the process uses one already, and create the default group."""
    platform, place = get_platform(), launcher_place()
    if place is not None and platform.devices.kind != "cpu":
        used = getattr(platform.devices.device_module(), "is_initialized", None)
        if used is not None and not used():
            platform.devices.set_device(place.local_rank)
    if not platform.groups.is_initialized():
        platform.groups.init_process_group()


def check_world(ranks: np.ndarray) -> None:
    """Raise ValueError if a mesh names ranks outside the world."""
    world = get_platform().groups.size()
    outside = [rank for rank in ranks.reshape(-1).tolist() if not 0 <= rank < world]
    if outside:
        raise MeshValueError(
            f"DeviceMesh: ranks {outside} of {ranks.tolist()} are not in the world of {world} ranks"
            f"{advice_for(max(outside) + 1)}"
        )


def advice_for(ranks: int) -> str:
    """Return what to do where a process that no launcher has started needs so many ranks; empty elsewhere."""
    platform = get_platform()
    if platform.groups.size() > 1 or inside_launcher():
        return ""
    return f"; no launcher started this process: start it with {launch_command(platform.name, ranks)}"


def read_options(override: Any, names: Sequence[str] | None, ndim: int) -> dict[int, Any]:
    """Return the group options of each axis that ``backend_override`` has some for.

    Args:
        override: see ``DeviceMesh``.
        names: the names of the axes.
        ndim: the number of axes.

    Raises:
        ValueError: an unknown or repeated axis, or a different number of values than of axes (each also a
            RuntimeError); or a backend other than the default group's.
    """
    if override is None:
        return {}
    if not isinstance(override, Mapping):
        if isinstance(override, str) or len(override) != ndim:
            raise MeshValueError(
                f"DeviceMesh: backend_override needs one value for each of {ndim} axes, got {override!r}"
            )
        override = dict(enumerate(override))
    options: dict[int, Any] = {}
    for key, value in override.items():
        axis = names.index(key) if names and key in names else key
        if not isinstance(axis, int) or not 0 <= axis < ndim or axis in options:
            expected = f"indices from 0 to {ndim - 1}" + (f" or names of {tuple(names)}" if names else "")
            raise MeshValueError(f"DeviceMesh: backend_override needs {expected}, each axis once, got {list(override)}")
        backend, chosen = (
            value if isinstance(value, tuple) else (value, None) if isinstance(value, str) else (None, value)
        )
        if backend is not None:
            _check_backend(key, str(backend))
        options[axis] = chosen
    return options


def _check_backend(key: Any, backend: str) -> None:
    start()
    default = get_platform().groups.backend()
    if backend.lower() != default:
        raise ValueError(
            f"DeviceMesh: backend_override has {backend!r} for axis {key!r}, but the groups of a mesh use the default"
            f" group's backend, {default!r}: leave it out, or start the ranks with init_process_group({backend!r})"
        )
