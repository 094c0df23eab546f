"""`[mesh]`: how many ranks there are, and along which axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hp_plan.sections.bounds import at_least

# Outermost first: the innermost axis (tp) has neighbouring ranks. `ep` is none of them: see `MeshSection`.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class MeshSection:
    """Sizes of the mesh axes. An axis of size 1 is left out of the mesh.

    Attributes:
        dp_replicate: data parallel replicas, each a whole copy.
        dp_shard: data parallel ranks that share one copy (fully sharded).
        cp: context parallel.
        tp: tensor parallel.
        pp: pipeline stages.
        ep: expert parallel: over how many ranks experts are spread, of the `dp_shard * cp * tp` that share a copy of
            the model. It is a second view of those ranks (folding), so it adds none: the others of them,
            `dp_shard * cp * tp / ep`, share the experts of one rank.
    """

    dp_replicate: int = at_least(1, 1)
    dp_shard: int = at_least(1, 1)
    cp: int = at_least(1, 1)
    tp: int = at_least(1, 1)
    pp: int = at_least(1, 1)
    ep: int = at_least(1, 1)

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the device mesh, outermost first, and their sizes.

        Never empty: one rank is a `dp_shard` axis of size 1, and replicas always have a `dp_shard` axis inside.
        """
        sizes = {name: getattr(self, name) for name in AXES}
        axes = {name: size for name, size in sizes.items() if size > 1}
        if not axes or set(axes) == {"dp_replicate"} or ("dp_replicate" in axes and "dp_shard" not in axes):
            axes["dp_shard"] = sizes["dp_shard"]
        return {name: axes[name] for name in AXES if name in axes}

    @property
    def described(self) -> str:
        """The axes and their sizes for people, as `dp_shard 2 x tp 4`."""
        return " x ".join(f"{axis} {size}" for axis, size in self.axes.items())

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes over which parameters are sharded: those whose ranks have the same weights and other tokens."""
        return tuple(name for name in ("dp_shard", "cp") if name in self.axes)

    @property
    def world_size(self) -> int:
        """Number of ranks the plan needs: the product of the axes."""
        return math.prod(self.axes.values())

    @property
    def sharing(self) -> int:
        """Number of ranks that share one copy of a stage's parameters; `ep` divides them."""
        return self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Number of parts that the global batch is split into."""
        return self.dp_replicate * self.dp_shard

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on each axis.

        >>> MeshSection(pp=2, dp_shard=2, tp=2).coordinate(6)
        {'pp': 1, 'dp_shard': 1, 'tp': 0}
        """
        places = {}
        for name, size in reversed(self.axes.items()):
            rank, places[name] = divmod(rank, size)
        return {name: places[name] for name in self.axes}
