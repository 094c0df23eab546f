"""What the outcomes of torch's tests mean: the first rule whose pattern is in an outcome's text names its class."""

from __future__ import annotations

import re
from typing import Any

CLASSES = ("passed", "skipped", "fails on torch", "torch internals", "other on purpose", "refused", "bug", "not judged")

RULES: tuple[tuple[str, str, str], ...] = (
    (r"TorchInternalError: ", "torch internals", "uses a private name"),
    (r"AbsentNameError: ", "other on purpose", "a public name that these packages don't have"),
)
READ: dict[str, tuple[str, str]] = {}


def judge(row: dict[str, Any]) -> tuple[str, str]:
    """Return the class of an outcome, and why."""
    text, outcome = row["text"], row["outcome"]
    if outcome == "passed" and "counted" in row:
        return "other on purpose", "other collectives, right values"
    if outcome in ("passed", "skipped"):
        return outcome, text[:200]
    if row.get("torch") and row["torch"]["outcome"] not in ("passed",):
        return "fails on torch", row["torch"]["outcome"]
    if row["test"] in READ:
        return READ[row["test"]]
    for pattern, kind, why in RULES:
        if re.search(pattern, text):
            return kind, why
    return "not judged", ""
