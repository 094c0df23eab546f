"""Which groups, parameters and states an optimizer has laid memory out and made plans for.

Note [Roster]
    Programs write into ``param_groups`` and ``state``: new parameters in a group's list, another dictionary in place of
    a group, states that are dropped or replaced. An optimizer that reads both at each step sees it. Ours keep memory
    and plans from step to step, for the objects that there were, so each step begins by comparing these, by identity:
    another parameter may have equal values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

_NOTHING: Mapping[Any, Any] = {}


class Roster:
    """The groups, parameters and states of an optimizer at one time; see Note [Roster].

    Args:
        groups: its ``param_groups``.
        state: by parameters.

    Attributes:
        groups: the dictionaries.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]] = (), state: Mapping[Any, Any] = _NOTHING) -> None:
        self.groups = list(groups)
        self._parameters = [list(group["params"]) for group in groups]
        self._keys, self._states = list(state), list(state.values())

    def holds(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> bool:
        """Tell whether groups, parameters and states are those of this roster, in its order.

        Args:
            groups: as they are now.
            state: as it is now.
        """
        return (
            len(groups) == len(self.groups)
            and all(map(is_, groups, self.groups))
            and all(map(self.has, range(len(groups)), groups))
            and len(state) == len(self._keys)
            and all(map(is_, state, self._keys))
            and all(map(is_, state.values(), self._states))
        )

    def has(self, number: int, group: Mapping[str, Any]) -> bool:
        """Tell whether a group has the parameters that the group of this number had.

        Args:
            number: of the group.
            group: as it is now.
        """
        if number >= len(self._parameters):
            return False
        now, before = group["params"], self._parameters[number]
        return len(now) == len(before) and all(map(is_, now, before))
