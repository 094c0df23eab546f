"""What Muon's ranks agree on: who exchanges what with whom, and by which hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_optim.muon.newton_schulz import Orthogonalization
from hp_optim.torch.exchanges.bucket import Bucket


@dataclass(frozen=True)
class Look:
    """What a plan is for.

    Attributes:
        edition: of the members.
        trains: whether a parameter is trained, for each.
        settings: of each group.
        layouts: of the parameters; they change where experts move to other ranks.
    """

    edition: int
    trains: list[bool]
    settings: list[Orthogonalization]
    layouts: list[Any]


@dataclass(frozen=True, eq=False)
class Plan:
    """What all ranks have agreed on.

    Attributes:
        look: what it is for.
        world: the ranks.
        buckets: those that several ranks exchange come first.
        places: of each bucket, the numbers of its members.
        groups: those with members that several ranks exchange.
        lines: a description of what ranks exchange, the same on all of them.
    """

    look: Look
    world: list[int]
    buckets: list[Bucket]
    places: list[list[int]]
    groups: list[int]
    lines: list[str]

    @property
    def shared(self) -> bool:
        """Whether several ranks exchange something."""
        return self.buckets[0].shared if self.buckets else False
