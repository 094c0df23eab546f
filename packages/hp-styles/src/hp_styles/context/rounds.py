"""Rounds: the ranks of a context axis compare what they compute once per step.

Note [Rounds]
    A rank that alone sees something new (a length, a mask) must not be the only one to ask the others. So they compare
    at the first attention of each kind (a class of modules, causal or not: an encoder's, a decoder's) in each call of
    the module that `parallelize_module` was given, whatever that call's data is, and what comes later in the call is
    held against it on each rank alone. A module that is called outside of such a call is one itself. In backward, where
    checkpoints run modules again, a round ends where a module comes for the second time.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Round:
    """Calls of attention that belong together.

    Attributes:
        settled: results of comparisons, by what they apply to.
        kept: results that are computed once, by their inputs, which stay alive with them.
        kinds: results of comparisons, by the kind of module.
        seen: modules that were called.
        fault: the error that this rank raises for all of them.
        met: number of calls of each module's attention.
        late: an error that this rank found too late to tell the others.
        followed: groups of ranks with attention that compared nothing.
    """

    settled: dict[Any, Any] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)
    kinds: dict[Any, Any] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    fault: Exception | None = None
    met: dict[int, int] = field(default_factory=dict)
    late: Exception | None = None
    followed: dict[Any, Any] = field(default_factory=dict)

    def place(self, module: int) -> tuple[int, int]:
        """Count one more attention of a module; its place is alike on all ranks, and in all rounds."""
        self.met[module] = self.met.get(module, 0) + 1
        return module, self.met[module]


class Rounds(threading.local):
    """The rounds of one style, on each thread; see Note [Rounds].

    Attributes:
        open: modules that are called, from the outermost on.
        current: the round.
        follows: places whose attention follows the first of its kind, with what each expects; Note [Later attention].
    """

    def __init__(self) -> None:
        self.follows: dict[Any, Any] = {}
        self.open: list[Any] = []
        self.current = Round()

    def enter(self, root: Any, *, anew: bool = False) -> None:
        """Begin a call of the module around those of the style; with ``anew``, an open one was ended by an error."""
        if anew:
            self.open = list(itertools.takewhile(lambda each: each is not root, self.open))
        if not self.open:
            self.current = Round()
        self.open.append(root)

    def leave(self, root: Any) -> None:
        """End the call, perhaps by an error before it was entered."""
        if self.open and self.open[-1] is root:
            self.open.pop()
            if not self.open:
                self.current = Round()

    def of(self, module: int, *, backward: bool) -> Round:
        """Return the round of a call of a module that has the style.

        Args:
            module: its number: alike on all ranks, which its id is not.
            backward: autograd runs it again.
        """
        if not self.open and (not backward or module in self.current.seen):
            self.current = Round()
        self.current.seen.add(module)
        return self.current

    def __deepcopy__(self, memo: Any) -> Rounds:
        return Rounds()
