"""Functions on local tensors, with DTensors at their border."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import hp_dtensor
from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Placement
from hp_dtensor.spec import normalize
from hp_platform import get_platform

__all__ = ["custom_shard"]


def custom_shard(
    fn: Callable[..., Any],
    device_mesh: DeviceMesh,
    out_placements: Any,
    in_placements: Sequence[Sequence[Placement] | None] | None = None,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """A function that runs ``fn`` on local tensors, with DTensors at its border.

    Args:
        fn: works on this rank's parts.
        device_mesh: the mesh of the results.
        out_placements: placements of the result, or a tuple of them for several results; None for a plain result.
        in_placements: placements that each positional argument must have, None for any and for what is no DTensor.
        redistribute_inputs: bring arguments to ``in_placements``; otherwise others are an error.

    Raises:
        ValueError: an argument with other placements than ``in_placements`` says.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        f = importlib.import_module(f"hp_dtensor.{get_platform().name}.dtensor")
        given = []
        for position, value in enumerate(args):
            wanted = in_placements[position] if in_placements is not None and position < len(in_placements) else None
            if isinstance(value, hp_dtensor.DTensor):
                if wanted is not None:
                    spec = value._spec.with_placements(
                        normalize(
                            wanted, value._spec.mesh, len(value._spec.shape), f"custom_shard: argument {position}"
                        )
                    )
                    if spec is not value._spec:
                        if not redistribute_inputs:
                            raise ValueError(
                                f"custom_shard: argument {position} is placed {value._spec.placements},"
                                f" in_placements says {spec.placements}; pass redistribute_inputs=True to move it"
                            )
                        value = f.redistribute(value, spec)
                value = f.local_of(value)
            given.append(value)
        out = fn(*given, **kwargs)
        several = isinstance(out, (tuple, list))
        placements = out_placements if several else (out_placements,)
        made = [
            value if wanted is None else hp_dtensor.DTensor.from_local(value, device_mesh, wanted)
            for value, wanted in zip(out if several else (out,), placements, strict=True)
        ]
        return tuple(made) if several else made[0]

    return run
