"""What reading a plan can find fault with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One fault of a plan.

    Attributes:
        key: where it is, dotted as in the file (`optimizer.lr`, `styles."model.norm"`).
        message: what was got and what was expected, with the numbers.
        fix: what to change.
    """

    key: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}; {self.fix}"


class PlanError(ValueError):
    """A plan that can't be used as it is.

    Attributes:
        findings: everything found, not the first fault only.
    """

    def __init__(self, findings: Iterable[Finding], *, source: str = "the plan") -> None:
        self.findings = tuple(findings)
        count = len(self.findings)
        head = f"{source} has {count} fault{'s' if count != 1 else ''}:"
        super().__init__("\n".join([head, *(f"  {finding}" for finding in self.findings)]))


def near_misses(got: str, known: Iterable[str]) -> str:
    """The advice for a name that isn't known: what was probably meant, or what there is.

    >>> near_misses("stpes", ["steps", "seed"])
    "did you mean 'steps'?"
    """
    names = list(dict.fromkeys(known))
    close = difflib.get_close_matches(got, names, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(repr(name) for name in close)}?"
    if not names:
        return "there is nothing to choose from"
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"choose from {shown}"
