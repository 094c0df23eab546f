"""Diagnostics of a plan: what is wrong with it and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnostic:
    """One error in a plan.

    Attributes:
        key: its key, dotted as in the file (`optimizer.lr`, `styles."model.norm"`).
        message: the value and what was expected, with the numbers.
        fix: what to change.
    """

    key: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}; {self.fix}"


class PlanError(ValueError):
    """A plan that cannot be used as it is.

    Attributes:
        diagnostics: all of them, not only the first.
    """

    def __init__(self, diagnostics: Iterable[Diagnostic], *, source: str = "the plan") -> None:
        self.diagnostics = tuple(diagnostics)
        count = len(self.diagnostics)
        head = f"{source} has {count} error{'s' if count != 1 else ''}:"
        super().__init__("\n".join([head, *(f"  {diagnostic}" for diagnostic in self.diagnostics)]))


def close_names(got: str, choices: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """Return the names that an unknown one may be a slip of, three at most.

    >>> close_names("stpes", ["steps", "seed"])
    ['steps']
    """
    return difflib.get_close_matches(got, list(choices), n=3, cutoff=cutoff)


def near_misses(got: str, choices: Iterable[str]) -> str:
    """Suggest the names closest to an unknown one, or list the known names.

    >>> near_misses("stpes", ["steps", "seed"])
    "did you mean 'steps'?"
    """
    names = list(dict.fromkeys(choices))
    close = close_names(got, names)
    if close:
        return f"did you mean {' or '.join(repr(name) for name in close)}?"
    if not names:
        return "there is nothing to choose from"
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"choose from {shown}"
