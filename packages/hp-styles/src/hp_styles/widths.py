"""How many features a plain input has, held against the weight that takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hp_dtensor
from hp_dtensor import DeviceMesh, Placement, Shard
from hp_dtensor.extend import local_shape
from hp_styles.shapes import shapes_of_ranks

__all__ = ["Widths", "check_widths"]


class Widths:
    """The features of a plain input, which are cut over the ranks as those of a weight are.

    Args:
        mesh: the style's.
        layout: of the input.
        features: of all ranks; None where they are not known.
    """

    def __init__(self, mesh: DeviceMesh, layout: Placement | tuple[Placement, ...], features: int | None) -> None:
        self.mesh, self.features = mesh, features
        self.placements = (layout,) if isinstance(layout, Placement) else layout
        cut = (local_shape((features or 0,), (Shard(0),), (mesh.size(),), (i,))[0] for i in range(mesh.size()))
        self.parts = list(cut)
        self.compared = len(set(self.parts)) == 1  # a rank alone could have a right one of unequal parts
        self.known = features is not None and mesh.size() > 1


def check_widths(widths: Widths, module: Any, value: Any) -> None:
    """Refuses a plain part that has not as many features as the weight has on this rank.

    Where the ranks' parts are unequal, they compare at the module's first call; features are the model's own, and stay.

    Raises:
        ValueError: on all ranks, where parts are unequal or no rank has as many.
    """
    if not widths.known or isinstance(value, hp_dtensor.DTensor):
        return
    mesh, features, last = widths.mesh, widths.features, len(value.shape) - 1
    if last < 0 or not any(p.is_shard() and p.dim in (-1, last) for p in widths.placements):  # type: ignore[attr-defined]
        return
    shapes = None if widths.compared else shapes_of_ranks([value], mesh)
    widths.compared |= shapes is not None
    mine, ranks = mesh.get_local_rank(), mesh.ranks.reshape(-1).tolist()
    got = {ranks[mine]: value.shape[-1]}
    if shapes is not None:
        got = {rank: row[0][-1] for rank, row in zip(ranks, shapes, strict=True)}
    wanted = dict(zip(ranks, widths.parts, strict=True))
    if any(wanted[rank] != length for rank, length in got.items()):
        widths.compared = widths.compared and shapes is None
        style = getattr(module, "_parallel_style", "parallel style").partition("(")[0]
        raise ValueError(
            f"{style} on {type(module).__name__}: a plain input counts as this rank's part of the {features} features"
            f" that the weight takes, {_listed(wanted)}; got {_listed(got)}, of shape {list(value.shape)} here. Pass"
            f" what a ColwiseParallel of {features} features returns, or a DTensor (use_local_output=False in the style"
            " before, or DTensor.from_local with shape=)"
        )


def _listed(lengths: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank}: {length}" for rank, length in lengths.items())
