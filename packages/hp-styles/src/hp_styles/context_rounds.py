"""When the ranks of a context axis compare what they compute: once a step.

Note [Rounds]
    A rank that alone sees something new (a length, a mask) must not be the only one to ask the others. So they compare
    at the first attention of each kind (a class of modules, causal or not: an encoder's, a decoder's) in each call of
    the module that `parallelize_module` was given, whatever that call's data is, and what comes later in the call is
    held against it on each rank alone. A module that is called outside of such a call is one itself. In backward, where
    checkpoints run modules again, a round ends where a module comes for the second time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Round", "Rounds"]


@dataclass
class Round:
    """Calls of attention that belong together.

    Attributes:
        settled: by what is alike in calls, what the ranks found out about them.
        kept: what is computed once for all, by what it is computed from, which stays alive with it.
        kinds: of modules whose ranks have compared what they compute.
        seen: modules that were called.
        fault: what this rank refuses all of them with.
    """

    settled: dict[Any, Any] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)
    kinds: frozenset[Any] = frozenset()
    seen: set[int] = field(default_factory=set)
    fault: Exception | None = None


class Rounds(threading.local):
    """The rounds of one style, on each thread; see Note [Rounds]."""

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.current = Round()

    def enter(self, root: Any) -> None:
        """A call of what holds the modules of the style begins."""
        if not self.open:
            self.current = Round()
        self.open.append(root)

    def leave(self, root: Any) -> None:
        """It ends, perhaps by an error before it was entered."""
        if self.open and self.open[-1] is root:
            self.open.pop()
            if not self.open:
                self.current = Round()

    def of(self, module: int, *, backward: bool) -> Round:
        """The round of a call of a module that the style is on.

        Args:
            module: its number: alike on all ranks, which its id is not.
            backward: whether autograd runs it again.
        """
        if not self.open and (not backward or module in self.current.seen):
            self.current = Round()
        self.current.seen.add(module)
        return self.current

    def __deepcopy__(self, memo: Any) -> Rounds:
        return Rounds()
