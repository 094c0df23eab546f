"""What a save or a load may leave out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StandardSavePlanner:
    """What each rank writes: of what several ranks have, one rank writes a part.

    Attributes:
        remove_redundancy: write what several ranks have once. Always True: in a checkpoint each element has one place.

    Raises:
        ValueError: it is False.
    """

    remove_redundancy: bool = True

    def __post_init__(self) -> None:
        if self.remove_redundancy is not True:
            raise ValueError(
                f"StandardSavePlanner: remove_redundancy={self.remove_redundancy!r}, but in the files each element has"
                " one place. For a copy of each rank's own, save with no_dist=True into a folder for each rank"
            )


@dataclass(frozen=True, slots=True)
class StandardLoadPlanner:
    """What a load has to find.

    Attributes:
        allow_partial_load: leave tensors and values as they are that the checkpoint lacks. Default False: an error.
    """

    allow_partial_load: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.allow_partial_load, bool):
            raise ValueError(f"StandardLoadPlanner: allow_partial_load={self.allow_partial_load!r}; expected a bool")


def planner_or(planner: object, kind: type[T]) -> T:
    """Return a planner, or the default one of its class for None.

    Raises:
        TypeError: it is of another class.
    """
    if planner is None:
        return kind()
    if not isinstance(planner, kind):
        own = type(planner)
        raise TypeError(f"planner is a {own.__module__}.{own.__qualname__}, expected hp_checkpoint.{kind.__name__}")
    return planner
