"""The ranks of a context axis, their Ulysses groups and rings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor import DeviceMesh
from hp_platform import get_platform
from hp_styles.context.plan import Degrees
from hp_styles.context.ring import Links


@dataclass(frozen=True)
class UlyssesAxes:
    """Between which ranks heads are exchanged for parts of the sequence, and on which dims.

    Attributes:
        group: the process group.
        size: its ranks.
        head_dim: the dim that has the heads.
        seq_dim: the dim that has the sequence.
        load_balance: each rank holds a chunk of the head and one of the tail.
    """

    group: Any
    size: int
    head_dim: int
    seq_dim: int
    load_balance: bool


class ContextRanks:
    """The ranks that a sequence is sharded over.

    Args:
        mesh: of one axis.
        load_balance: each rank holds a chunk of the head and one of the tail.
        style: the name of the style, for errors.

    Raises:
        ValueError: the ranks do not ascend along the axis, or this one is not among them.
    """

    def __init__(self, mesh: DeviceMesh, load_balance: bool, style: str) -> None:
        self.mesh = mesh
        self.load_balance = load_balance
        self.style = style
        self.ranks: list[int] = mesh.ranks.reshape(-1).tolist()
        self.size = len(self.ranks)
        if self.ranks != sorted(self.ranks):
            raise ValueError(
                f"{style}: the ranks along the context axis are {self.ranks}; they must ascend, as in a mesh made by"
                " init_device_mesh"
            )
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"{style}: this rank is not in the mesh of ranks {self.ranks}")
        self.place = coordinate[0]

    def subgroup(self, places: range) -> Any:
        """Return the process group of some places; None for one alone."""
        if len(places) == 1:
            return None
        ranks = [self.ranks[place] for place in places]
        return self.mesh.get_group() if len(places) == self.size else get_platform().groups.new_group(ranks)

    def links(self, degrees: Degrees, empty_like: Callable[[Any], Any]) -> Links:
        """Return the links of this rank's ring.

        Args:
            degrees: how the ranks are divided.
            empty_like: allocates a tensor of the framework.
        """
        whole, inner = (self.subgroup(ranks(self.place)) for ranks in (degrees.ring_ranks, degrees.inner_ranks))
        return Links(whole, inner, degrees, self.place // degrees.ulysses, empty_like)

    def check_halves(self, x: Any, name: str, seq_dim: int) -> None:
        """Refuse a part that is not a chunk of the head and one of the tail.

        Raises:
            ValueError: an odd length with ``load_balance``.
        """
        shape = tuple(x.shape)
        if self.load_balance and shape[seq_dim] % 2:
            raise ValueError(
                f"{self.style}: load_balance needs two equal chunks per rank, but {name} of shape {shape} has"
                f" length {shape[seq_dim]} (dim {seq_dim}); shard the sequence with context_parallel_shard"
            )
